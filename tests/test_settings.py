"""Fields that describe themselves: their check, and errors in the caller's terms."""

from __future__ import annotations

import math
import subprocess
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from calibrations import random_calibration
from hypothesis import example, given
from hypothesis import strategies as st

from mlx_kv import CachePolicy, SamplingSettings
from mlx_kv.cache.codecs import Affine
from mlx_kv.cache.growth import FixedStep, Geometric, Tapered
from mlx_kv.generation.speculation import DraftSettings
from mlx_kv.settings import SettingError, check_settings, setting, settings_of


@dataclass(frozen=True)
class Server:
    port: int = setting(8080, option="--port", minimum=0, maximum=65535, help="Port.")
    wait: float = setting(0.5, option=("--wait", "-w"), above=0, served=(0, 10), help="Longest wait in seconds.")
    rate: float | None = setting(None, help="Rate.")
    queue: int = setting(None, minimum=1, unit="tokens", help="Queue; None is decided later.")
    level: str = setting("info", choices=("info", "debug"), help="Level.")
    strict: bool = setting(False, option="--strict", help="Strict.")
    anything: Any = setting((), help="Checked elsewhere.")
    bare: int = -5  # no description: no check

    def __post_init__(self) -> None:
        check_settings(self)


@pytest.mark.parametrize(
    "given",
    [
        {"port": 0},
        {"port": np.int64(65535)},
        {"wait": 1},
        {"wait": np.float32(0.5)},
        {"rate": None},
        {"rate": -1e300},
        {"queue": None},
        {"queue": 2**31 - 1},
        {"level": "debug"},
        {"strict": True},
        {"anything": "x"},
    ],
)
def test_values_within_their_description_pass(given: dict[str, Any]) -> None:
    Server(**given)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"port": -1}, "port is -1: give a whole number from 0 to 65,535"),
        ({"port": 65536}, "port is 65536: give a whole number from 0 to 65,535"),
        ({"port": 80.0}, "port is 80.0: give a whole number from 0 to 65,535"),
        ({"port": True}, "port is True: give a whole number from 0 to 65,535"),
        ({"port": "80"}, "port is '80': give a whole number from 0 to 65,535"),
        ({"port": None}, "port is None: give a whole number from 0 to 65,535"),
        ({"port": np.array([1, 2])}, "port is array([1, 2]): give a whole number from 0 to 65,535"),
        ({"wait": 0}, "wait is 0: give a number above 0"),
        ({"wait": False}, "wait is False: give a number above 0"),
        ({"wait": math.nan}, "wait is nan: give a number above 0"),
        ({"wait": math.inf}, "wait is inf: give a number above 0"),
        ({"rate": -math.inf}, "rate is -inf: give a finite number"),
        ({"rate": 10**400}, "give a finite number"),
        ({"queue": 0}, "queue is 0: give a whole number of tokens from 1 up"),
        ({"queue": 2**31}, "queue is 2147483648: give a whole number of tokens from 1 to 2,147,483,647"),
        ({"level": "trace"}, "level is 'trace': choose one of info, debug"),
        ({"level": 3}, "level is 3: choose one of info, debug"),
        ({"strict": 1}, "strict is 1: give True or False"),
    ],
)
def test_other_values_are_refused_in_one_line(given: dict[str, Any], message: str) -> None:
    with pytest.raises(SettingError) as refused:
        Server(**given)
    assert str(refused.value).endswith(message)
    assert "\n" not in str(refused.value)


def test_descriptions_follow_the_order_of_fields_and_know_their_kind() -> None:
    found = settings_of(Server)
    assert list(found) == ["port", "wait", "rate", "queue", "level", "strict", "anything"]
    kinds = [found[name].kind for name in ("port", "wait", "rate", "level", "strict", "anything")]
    assert kinds == [int, float, float, str, bool, None]
    assert found["wait"].options == ("--wait", "-w")
    assert found["wait"].served == (0, 10)


# What Python users read, and what stands for it on the command line and in a request.
OPTIONS = {"bits": "--kv-bits", "group_size": "--kv-group-size", "share": "--kv-share", "layers": "cache.layers"}
RENDERED: dict[str, tuple[SettingError, str, str]] = {
    "stated": (SettingError("{bits:is}: no", bits=7), "bits is 7: no", "--kv-bits 7: no"),
    "stated text": (SettingError("{share:is}", share="all"), "share is 'all'", "--kv-share all"),
    "pair": (SettingError("{bits:is}", bits=(8, None)), "bits is (8, None)", "--kv-bits 8,none"),
    "not given": (SettingError("{bits:is}", bits=None), "bits is None", "--kv-bits is not given"),
    "argument": (SettingError("{group_size:=}", group_size=48), "group_size=48", "--kv-group-size 48"),
    "another value": (
        SettingError("use {share:='layer'} or 'head'"),
        "use share='layer' or 'head'",
        "use --kv-share layer or 'head'",
    ),
    "value from parts": (
        SettingError("use {group_size:={0}}", "32 or 64"),
        "use group_size=32 or 64",
        "use --kv-group-size 32 or 64",
    ),
    "omitted": (SettingError("{bits:omit}: why"), "use bits=None: why", "leave out --kv-bits: why"),
    "name": (SettingError("{bits} and {reserve}"), "bits and reserve", "--kv-bits and reserve"),
    "field": (SettingError("{layers:is}", layers="x"), "layers is 'x'", "cache.layers is 'x'"),
    "parts with braces": (SettingError("{}: {bits}", "{bits}"), "{bits}: bits", "{bits}: --kv-bits"),
}


@pytest.mark.parametrize("case", RENDERED)
def test_an_error_is_rendered_with_the_callers_names(case: str) -> None:
    error, python, other = RENDERED[case]
    assert str(error) == python
    assert error.render(OPTIONS) == other


def test_long_values_are_cut() -> None:
    assert len(str(SettingError("{bits:is}", bits="x" * 1000))) < 80


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: SamplingSettings(temperature=True), "temperature is True: give a number from 0 up"),
        (lambda: SamplingSettings(top_k=True), "top_k is True: give a whole number from 0 up"),
        (
            lambda: DraftSettings(num_draft_tokens=2.5),
            "num_draft_tokens is 2.5: give a whole number of tokens from 1 up",
        ),  # type: ignore[arg-type]
        (lambda: CachePolicy(max_write=True), "max_write is True: give a whole number of tokens from 1 up"),
        (lambda: CachePolicy(budget=1.5), "budget is 1.5: give a whole number of tokens from 1 up"),  # type: ignore[arg-type]
    ],
)
def test_settings_of_the_library_check_themselves(make: Any, message: str) -> None:
    with pytest.raises(SettingError) as refused:
        make()
    assert str(refused.value) == message


def test_settings_are_imported_without_mlx() -> None:
    code = (
        "import sys, mlx_kv.generation.settings, mlx_kv.generation.speculation, mlx_kv.policy_settings;"
        "mlx_kv.generation.settings.SamplingSettings(top_p=0.5);"
        "print([name for name in sys.modules if name.partition('.')[0] in ('mlx', 'mlx_lm', 'numpy')])"
    )
    root = Path(__file__).parent.parent
    done = subprocess.run([sys.executable, "-c", code], cwd=root, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


# --- settings and the policy that they make ---------------------------------------------------------------------------

TABLES = [[[1, 2], [3, 4]], [[1], [2]]]
CALIBRATIONS = [None, random_calibration(2, 8, 2), replace(random_calibration(2, 8, 2), layers=())]
CHOSEN = st.fixed_dictionaries(
    {},
    optional={
        "bits": st.sampled_from([None, 4, 8, (8, 4)]),
        "codec": st.sampled_from([None, "rotated", Affine(4, 64)]),
        "growth": st.sampled_from([Tapered(), Geometric(), FixedStep(512)]),
        "quantized_start": st.sampled_from([0, 100]),
        "residual_length": st.sampled_from([0, 8]),
        "max_kv_size": st.sampled_from([None, 500]),
        "budget": st.sampled_from([None, 100, np.int64(200)]),
        "keep_recent": st.sampled_from([None, 8, 32]),
        "sinks": st.sampled_from([4, 1]),
        "score": st.sampled_from([None, "key_norm", "fitted", "key_diff"]),
        "share": st.sampled_from([None, "layers", "layer", "head", "adaptive"]),
        "margin": st.sampled_from([None, 16]),
        "layers": st.sampled_from([None, "uniform", "calibrated", *TABLES]),
        "calibration": st.sampled_from(CALIBRATIONS),
    },
)


def policy_of(options: dict[str, Any]) -> CachePolicy | None:
    """The policy of some settings; None where they do not go together."""
    try:
        return CachePolicy(**options)
    except ValueError:
        return None


@example({"budget": 100, "layers": TABLES[0]}, {})
@example({"budget": 100, "calibration": CALIBRATIONS[1], "layers": "uniform"}, {"budget": 100})
@example({"budget": 100, "calibration": CALIBRATIONS[1], "share": "layers"}, {"budget": 100})
@given(CHOSEN, CHOSEN)
def test_settings_make_the_same_policy(options: dict[str, Any], others: dict[str, Any]) -> None:
    policy, other = policy_of(options), policy_of(others)
    if policy is not None:
        assert CachePolicy(**policy.settings()) == policy
        assert all(policy_of({**policy.settings(), name: value}) == policy for name, value in policy.settings().items())
        if other is not None:
            assert (policy.settings() == other.settings()) == (policy == other) == (str(policy) == str(other))


def test_a_table_is_for_a_budget() -> None:
    with pytest.raises(ValueError, match="layers is for a budget"):
        CachePolicy(layers=[[1], [2]])
