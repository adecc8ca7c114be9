"""Refusals name options on the command line and settings in Python."""

from __future__ import annotations

import re
from typing import Any

import mlx.nn as nn
import pytest
from mlx_lm.models import cache as stock

from mlx_kv import CachePolicy, make_prompt_cache
from mlx_kv.cli.main import command as group
from mlx_kv.cli.wording import SETTINGS, in_options
from mlx_kv.settings import SettingError


class Recurrent(nn.Module):
    """No layer of it has a budget."""

    def make_cache(self) -> list[Any]:
        return [stock.ArraysCache(2)]


# What the library says, and what stands for it on the command line; words that only look like settings stay.
SAID = {
    "bits is 7: a quantised cache has 2, 3 bits": "--kv-bits 7: a quantised cache has 2, 3 bits",
    "group_size is 'x': choose": "--kv-group-size x: choose",
    "not a multiple of group_size=48; use group_size=32 or 64": "not a multiple of --kv-group-size 48; "
    "use --kv-group-size 32 or 64",
    "got bits=8 and codec='mxfp8', which both describe": "got --kv-bits 8 and --kv-codec mxfp8, which both describe",
    "use bits=None: no group fits": "leave out --kv-bits: no group fits",
    "quantized_start is 9, but bits is None: say": "--quantized-kv-start 9, but --kv-bits is not given: say",
    "a budget and max_kv_size, give one": "a budget and --max-kv-size, give one",
    "margin is -1: give more": "--kv-margin -1: give more",
    "use share='layer' or keep_recent=65": "use --kv-share layer or --kv-keep-recent 65",
    "the prompt is empty, the model is none of 3 bits": "the prompt is empty, the model is none of 3 bits",
    "cannot read /max_tokens/max_kv_size.json: a folder": "cannot read /max_tokens/max_kv_size.json: a folder",
    "CachePolicy(max_rollback=...) is no option": "CachePolicy(max_rollback=...) is no option",
}


@pytest.mark.parametrize("said", SAID)
def test_settings_become_options(said: str) -> None:
    assert in_options(ValueError(said), group.commands["generate"]) == SAID[said]


def test_a_command_speaks_of_its_own_options() -> None:
    said = ValueError("keep_recent is 99, bits is 7, rows is 0")
    assert in_options(said, group.commands["eval"]) == "--keep-recent 99, --kv-bits 7, --rows 0"
    assert in_options(said, group.commands["generate"]) == "--kv-keep-recent 99, --kv-bits 7, rows is 0"


def test_names_that_are_ordinary_words_come_with_the_error() -> None:
    with pytest.raises(SettingError, match=r"^score, margin is for a budget, but budget is None: ") as refused:
        CachePolicy(margin=3, score="recent")
    words = in_options(refused.value, group.commands["generate"])
    assert {"--kv-margin", "--kv-score"} == set(re.findall(r"--kv-\w+", words.partition(" is for a budget, ")[0]))
    with pytest.raises(SettingError, match="no layer of this model can honour budget: its caches") as refused:
        make_prompt_cache(Recurrent(), CachePolicy(budget=100))
    assert "can honour --kv-budget" in in_options(refused.value, group.commands["generate"])


def test_every_option_of_a_policy_sets_something_that_exists() -> None:
    fields = set(CachePolicy.__dataclass_fields__)
    params = {param.name for param in group.commands["plan"].params if param.name in SETTINGS}
    assert params == set(SETTINGS)
    assert set(SETTINGS.values()) <= fields
