"""Slots as in llama-server: places for rows, each with the tokens it held last, which can be saved and restored.

A slot has tokens only: their caches are in the prefix cache (`tiered_prefixes`), where any request finds them.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import Any, TypeVar

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from mlx_kv.files import serialization
from mlx_kv.prefixes.index import MIN_SHARED, packed, shared
from mlx_kv.server.job import Job
from mlx_kv.server.json_http import ApiError, read_body
from mlx_kv.server.requests import Limits, json_kind
from mlx_kv.server.worker import Worker

ACTIONS = ("save", "restore", "erase")
T = TypeVar("T")


@dataclass
class Slot:
    """One slot.

    Attributes:
        number: from 0 up.
        job: in prefill or decoding; None while free.
        tokens: of the last prompt and its answer.
        packed: the same as bytes, for comparison.
        used: order in which slots got their last job.
    """

    number: int
    job: Job | None = None
    tokens: list[int] = field(default_factory=list)
    packed: bytes = b""
    used: int = 0

    def set_tokens(self, tokens: Sequence[int]) -> None:
        """Sets the tokens."""
        self.tokens, self.packed = list(tokens), packed(tokens)


class Slots:
    """The slots of a server, as many as rows.

    A job gets the slot that it requests, or the free one that shares most of its prompt, or the least recently used.
    """

    def __init__(self, number: int) -> None:
        self.all = [Slot(n) for n in range(number)]
        self._order = count(1)

    def update(self, jobs: Iterable[Job]) -> None:
        """Assigns slots to jobs that have got a row."""
        shown = {slot.job for slot in self.all}
        for job in jobs:
            if job.joined and job not in shown:
                self._assign(job)

    def leave(self, job: Job) -> None:
        """Frees the slot of a job that has ended."""
        self.update([job])
        for slot in self.all:
            if slot.job is job:
                slot.job = None
                slot.set_tokens(job.known)

    def restored(self, number: int, tokens: Sequence[int]) -> None:
        """Sets the tokens of a slot that was restored from a file."""
        slot = self.all[number]
        slot.set_tokens(tokens)
        slot.used = next(self._order)

    def _assign(self, job: Job) -> None:
        free = [slot for slot in self.all if slot.job is None]
        if not free:
            return  # `leave` of a job that has ended is still to come
        slot = next((slot for slot in free if slot.number == job.slot), None)
        if slot is None:
            common, _, slot = max((shared(slot.packed, job.prompt), slot.number, slot) for slot in free)
            if common < MIN_SHARED:
                slot = min(free, key=lambda slot: slot.used)
        slot.job, slot.used = job, next(self._order)


class SlotRoutes:
    """The routes /slots and /slots/N: list slots, save one to a file, restore it, erase it.

    Args:
        jobs: returns the jobs of all requests.
        limits: of bodies; its `slot_folder` is the only one with files, None disables them.
    """

    def __init__(self, worker: Worker, slots: Slots, jobs: Callable[[], list[Job]], limits: Limits) -> None:
        self._worker, self._slots, self._jobs, self._limits = worker, slots, jobs, limits
        self._folder = limits.slot_folder
        self._disk = ThreadPoolExecutor(1, "mlx-kv slots")

    def close(self) -> None:
        """Ends the thread of the disk after its current task."""
        self._disk.shutdown(wait=False, cancel_futures=True)

    async def list(self, request: Request) -> Response:
        """The state of each slot, without text."""
        self._slots.update(self._jobs())
        return JSONResponse([self._description(slot) for slot in self._slots.all])

    def _description(self, slot: Slot) -> dict[str, Any]:
        job = slot.job
        description: dict[str, Any] = {
            "id": slot.number,
            "id_task": -1 if job is None else job.number,
            "n_ctx": self._worker.context,
            "speculative": self._worker.speculates,
            "is_processing": job is not None,
            "n_prompt_tokens": len(slot.tokens if job is None else job.tokens),
            "n_prompt_tokens_cache": 0 if job is None else job.cached,
        }
        if job is not None:
            left = max(0, job.max_tokens - len(job.answer))
            description["next_token"] = {"has_next_token": left > 0, "n_remain": left, "n_decoded": len(job.answer)}
        return description

    async def act(self, request: Request) -> Response:
        """Saves, restores or erases a slot."""
        action, slot = request.query_params.get("action"), self._slot(request.path_params["number"])
        if action not in ACTIONS:
            raise ApiError(
                400, f"action can be {', '.join(ACTIONS)}: write it behind the path, as ?action=save", "action"
            )
        if self._worker.ranks > 1:
            raise ApiError(
                400, f"each of {self._worker.ranks} machines has a part of this model: slots have no files here"
            )
        if not self._worker.settings.keeps_prompts:
            raise ApiError(400, "this server keeps no prompts: start it with --prompt-memory-bytes above 0")
        self._slots.update(self._jobs())
        if slot.job is not None:
            raise ApiError(409, f"slot {slot.number} is in use: try again when its answer has ended", "id")
        if action == "erase":
            return JSONResponse(await self._erase(slot))
        path, since = await self._path(request), time.monotonic()
        counts = await (self._save(slot, path) if action == "save" else self._restore(slot, path))
        timings = {"timings": {f"{action}_ms": round(1000 * (time.monotonic() - since), 3)}}
        return JSONResponse({"id_slot": slot.number, "filename": path.name} | counts | timings)

    def _slot(self, number: str) -> Slot:
        if not number.isdecimal() or len(number) > 9 or int(number) >= len(self._slots.all):
            raise ApiError(404, f"there is no slot {number[:80]!r}: there are 0 to {len(self._slots.all) - 1}", "id")
        return self._slots.all[int(number)]

    async def _path(self, request: Request) -> Path:
        """The file named in a request. Raises ApiError for one that could be outside of the folder."""
        if self._folder is None:
            raise ApiError(400, "slots have no files here: start the server with --slot-save-path DIR")
        body = await read_body(request, self._limits.body_bytes, self._limits.body_seconds)
        name = body.get("filename") if isinstance(body, dict) else None
        if not isinstance(name, str):
            raise ApiError(400, f"filename is a JSON {json_kind(name)}: send the name of a file", "filename")
        if (
            not name.isprintable()
            or name.startswith(".")
            or set(name) & set('/\\:"*?<>|')
            or not 0 < len(os.fsencode(name)) <= 200
        ):
            raise ApiError(
                400, f"{name[:80]!r} is not a file name in the slot folder: send one without a path", "filename"
            )
        path = self._folder / name
        if path.is_symlink():
            raise ApiError(400, f"{name[:80]!r} is a link: send the name of a file", "filename")
        return path

    async def _save(self, slot: Slot, path: Path) -> dict[str, Any]:
        tokens = list(slot.tokens)

        def pack() -> tuple[int, serialization.PackedCaches]:
            memory = self._worker.prefixes.memory
            found = memory.find([*tokens, 0])  # a prefix of all tokens
            if found is None:
                message = f"slot {slot.number} has nothing in the prefix cache: it read too little, or was dropped"
                raise ApiError(400, message, "id")
            caches, count = found
            return count, serialization.pack(caches, tokens=tokens[:count], fingerprint=memory.fingerprint)

        count, packed = await self._in_worker(pack)

        def write() -> int:
            serialization.check_output(path, fix="delete it")
            packed.write(path)
            return os.stat(path).st_size

        return {"n_saved": count, "n_written": await self._on_disk(write)}

    async def _restore(self, slot: Slot, path: Path) -> dict[str, Any]:
        def read() -> tuple[serialization.ReadFile, int]:
            return serialization.read(path), os.stat(path).st_size

        file, nbytes = await self._on_disk(read)

        def keep() -> list[int]:
            restored, memory = file.restore(), self._worker.prefixes.memory
            if restored.tokens is None or restored.fingerprint != memory.fingerprint:
                raise ApiError(
                    400, f"{path.name!r} is of another model, or other cache options: start the server with those",
                    "filename",
                )  # fmt: skip
            tokens = restored.tokens
            if not memory.keep(tokens, restored.caches) and memory.serves([*tokens, 0]) < len(tokens):
                raise ApiError(413, f"{path.name!r} is larger than --prompt-memory-bytes: raise that", "filename")
            return tokens

        tokens = await self._in_worker(keep)
        self._slots.restored(slot.number, tokens)
        return {"n_restored": len(tokens), "n_read": nbytes}

    async def _erase(self, slot: Slot) -> dict[str, Any]:
        tokens = slot.tokens
        slot.set_tokens([])
        if tokens:
            await self._in_worker(lambda: self._worker.prefixes.memory.forget(tokens))
        return {"id_slot": slot.number, "n_erased": len(tokens)}

    async def _on_disk(self, task: Callable[[], T]) -> T:
        try:
            return await asyncio.wrap_future(self._disk.submit(task))
        except (OSError, ValueError) as error:
            reason = str(error) if isinstance(error, ValueError) else error.strerror or type(error).__name__
            reason = " ".join(reason.replace(f"{self._folder}{os.sep}", "").split())
            raise ApiError(400, f"the file of the slot cannot be used: {reason}"[:300], "filename") from None

    async def _in_worker(self, function: Callable[[], T]) -> T:
        """Runs a function in the worker's thread, where arrays are made and read."""
        try:
            return await asyncio.wrap_future(self._worker.call(function))
        except ValueError as error:
            raise ApiError(400, " ".join(str(error).split())[:300], "filename") from None
