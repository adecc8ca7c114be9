"""Slots as llama-server has them: listed, saved, restored by another server, erased."""

from __future__ import annotations

import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from serving import SOURCE, Running, cached, check_error, running

from mlx_kv import CachePolicy
from mlx_kv.server.api import Limits
from mlx_kv.server.job import Job
from mlx_kv.server.slots import Slots

POLICIES = {
    "full": CachePolicy(),
    "8 bits": CachePolicy(bits=8),
    "the newest as they came": CachePolicy(bits=4, residual_length=16),
    "a budget": CachePolicy(budget=128, keep_recent=32),
    "a window": CachePolicy(max_kv_size=160),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("slots")


@pytest.fixture(scope="module")
def slotted(folder: Path) -> Iterator[Running]:
    with running(max_batch_size=3, limits=Limits(slot_folder=folder), prompt_memory_bytes=2**28) as one:
        yield one


def act(server: Running, number: object, action: str, name: Any = "talk.safetensors") -> Any:
    return server.post(f"/slots/{number}?action={action}", filename=name)


# --- which slot a request is shown in ---------------------------------------------------------------------------------


def test_slots_of_jobs() -> None:
    slots, one, two = Slots(2), Job(list(range(100)), 5), Job(list(range(200, 300)), 5)
    slots.update([one, two])
    assert [slot.job for slot in slots.all] == [None, None]  # they have no row yet
    one.joined = two.joined = True
    slots.update([one, two])
    slots.update([two, one])
    assert [slot.job for slot in slots.all] == [one, two]
    one.answer += [7, 8]
    slots.leave(one)
    slots.leave(two)
    assert slots.all[0].tokens == [*range(100), 7, 8]
    again, third, asked = Job(list(range(90)), 5), Job([1] * 9, 5), Job(list(range(200, 290)), 5, slot=0)
    for job in (again, third, asked):
        job.joined = True
    slots.update([again])
    assert slots.all[0].job is again  # which has most of its prompt
    slots.leave(again)
    slots.update([third])
    assert slots.all[1].job is third  # the other was used later
    slots.leave(third)
    slots.update([asked])
    assert slots.all[0].job is asked
    unseen = Job([5] * 9, 5)
    unseen.joined = True
    slots.leave(unseen)
    assert slots.all[1].tokens == [5] * 9
    never = Job([6] * 9, 5)
    slots.leave(never)
    assert slots.all[1].tokens == [5] * 9


def test_slots_are_listed_without_their_text(slotted: Running) -> None:
    slotted.wait_until_empty()
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(slotted.complete, SOURCE[:300], 120, id_slot=2)
        slotted.wait_until(lambda: any(slot["is_processing"] for slot in slotted.http.get("/slots").json()))
        slots = slotted.http.get("/slots").json()
        assert [slot["id"] for slot in slots] == [0, 1, 2]
        assert [slot["is_processing"] for slot in slots] == [False, False, True]
        assert slots[2]["next_token"]["n_decoded"] + slots[2]["next_token"]["n_remain"] == 120
        assert check_error(act(slotted, 2, "save"), 409)["param"] == "id"
        waiting.result()
    slotted.wait_until_empty()
    last = slotted.http.get("/slots").json()[2]
    assert not last["is_processing"]
    assert last["n_prompt_tokens"] > 120
    assert SOURCE[:10] not in slotted.http.get("/slots").text


# --- saved, and restored ----------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("policy", [*POLICIES, "a draft"])
def test_what_a_slot_had_is_restored_by_another_server(policy: str, tmp_path: Path) -> None:
    """And goes on with the text that it would have gone on with."""
    options: dict[str, Any] = {
        "policy": POLICIES.get(policy),
        "draft": policy == "a draft",
        "limits": Limits(slot_folder=tmp_path),
        "prompt_memory_bytes": 2**28,
        "max_batch_size": 2,
    }
    with running(**options) as first:
        said = first.complete(SOURCE[:700], 20, id_slot=1)
        first.wait_until_kept()
        saved = act(first, 1, "save").json()
        further = first.post(prompt=SOURCE[:700] + said + "\n\n", max_tokens=20).json()
        first.wait_until_empty()
    assert (saved["id_slot"], saved["filename"]) == (1, "talk.safetensors")
    assert saved["n_written"] == os.stat(tmp_path / "talk.safetensors").st_size
    with running(**options) as second:
        restored = act(second, 0, "restore").json()
        assert (restored["n_restored"], restored["n_read"]) == (saved["n_saved"], saved["n_written"])
        assert second.http.get("/slots").json()[0]["n_prompt_tokens"] == saved["n_saved"]
        again = second.post(prompt=SOURCE[:700] + said + "\n\n", max_tokens=20).json()
        assert again["choices"][0]["text"] == further["choices"][0]["text"]
        assert cached(again) == cached(further) > 150
        second.wait_until_empty()


def test_a_slot_that_is_erased_is_read_again(slotted: Running) -> None:
    prompt = SOURCE[600:1200]
    first = slotted.post(prompt=prompt, max_tokens=2, id_slot=0).json()
    slotted.wait_until_kept()
    assert cached(slotted.post(prompt=prompt, max_tokens=2, id_slot=0).json()) > 64
    slotted.wait_until_kept()
    assert act(slotted, 0, "erase").json()["n_erased"] == first["usage"]["total_tokens"]
    assert cached(slotted.post(prompt=prompt, max_tokens=2, id_slot=0).json()) == 0
    slotted.wait_until_empty()


def test_a_file_is_written_again(slotted: Running, folder: Path) -> None:
    slotted.complete(SOURCE[:400], 5, id_slot=0)
    slotted.wait_until_kept()
    for _ in range(2):
        assert act(slotted, 0, "save", "again.safetensors").json()["n_saved"] > 64
    (folder / "mine.txt").write_text("not a cache")
    assert "is not a prompt cache" in check_error(act(slotted, 0, "save", "mine.txt"), 400)["message"]
    assert (folder / "mine.txt").read_text() == "not a cache"


@pytest.mark.parametrize(
    "name", ["../out", "/etc/passwd", "", ".", "..", ".hidden", "a/b", "a\\b", "a\0b", "x" * 300, None, 7, "link"]
)
def test_only_files_in_the_folder_are_touched(name: Any, slotted: Running, folder: Path, tmp_path: Path) -> None:
    slotted.complete(SOURCE[:400], 5, id_slot=0)
    slotted.wait_until_kept()
    if name == "link" and not (folder / "link").exists():
        (folder / "link").symlink_to(tmp_path / "elsewhere")
    before = sorted(os.listdir(folder.parent)), sorted(os.listdir(folder))
    for action in ("save", "restore"):
        assert check_error(act(slotted, 0, action, name), 400)["param"] == "filename"
    assert (sorted(os.listdir(folder.parent)), sorted(os.listdir(folder))) == before
    assert not (tmp_path / "elsewhere").exists()


def test_files_that_are_of_no_use(slotted: Running, folder: Path) -> None:
    (folder / "text.txt").write_text("no cache")
    for name in ("there-is-none", "text.txt"):
        told = check_error(act(slotted, 0, "restore", name), 400)["message"]
        assert "cannot be used" in told
        assert str(folder) not in told
    with running(CachePolicy(bits=8), limits=Limits(slot_folder=folder), prompt_memory_bytes=2**28) as other:
        slotted.complete(SOURCE[:400], 5, id_slot=0)
        slotted.wait_until_kept()
        assert act(slotted, 0, "save").status_code == 200
        assert "of another model" in check_error(act(other, 0, "restore"), 400)["message"]
    with running(limits=Limits(slot_folder=folder), prompt_memory_bytes=1000) as small:
        assert "--prompt-memory-bytes" in check_error(act(small, 0, "restore"), 413)["message"]


def test_what_cannot_be_done_with_a_slot(slotted: Running, server: Running) -> None:
    assert check_error(act(slotted, 3, "save"), 404)["param"] == "id"
    assert check_error(act(slotted, "x", "save"), 404)["param"] == "id"
    assert check_error(act(slotted, "9" * 5000, "save"), 404)["param"] == "id"
    assert check_error(act(slotted, 0, "eat"), 400)["param"] == "action"
    assert "keeps no prompts" in check_error(act(server, 0, "save"), 400)["message"]
    with running(prompt_memory_bytes=2**26, max_batch_size=1) as one:
        assert "--slot-save-path" in check_error(act(one, 0, "save"), 400)["message"]
        assert act(one, 0, "erase").json() == {"id_slot": 0, "n_erased": 0}
        one.api._slots._folder = Path("/nowhere")
        assert "has nothing in the prefix cache" in check_error(act(one, 0, "save"), 400)["message"]
        one.complete("x", 1)
        assert "it read too little" in check_error(act(one, 0, "save"), 400)["message"]
