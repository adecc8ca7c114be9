"""What is asked of slots over HTTP, as of llama-server: list them, save one to a file, restore it, erase it.

Decides which files may be written and read: those right in the folder that the operator gave. What was read is taken
from prompts that are kept, and given back to them. Knows nothing about rows.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from mlx_kv.files import serialization
from mlx_kv.server.admission import AdmissionController
from mlx_kv.server.asking import told_by
from mlx_kv.server.errors import ApiError
from mlx_kv.server.fields import json_kind
from mlx_kv.server.intake import Intake
from mlx_kv.server.slots import Slot
from mlx_kv.server.task_thread import TaskThread
from mlx_kv.server.worker import Worker

ACTIONS = ("save", "restore", "erase")
T = TypeVar("T")


class SlotRoutes:
    """Answers about slots.

    Args:
        folder: of their files; None has none.
    """

    def __init__(self, worker: Worker, admission: AdmissionController, intake: Intake, folder: Path | None) -> None:
        self._worker, self._admission, self._intake, self._folder = worker, admission, intake, folder
        self._slots = admission.slots
        self._disk = TaskThread("mlx-kv slots")

    async def list(self, request: Request) -> Response:
        """What each slot does; no text of it."""
        self._slots.look(self._admission.jobs)
        return JSONResponse([self._description(slot) for slot in self._slots.all])

    def _description(self, slot: Slot) -> dict[str, Any]:
        job = slot.job
        said: dict[str, Any] = {
            "id": slot.number,
            "id_task": -1 if job is None else job.number,
            "n_ctx": self._worker.context,
            "speculative": self._worker.speculates,
            "is_processing": job is not None,
            "n_prompt_tokens": len(slot.tokens if job is None else job.tokens),
            "n_prompt_tokens_cache": 0 if job is None else job.cached,
        }
        if job is not None:
            remain = max(0, job.max_tokens - len(job.answer))
            said["next_token"] = {"has_next_token": remain > 0, "n_remain": remain, "n_decoded": len(job.answer)}
        return said

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
        if not self._worker.keeps_prompts:
            raise ApiError(400, "this server keeps no prompts: start it with --prompt-memory-bytes above 0")
        self._slots.look(self._admission.jobs)
        if slot.job is not None:
            raise ApiError(409, f"slot {slot.number} is at work: try again when its answer has ended", "id")
        if action == "erase":
            return JSONResponse(await self._erase(slot))
        path, since = await self._path(request), time.monotonic()
        told = await (self._save(slot, path) if action == "save" else self._restore(slot, path))
        return JSONResponse(
            {"id_slot": slot.number, "filename": path.name, **told}
            | {"timings": {f"{action}_ms": round(1000 * (time.monotonic() - since), 3)}}
        )

    def _slot(self, number: str) -> Slot:
        if not number.isdecimal() or len(number) > 9 or int(number) >= len(self._slots.all):
            raise ApiError(404, f"there is no slot {number[:80]!r}: there are 0 to {len(self._slots.all) - 1}", "id")
        return self._slots.all[int(number)]

    async def _path(self, request: Request) -> Path:
        """The file that a request names. Raises ApiError where that could be any other."""
        if self._folder is None:
            raise ApiError(400, "slots have no files here: start the server with --slot-save-path DIR")
        body = await self._intake.json(request)
        name = body.get("filename") if isinstance(body, dict) else None
        if not isinstance(name, str):
            raise ApiError(400, f"filename is a JSON {json_kind(name)}: send the name of a file", "filename")
        if (
            not name.isprintable()
            or name.startswith(".")
            or set(name) & set('/\\:"*?<>|')
            or not 0 < len(os.fsencode(name)) <= 200
        ):
            raise ApiError(400, f"{name[:80]!r} is no name of a file in the folder of slots: send one, without a path",
                           "filename")  # fmt: skip
        path = self._folder / name
        if path.is_symlink():
            raise ApiError(400, f"{name[:80]!r} leads elsewhere: send the name of a file", "filename")
        return path

    async def _save(self, slot: Slot, path: Path) -> dict[str, Any]:
        tokens = list(slot.tokens)

        def pack() -> tuple[int, serialization.PackedCaches]:
            memory = self._worker.prefixes.memory
            found = memory.find([*tokens, 0])  # all of them, and one that is still to come
            if found is None:
                told = f"slot {slot.number} has nothing that is kept: it read too little, or others needed the room"
                raise ApiError(400, told, "id")
            caches, count = found
            return count, serialization.pack(caches, tokens=tokens[:count], fingerprint=memory.fingerprint)

        count, packed = await self._ask(pack)

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
            restored, prefixes = file.restore(), self._worker.prefixes
            if restored.tokens is None or restored.fingerprint != prefixes.memory.fingerprint:
                told = f"{path.name!r} is of another model, or of other options of the cache: start the server as then"
                raise ApiError(400, told, "filename")
            tokens = restored.tokens
            if not prefixes.memory.keep(tokens, restored.caches) and prefixes.memory.serves([*tokens, 0]) < len(tokens):
                raise ApiError(413, f"{path.name!r} is more than --prompt-memory-bytes lets be kept", "filename")
            return tokens

        tokens = await self._ask(keep)
        self._slots.restored(slot.number, tokens)
        return {"n_restored": len(tokens), "n_read": nbytes}

    async def _erase(self, slot: Slot) -> dict[str, Any]:
        tokens = slot.tokens
        slot.has([])
        if tokens:
            await self._ask(lambda: self._worker.prefixes.memory.forget(tokens))
        return {"id_slot": slot.number, "n_erased": len(tokens)}

    async def _on_disk(self, what: Callable[[], T]) -> T:
        try:
            return await asyncio.wrap_future(self._disk.submit(what))
        except (OSError, ValueError) as error:
            told = str(error) if isinstance(error, ValueError) else error.strerror or type(error).__name__
            told = " ".join(told.replace(f"{self._folder}{os.sep}", "").split())
            raise ApiError(400, f"the file of the slot cannot be used: {told}"[:300], "filename") from None

    async def _ask(self, what: Callable[[], T]) -> T:
        """Does something in the worker's thread, where arrays are made and read."""
        try:
            return await told_by(self._worker, self._worker.ask(what))
        except ValueError as error:
            raise ApiError(400, " ".join(str(error).split())[:300], "filename") from None
