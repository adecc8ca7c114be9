"""Prompts are read once: the same tokens out, almost none of the prefix read again, in any process, on any cache."""

from __future__ import annotations

import random
import shutil
import threading
import time
import uuid
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import pytest
from effort import THOROUGH
from mlx_lm.generate import generate_step
from processes import start
from tiny_models import VOCAB, make_model

from mlx_kv import CachePolicy, PromptMemory, PromptStore, load_prompt_cache, make_prompt_cache
from mlx_kv.prefixes.index import MIN_SHARED, packed
from mlx_kv.prefixes.reader import PromptReader
from mlx_kv.prefixes.store import MARKER

PREFIX = mx.random.randint(1, VOCAB, (3000,), key=mx.random.key(0)).tolist()
FIRST, SECOND = ([*PREFIX, *mx.random.randint(1, VOCAB, (40,), key=mx.random.key(i)).tolist()] for i in (1, 2))
TABLE = ((3.0, 0.1), (1.0, 0.5), (0.0, 1.4))  # of three layers of two heads
KINDS: dict[str, tuple[str, CachePolicy]] = {
    "plain": ("llama", CachePolicy()),
    "quantised": ("llama", CachePolicy(bits=8, group_size=32)),
    "the newest as they came": ("llama", CachePolicy(bits=4, group_size=32, residual_length=6)),
    "rotated, bits apart": ("llama", CachePolicy(bits=(8, 4), group_size=32, codec="rotated")),
    "mxfp8 and nvfp4": ("llama", CachePolicy(codec=("mxfp8", "nvfp4"))),
    "windowed past its wrap": ("gemma3_text", CachePolicy()),
    "max_kv_size": ("llama", CachePolicy(max_kv_size=100)),
    "budget": ("llama", CachePolicy(budget=200, keep_recent=32)),
    "a table of heads": ("llama", CachePolicy(budget=200, keep_recent=32, share="head", layers=TABLE)),
    "a table of layers, quantised": (
        "llama",
        CachePolicy(budget=200, share="layer", layers=TABLE, bits=8, group_size=32),
    ),
    "budget, by head, quantised": ("llama", CachePolicy(budget=200, share="head", bits=8, group_size=32)),
}
IN_ANOTHER_PROCESS = ("plain", "windowed past its wrap")


def answer(model: nn.Module, caches: list[Any], tokens: list[int]) -> list[int]:
    steps = generate_step(mx.array(tokens), model, max_tokens=20, prompt_cache=caches)
    return [int(token) for token, _ in steps]


def read(model: nn.Module, policy: CachePolicy, tokens: list[int], store: PromptStore | None) -> PromptReader:
    reader = PromptReader(model, make_prompt_cache(model, policy), tokens, store)
    reader.finish()
    return reader


def read_second(place: Path, kind: str, said: Connection) -> None:
    family, policy = KINDS[kind]
    model = make_model(family, max_position_embeddings=8192)
    reader = read(model, policy, SECOND, PromptStore(place))
    said.send((reader.reused, answer(model, reader.caches, SECOND[-1:])))


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_a_prefix_is_read_once(kind: str, tmp_path: Path) -> None:
    """By this process and by another one."""
    family, policy = KINDS[kind]
    model = make_model(family, max_position_embeddings=8192)
    folder, another = tmp_path / "store", tmp_path / "copy"
    assert read(model, policy, FIRST, PromptStore(folder)).reused == 0
    if kind in IN_ANOTHER_PROCESS:
        shutil.copytree(folder, another)
        child, said = start(read_second, another, kind)
    if policy.budget is None:
        alone = answer(model, read(model, policy, SECOND, None).caches, SECOND[-1:])
    store = PromptStore(folder)  # another process would see the same
    second = read(model, policy, SECOND, store)
    assert len(SECOND) - 1 - second.reused <= 0.05 * (len(SECOND) - 1)
    assert (store.hits, store.tokens_reused) == (1, second.reused)
    if policy.budget is not None:
        # What a budget keeps depends on the chunks: alone, read in the same ones, it is the same.
        same = PromptReader(model, make_prompt_cache(model, policy), SECOND, None)
        for stop in (512 * (second.reused // 512), second.reused, len(SECOND) - 1):
            if stop > same.read:
                same.tokens = SECOND[: stop + 1]
                same.finish()
        alone = answer(model, same.caches, SECOND[-1:])
    assert answer(model, second.caches, SECOND[-1:]) == alone
    if kind in IN_ANOTHER_PROCESS:
        there, tokens = said.recv()
        child.join()
        assert child.exitcode == 0
        assert there >= 0.95 * len(SECOND)
        assert tokens == alone


@pytest.mark.slow
def test_tokens_that_are_gone_as_they_came_are_read_again(tmp_path: Path) -> None:
    """A store goes back to where all that is to be seen as it came is there."""
    model, store = make_model("llama", max_position_embeddings=8192), PromptStore(tmp_path)
    policy = CachePolicy(bits=4, group_size=32, residual_length=6)
    for alike, most in ((2900, 2560), (2980, 2980)):
        other = [*FIRST[:alike], *SECOND[-200:]]
        read(model, policy, FIRST, store)
        second = read(model, policy, other, store)
        assert alike - 512 <= second.reused <= most
        alone = read(model, policy, other, None)
        assert answer(model, second.caches, other[-1:]) == answer(model, alone.caches, other[-1:])


def test_the_longest_prefix_serves_to_the_token(tmp_path: Path) -> None:
    model, store = make_model("llama", max_position_embeddings=8192), PromptStore(tmp_path)
    for length in (100, 400, 250):
        read(model, CachePolicy(), PREFIX[:length], store)
    # 400 tokens serve whatever 250 or 100 of them would: one entry is left.
    assert [len(entry) for entry in store.entries().values()] == [399]
    for same in (64, 65, 130, 398, 399):
        prompt = [*PREFIX[:same], *([0] * 30)]
        _, count = store.find(prompt)
        assert count == same
    assert store.find([*PREFIX[: MIN_SHARED - 1], 0, 0, 0]) is None
    assert store.find(PREFIX[:399])[1] == 398  # one token is left to be read
    assert (store.hits, store.misses) == (2 + 6, 1 + 1)  # the longer ones were read from the shorter on


def test_what_a_ring_cannot_give_back_is_not_served(tmp_path: Path) -> None:
    model = make_model("gemma3_text", max_position_embeddings=8192)
    policy = CachePolicy(max_write=64)
    store = PromptStore(tmp_path)
    reader = read(model, policy, PREFIX[:1000], store)
    assert reader.read == 999
    (last,) = [entry for entry in store.entries().values() if len(entry) == 999]
    assert last.least >= 999 - 64
    store._remove(next(name for name, entry in store.entries().items() if len(entry) == 960))
    caches, count = store.find([*PREFIX[:930], 0, 0])
    assert count == 896  # the entry after that chunk; that of 960 is gone, and that of 999 cannot go back so far
    assert caches[0].offset == 896


@pytest.mark.parametrize("step", [512, 128])
@pytest.mark.parametrize("policy", [CachePolicy(budget=512), CachePolicy(max_kv_size=512)], ids=["budget", "window"])
def test_no_gap_between_the_entries_of_a_prompt(policy: CachePolicy, step: int) -> None:
    """Wherever the next prompt parts from this one, no more than a chunk, or a 32nd, is read again."""
    model, memory = make_model("llama", max_position_embeddings=8192), PromptMemory()
    PromptReader(model, make_prompt_cache(model, policy), PREFIX, memory, step).finish()
    for parts in range(100, len(PREFIX), 50):
        served = memory.serves([*PREFIX[:parts], 0, 0])
        assert parts - served <= max(step, len(PREFIX) // 32 + step - 1)


@pytest.mark.parametrize("family", ["lfm2", "falcon_h1"])
def test_recurrent_state_serves_what_it_has_read(family: str, tmp_path: Path) -> None:
    model = make_model(family, max_position_embeddings=8192)
    for store in (PromptMemory(), PromptStore(tmp_path)):
        PromptReader(model, make_prompt_cache(model), PREFIX[:300], store, 100).finish()
        reader = PromptReader(model, make_prompt_cache(model), [*PREFIX[:250], 1, 2], store, 100)
        assert reader.reused == 200
        alone = PromptReader(model, make_prompt_cache(model), reader.tokens)
        assert answer(model, reader.finish(), [2]) == answer(model, alone.finish(), [2])
        assert store.find(PREFIX[:250]) is not None  # what was found and read on is as it was


def test_least_used_entries_leave_first(tmp_path: Path) -> None:
    model = make_model("llama")
    prompts = [mx.random.randint(1, VOCAB, (129,), key=mx.random.key(i)).tolist() for i in range(5)]
    size = PromptStore(tmp_path / "probe")
    read(model, CachePolicy(), prompts[0], size)
    store = PromptStore(tmp_path / "store", max_bytes=3 * size.bytes_live)
    for prompt in prompts[:3]:
        read(model, CachePolicy(), prompt, store)
    assert store.find(prompts[0]) is not None
    read(model, CachePolicy(), prompts[3], store)
    assert [store.find(prompt) is not None for prompt in prompts] == [True, False, True, True, False]
    assert store.bytes_live <= store.max_bytes
    files = sorted(path.name for path in (tmp_path / "store").glob("*.safetensors"))
    assert len(files) == 3
    tiny = PromptStore(tmp_path / "tiny", max_bytes=10)
    read(model, CachePolicy(), prompts[0], tiny)
    assert not tiny.entries()


def test_other_models_and_policies_are_not_served(tmp_path: Path) -> None:
    model = make_model("llama")
    read(model, CachePolicy(), PREFIX[:200], PromptStore(tmp_path, fingerprint="a"))
    assert PromptStore(tmp_path, fingerprint="b").find(PREFIX[:200]) is None
    assert PromptStore(tmp_path, fingerprint="a").find(PREFIX[:200]) is not None


@pytest.mark.parametrize("harm", ["flip", "cut", "gone", "other", "index"])
def test_damaged_entries_are_removed_and_never_served(harm: str, tmp_path: Path) -> None:
    model, store = make_model("llama"), PromptStore(tmp_path, fingerprint="a")
    read(model, CachePolicy(), PREFIX[:300], store)
    (data,), (index,) = tmp_path.glob("*.safetensors"), tmp_path.glob("*.json")
    content = bytearray(data.read_bytes())
    if harm == "flip":
        content[len(content) // 2] ^= 4
        data.write_bytes(content)
    elif harm == "cut":
        data.write_bytes(content[:-100])
    elif harm == "gone":
        data.unlink()
    elif harm == "other":
        read(model, CachePolicy(), SECOND[2000:2300], PromptStore(tmp_path / "more"))
        data.write_bytes(next((tmp_path / "more").glob("*.safetensors")).read_bytes())
    else:
        index.write_text("{")
    again = PromptStore(tmp_path, fingerprint="a")
    assert again.find(PREFIX[:300]) is None
    assert again.damaged == (harm not in ("gone", "index"))
    assert not list(tmp_path.glob("*.safetensors")) or harm == "index"
    reader = read(model, CachePolicy(), PREFIX[:300], again)
    assert reader.reused == 0
    assert again.find(PREFIX[:300]) is not None


def test_a_writer_that_was_killed_leaves_nothing_that_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, store = make_model("llama"), PromptStore(tmp_path)
    write = PromptStore._replace

    def killed(folder: PromptStore, name: str, content: bytes) -> None:
        if name.endswith(".json"):
            raise KeyboardInterrupt
        write(folder, name, content)

    with monkeypatch.context() as patch:
        patch.setattr(PromptStore, "_replace", killed)
        with pytest.raises(KeyboardInterrupt):
            read(model, CachePolicy(), PREFIX[:300], store)
    names = sorted(path.suffix for path in tmp_path.iterdir() if path.name not in ("lock", MARKER))
    assert names == [".safetensors", ".used"]
    (tmp_path / f"{uuid.uuid4().hex}.json.{uuid.uuid4().hex}.partial").write_text("{")
    (tmp_path / f".{uuid.uuid4().hex}.safetensors.0123456789abcdef.tmp").write_text("")
    (tmp_path / "notes.txt").write_text("somebody else's")
    assert not store.entries()
    read(model, CachePolicy(), PREFIX[700:900], store)
    assert len(list(tmp_path.glob("*.safetensors"))) == 2  # another writer may be at work: it is given an hour
    monkeypatch.setattr("mlx_kv.prefixes.store.ORPHANED_AFTER", -1.0)
    read(model, CachePolicy(), PREFIX[:200], store)
    assert len(store.entries()) == 2
    names = sorted(path.suffix for path in tmp_path.iterdir() if path.name not in ("lock", MARKER))
    assert names == [".json", ".json", ".safetensors", ".safetensors", ".txt", ".used", ".used"]


def test_several_writers_and_readers_at_once(tmp_path: Path) -> None:
    """Threads stand for processes: each has a store of its own on the same folder, which is too small for all."""
    model = make_model("llama")
    prompts = [mx.random.randint(1, VOCAB, (150,), key=mx.random.key(i)).tolist() for i in range(6)]
    made = [read(model, CachePolicy(), prompt, None).caches for prompt in prompts]
    wanted = [[cache.nbytes_live for cache in caches] for caches in made]
    failures: list[BaseException] = []
    lock = threading.Lock()  # of MLX, not of the store

    def work(offset: int) -> None:
        try:
            store = PromptStore(tmp_path, max_bytes=3 * sum(wanted[0]), fingerprint="a")
            for turn in range(8):
                index = (turn + offset) % 6
                with lock:
                    store.keep(prompts[index][:149], made[index])
                with lock:
                    found = store.find(prompts[(index + 3) % 6])
                if found is not None:
                    assert [cache.nbytes_live for cache in found[0]] == wanted[0]
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures
    assert PromptStore(tmp_path).bytes_live <= 3 * sum(wanted[0])


def test_refuses(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="max_bytes is 0"):
        PromptStore(tmp_path, max_bytes=0)
    (tmp_path / "file").touch()
    for place in (tmp_path / "file", tmp_path / "file" / "folder", "/proc/nothing"):
        with pytest.raises(ValueError, match=f"cannot keep prompts in {place}: "):
            PromptStore(place)
    for place in ("s3://bucket/prompts", "memory://prompts", "file:///tmp/prompts"):
        with pytest.raises(ValueError, match=f"cannot keep prompts in {place}: a store is a folder; mount the bucket"):
            PromptStore(place)
    with pytest.raises(ValueError, match="PromptStore no longer takes deadline: a store is a folder on a disk"):
        PromptStore(tmp_path, deadline=2.0)
    for kind, arguments in ((PromptStore, (tmp_path,)), (PromptMemory, ())):
        with pytest.raises(ValueError, match=f"{kind.__name__} no longer takes parts: prompts of several ranks"):
            kind(*arguments, parts=None)
        with pytest.raises(TypeError, match="has no argument 'part': leave it out"):
            kind(*arguments, part=None)
    assert not Path("s3:").exists()


def write_forever(place: Path, turn: int, said: Connection) -> None:
    store = PromptStore(place, fingerprint="a")
    model = make_model("llama")
    prompts = [mx.random.randint(1, VOCAB, (200,), key=mx.random.key(1000 * turn + i)).tolist() for i in range(3)]
    made = [read(model, CachePolicy(), prompt, None).caches for prompt in prompts]
    said.send("ready")
    while True:
        for prompt, caches in zip(prompts, made, strict=True):
            store.keep(prompt[:199], caches)
            for name, entry in store.entries().items():
                if entry.tokens == packed(prompt[:199]):
                    store._remove(name)


@pytest.mark.slow
def test_kills_while_writing_lose_nothing_and_leave_nothing_wrong(tmp_path: Path) -> None:
    """SIGKILL at random moments of storing: older entries stay, and whatever is listed loads and is right."""
    kills = 200 if THOROUGH else 5
    model, store = make_model("llama"), PromptStore(tmp_path, fingerprint="a")
    read(model, CachePolicy(), PREFIX[:300], store)
    chance = random.Random(0)
    for turn in range(kills):
        child, said = start(write_forever, tmp_path, turn)
        assert said.recv() == "ready"
        time.sleep(chance.random() * 0.1)
        assert child.is_alive()
        child.kill()
        child.join()
        again = PromptStore(tmp_path, fingerprint="a")
        _, count = again.find(PREFIX[:300])
        assert count == 299
        for name, entry in again.entries().items():
            caches = load_prompt_cache(tmp_path / f"{name}.safetensors")
            assert {cache.offset for cache in caches} == {len(entry)}
        assert again.damaged == 0
        for name, entry in again.entries().items():
            if len(entry) != 299:
                again._remove(name)
