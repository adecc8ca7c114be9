"""A store in an object store of several machines: few requests, and none outlasts its deadline."""

from __future__ import annotations

import copy
import time
import uuid
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
from conversations import STEPS, Reference, conversation, goes_on_as, named
from hypothesis import given, settings
from places import Place
from s3 import BUCKET, ObjectStore, object_store
from two_ranks import TwoRanks, keep

from mlx_kv import PromptStore

pytestmark = pytest.mark.usefixtures("small_blocks")
QUICK = 0.3  # seconds, as a deadline
SOON = 8.0  # far less than an endpoint that hangs would take, and far more than a deadline on a busy machine


@pytest.fixture(scope="module")
def objects() -> Iterator[ObjectStore]:
    with object_store() as running:
        yield running


@pytest.fixture
def far(objects: ObjectStore, monkeypatch: pytest.MonkeyPatch) -> Iterator[Place]:
    """A fresh prefix, without a folder."""
    monkeypatch.setattr("mlx_kv.prefixes.blob_store.RETRY_AFTER", 0.0)
    yield Place(f"s3://{BUCKET}/{uuid.uuid4().hex}/prompts")
    objects.go_on()
    objects.refused.clear()


def test_what_one_keeps_another_finds(objects: ObjectStore, far: Place) -> None:
    """On a fresh prefix; the other one looked before anything was there."""
    one, other = far.store(), far.store()
    assert other.find([*conversation(0)[0], 0]) is None
    for number in range(3):
        assert one.keep(*conversation(number))
    for number in range(3):
        found = other.find([*conversation(number)[0], 0])
        assert found is not None
        assert goes_on_as(found[0], conversation(number)[1], 240)
    assert far.held == far.blocks
    assert far.array_bytes == one.bytes_live == other.bytes_live
    assert not one.keep(*conversation(1))


def test_it_asks_for_little(objects: ObjectStore, far: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    store = far.store()

    def asked(what: Any) -> Counter[str]:
        return objects.count(lambda: (what(), None))

    put = asked(lambda: store.keep(*conversation(0)))
    assert put == {"GET list": 2, "PUT block": 7, "PUT safetensors": 1, "PUT json": 1}
    put = asked(lambda: store.keep(*conversation(1)))  # lists again before it removes a block without references
    assert put == {"GET list": 2, "PUT block": put["PUT block"], "PUT safetensors": 1, "PUT json": 1}
    assert put["PUT block"] <= 2
    hit = asked(lambda: store.find([*conversation(0)[0], 0]))
    assert hit == {"GET list": 1, "GET safetensors": 1, "GET block": 7}
    other = far.store()
    hit = asked(lambda: other.find([*conversation(0)[0], 0]))
    assert hit == {"GET list": 1, "GET json": 2, "GET safetensors": 1, "GET block": 7}
    hit = asked(lambda: other.find([*conversation(0)[0], 0]))
    assert hit == {"GET list": 1, "GET safetensors": 1, "GET block": 7}
    assert asked(lambda: other.find([5] * 100)) == {"GET list": 1}
    assert asked(lambda: other.keep(*conversation(1))) == {"GET list": 1}  # it is there
    monkeypatch.setattr("mlx_kv.prefixes.store.TOUCH_EVERY", 0.0)  # when it was last of use is said once a minute
    assert asked(lambda: other.keep(*conversation(1))) == {"GET list": 1, "PUT used": 1}


def test_two_ranks_have_their_parts_there(objects: ObjectStore, far: Place) -> None:
    """Two others find both; a call without an answer ends at its deadline."""
    ranks = TwoRanks()
    assert keep(ranks, ranks.store(far.url, deadline=20.0), *conversation(0))
    others = TwoRanks()
    store = others.store(far.url, deadline=20.0)
    found = store.find([*conversation(0)[0], 0])
    assert found is not None
    assert goes_on_as(others.whole(found[0]), conversation(0)[1], 240)
    objects.hang()
    store.deadline = QUICK
    assert store.find([*conversation(0)[0], 0]) is None
    assert keep(others, store, *conversation(1)) is False


def test_what_was_of_no_use_leaves(far: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    """By the dates that a look at all files tells, which the object store has in whole seconds."""
    monkeypatch.setattr("mlx_kv.prefixes.store.TOUCH_EVERY", 0.0)
    kept = [conversation(number, system=number, own=240 - number) for number in range(4)]
    one, other = (far.store(max_bytes=3 * kept[0][1][0].nbytes_live * 2) for _ in range(2))
    for tokens, caches in kept[:3]:
        one.keep(tokens, caches)
    time.sleep(1.1)
    assert other.find([*kept[0][0], 0]) is not None
    time.sleep(1.1)
    one.keep(*kept[3])
    found = [far.store().find([*tokens, 0]) is not None for tokens, _ in kept]
    assert found[0]
    assert found[3]
    assert sum(found) == 3
    assert far.held == far.blocks


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["8 bits", "a window beside all"])
@settings(max_examples=3, deadline=None)
@given(steps=STEPS)
def test_whatever_is_kept_and_found(kind: str, steps: list[tuple[Any, ...]], objects: ObjectStore) -> None:
    place, reference = Place(f"s3://{BUCKET}/{uuid.uuid4().hex}"), Reference()
    stores = [place.store(deadline=20.0) for _ in range(2)]
    for turn, (what, *arguments) in enumerate(steps):
        if what == "keep":
            tokens, caches = reference.grow(kind, *arguments)
            reference.kept.setdefault(tuple(tokens), copy.deepcopy(caches))
            if stores[turn % 2].keep(tokens, caches):
                reference.kept[tuple(tokens)] = copy.deepcopy(caches)
        elif what == "find" and reference.kept:
            tokens = list(list(reference.kept)[arguments[0] % len(reference.kept)])
            tokens = [*tokens[: len(tokens) - arguments[1]], 99]
            there = stores[turn % 2].serves(tokens)
            found = stores[turn % 2].find(tokens)
            assert (0 if found is None else found[1]) >= there
    for name, entry in stores[0].entries().items():
        tokens = list(memoryview(entry.tokens).cast("B").tobytes()[3::4])
        caches = stores[0]._layout.read(name, stores[0]._table[name]).restore().caches
        assert goes_on_as(caches, reference.kept[tuple(tokens)], len(tokens))
    assert (stores[0].damaged, stores[0]._ignored, stores[0].unanswered) == (0, set(), 0)


def test_damaged_blocks_are_set_aside(far: Place) -> None:
    store = far.store()
    store.keep(*conversation(0))
    block = sorted(far.blocks)[0]
    far.put({f"{block}.block": far.read(f"{block}.block")[:-1]})
    assert far.store().find([*conversation(0)[0], 0]) is None
    assert len([name for name in far.names() if name.startswith("damaged/")]) == 2
    assert store.find([*conversation(0)[0], 0]) is None
    assert store.keep(*conversation(0))
    assert far.store().find([*conversation(0)[0], 0]) is not None


# --- an endpoint that hangs, refuses, or is gone ----------------------------------------------------------------------


@pytest.mark.parametrize("trouble", ["hangs", "is gone"])
def test_no_call_outlasts_the_deadline(
    trouble: str, objects: ObjectStore, far: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever is asked comes to nothing; when it answers again, all is as before."""
    store = far.store(deadline=QUICK)
    assert far.store(deadline=SOON).keep(*conversation(0))
    (objects.hang if trouble == "hangs" else objects.stop)()
    try:
        began = time.monotonic()
        assert store.find([*conversation(0)[0], 0]) is None
        assert store.keep(*conversation(1)) is False
        late = far.store(deadline=QUICK)  # a server may start meanwhile
        assert late.find([*conversation(0)[0], 0]) is None
        assert time.monotonic() - began < SOON
        assert (store.unanswered, late.unanswered) == (2, 1)
        # For some seconds it is not even asked.
        monkeypatch.setattr("mlx_kv.prefixes.blob_store.RETRY_AFTER", 1000.0)
        store.find([*conversation(0)[0], 0])
        asked = Counter(objects.asked)
        assert store.find([*conversation(0)[0], 0]) is None
        assert objects.asked == asked
    finally:
        objects.go_on()
        if trouble == "is gone":
            objects.start()
    late.deadline = SOON  # on a busy machine all that a hit takes has its time
    found = late.find([*conversation(0)[0], 0])
    assert found is not None
    assert goes_on_as(found[0], conversation(0)[1], 240)
    assert late.keep(*conversation(1))


def test_what_is_refused_once_is_read_the_next_time(objects: ObjectStore, far: Place) -> None:
    """An index, then data: neither is forgotten."""
    far.store().keep(*conversation(0))
    store = far.store()
    for kind in ("GET json", "GET safetensors", "GET list"):
        objects.refused = {kind}
        assert store.find([*conversation(0)[0], 0]) is None
        objects.refused = set()
    assert store.find([*conversation(0)[0], 0]) is not None
    assert named(store, conversation(0)[0])
    for kind in ("PUT block", "PUT json", "PUT safetensors"):
        objects.refused = {kind}
        assert store.keep(*conversation(1)) is False
        objects.refused = set()
    assert store.keep(*conversation(1))
    assert far.store().find([*conversation(1)[0], 0]) is not None
    assert store.damaged == 0


def test_places_that_cannot_be_are_refused(objects: ObjectStore, far: Place) -> None:
    with pytest.raises(
        ValueError, match=r"cannot keep prompts in s3://nowhere/a: .*bucket does not exist; give another"
    ):
        PromptStore("s3://nowhere/a")
    objects.refused = {"GET list"}
    with pytest.raises(ValueError, match=r"cannot keep prompts in s3://.*not now"):
        far.store()
    objects.refused = set()
    far.put({"holiday.jpg": b"a beach"})
    with pytest.raises(ValueError, match=r"it is not a prompt store and holds holiday\.jpg"):
        far.store()
    with pytest.raises(ValueError, match="deadline is 0: give a number of seconds above 0"):
        far.store(deadline=0)
    objects.hang()
    store = far.store(deadline=QUICK)  # it can not be checked yet
    objects.go_on()
    with pytest.raises(ValueError, match=r"it is not a prompt store and holds holiday\.jpg"):
        store.refresh()
