"""What all of a process shares is changed by one at a time, also where garbage is collected in the middle of it."""

from __future__ import annotations

import gc
import importlib
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
from families import shared_family

from mlx_kv.mlxlm import attention
from mlx_kv.mlxlm.attention import AttentionPatch, Changes


def test_what_is_asked_for_within_a_change_comes_after_it() -> None:
    changes, made = Changes(), []

    def first() -> None:
        made.append("begun")
        changes.make(lambda: changes.make(lambda: made.append("third")) or made.append("second"))
        made.append("ended")

    changes.make(first)
    assert made == ["begun", "ended", "second", "third"]


def test_a_change_that_fails_is_in_the_way_of_no_other() -> None:
    changes, made = Changes(), []

    def fails() -> None:
        changes.make(lambda: made.append("later"))
        raise OSError("no")

    with pytest.raises(OSError, match="no"):
        changes.make(fails)
    changes.make(lambda: made.append("next"))
    assert made == ["later", "next"]


def test_a_change_is_made_when_its_thread_goes_on() -> None:
    changes, counted = Changes(), [0]

    def count() -> None:
        before = counted[0]
        time.sleep(0)  # others have their turn
        counted[0] = before + 1

    def often() -> None:
        for _ in range(200):
            before = counted[0]
            changes.make(count)
            assert counted[0] > before

    threads = [threading.Thread(target=often) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert counted == [800]


class Collecting(dict[int, Any]):
    """Garbage is collected in the middle of a look at its values."""

    def values(self) -> Any:
        seen = super().values()

        class Values:
            def __reversed__(self) -> Iterator[Any]:
                found = reversed(seen)
                gc.collect()
                yield from found

        return Values()


@pytest.mark.slow
def test_a_seam_may_end_while_another_is_made() -> None:
    model, qwen3 = shared_family("qwen3"), importlib.import_module("mlx_lm.models.qwen3")
    gc.collect()
    own = qwen3.scaled_dot_product_attention
    stays = AttentionPatch(model)
    attention._patched[qwen3].patches = Collecting(attention._patched[qwen3].patches)
    lost: list[Any] = [AttentionPatch(model)]
    lost.append(lost)  # a circle: it ends when garbage is collected, and not before
    del lost
    again = AttentionPatch(model)
    assert len(attention._patched[qwen3].patches) == 2
    stays.close()
    assert qwen3.scaled_dot_product_attention is not own
    again.close()
    assert qwen3.scaled_dot_product_attention is own
    assert qwen3 not in attention._patched
