"""Entries of which each rank has a shard: the leader's messages, and what the following ranks do.

The leader's `PromptMemory` and `PromptStore` decide what is kept, found and removed, by names that are the same on all
ranks. An entry has the bytes of its largest shard, and can be trimmed as far as all shards can.

Messages from the leader's disk thread wait for the thread that talks to the other ranks, as nothing may be sent between
a request and its answer. Following ranks use the disk in a thread of their own, one task after the other, and report
when each is done.
"""

from __future__ import annotations

import contextlib
import hashlib
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from typing import Any

from mlx_kv.communicator import CacheCommunicator
from mlx_kv.files.serialization import ReadFile
from mlx_kv.generation.statistics import cache_statistics
from mlx_kv.mlxlm.traverse import set_communicator, trim_prompt_cache
from mlx_kv.prefixes.index import EntryTable
from mlx_kv.prefixes.memory import BlockCaches, MemoryEntry, kept_bytes
from mlx_kv.prefixes.prefix_cache import Measure, Shards, min_tokens
from mlx_kv.prefixes.store import PromptStore
from mlx_kv.prefixes.store_index import PackedEntry
from mlx_kv.ranks.engine import CacheNumbers
from mlx_kv.ranks.group import RankGroup

WRITE_SECONDS = 60.0  # for the other ranks to write their shards
NO_LIMIT = 2**62  # bytes: the leader's store has the limit
ERRORS = {"gone": FileNotFoundError, "damaged": ValueError}  # by kind, in reports


class RankShards(Shards):
    """The shards of the other ranks, for the leader.

    Args:
        communicator: for caches with a budget that are read from files.
        numbers: returns those of the caches of the leader's current engine.
        call: runs a function in the thread that talks to the other ranks; None runs it at once.
    """

    def __init__(
        self,
        group: RankGroup,
        communicator: CacheCommunicator,
        numbers: Callable[[], CacheNumbers],
        call: Callable[[Callable[[], None]], None] | None = None,
    ) -> None:
        super().__init__(f"{group.size} ranks, of which each has some {group.split}")
        self._link, self._communicator, self._numbers, self._call = group.leader, communicator, numbers, call
        self._others = group.size - 1
        self._cleared = False  # whether the others have dropped entries of an earlier PromptMemory
        self._to_send: deque[tuple[Any, ...]] = deque()
        self._sending = threading.Lock()
        self._reports: dict[tuple[str, str], list[tuple[str, str]]] = {}  # kind and text of errors, by task and name
        self._reported = threading.Condition()
        group.leader.listen(self._on_report)

    def _request(self, *message: Any) -> list[Any]:
        """Sends a message, and returns the answers of all other ranks."""
        self._numbers().tell(*message)
        return self._link.answers()

    def fingerprint(self, own: str) -> str:
        all_ranks = " ".join([own, *map(str, self._request("whose_parts"))])
        return f"{own} of {self.description} {hashlib.blake2b(all_ranks.encode(), digest_size=16).hexdigest()}"

    def largest(self, caches: Sequence[Any], tokens: int, measure: Measure, nbytes: int, least: int) -> tuple[int, int]:
        others = self._request("weigh_part", self._numbers().of(caches), tokens, measure)
        return max(nbytes, *(size for size, _ in others)), max(least, *(other for _, other in others))

    # --- in memory --------------------------------------------------------------------------------------------------

    def keep(self, name: str, caches: Sequence[Any], tokens: int, like: str | None, shared: int) -> int:
        if not self._cleared:
            self._cleared = True
            self._link.tell("clear_parts")
        sizes = self._request("keep_part", name, self._numbers().of(caches), tokens, like, shared)
        if errors := [size for size in sizes if isinstance(size, str)]:
            self.drop(name)
            raise MemoryError(errors[0])
        return max(map(int, sizes))

    def take(self, name: str, own: list[Any], excess: int, capacity: int) -> list[Any]:
        caches = self._numbers().named(own)
        self._numbers().tell("take_part", name, excess, capacity, caches.number)
        return caches

    def drop(self, name: str) -> int:
        return max(map(int, self._request("drop_part", name)))

    # --- in a directory ---------------------------------------------------------------------------------------------

    def open(self, directory: str, deadline: float) -> None:
        self._raise_first(self._request("open_parts", directory, deadline))

    def pack(self, name: str, caches: Sequence[Any], tokens: Sequence[int], fingerprint: str) -> None:
        self._numbers().tell("pack_part", name, self._numbers().of(caches), list(tokens), fingerprint)

    def restore(self, name: str, own: list[Any], excess: int) -> list[Any]:
        set_communicator(own, self._communicator)
        caches = self._numbers().named(own)
        self._raise_first(self._request("restore_part", name, excess, caches.number))
        return caches

    @staticmethod
    def _raise_first(errors: Sequence[str]) -> None:
        for error in filter(None, errors):
            raise ValueError(error)

    # --- from any thread --------------------------------------------------------------------------------------------

    def writing(self, name: str) -> AbstractContextManager[None]:
        return self._meanwhile("write_part", name, WRITE_SECONDS)

    def reading(self, name: str, seconds: float) -> AbstractContextManager[None]:
        return self._meanwhile("read_part", name, seconds)

    def remove(self, name: str) -> None:
        self._send_soon("remove_part", name)

    def remove_others(self, names: Collection[str]) -> None:
        self._send_soon("only_parts", sorted(names))

    def use_this_thread(self) -> None:
        self._call = None
        self._send_waiting()

    def _send_soon(self, *message: Any) -> None:
        self._to_send.append(message)
        if self._call is None:
            self._send_waiting()
        else:
            self._call(self._send_waiting)

    def _send_waiting(self) -> None:
        with self._sending:
            while self._to_send:
                self._link.tell(*self._to_send.popleft())

    @contextlib.contextmanager
    def _meanwhile(self, task: str, name: str, seconds: float) -> Iterator[None]:
        """Lets the other ranks do a task, and waits for their reports at the end."""
        reports: list[tuple[str, str]] = []
        with self._reported:
            self._reports[task, name] = reports
        try:
            self._send_soon(task, name)
            ends = time.monotonic() + seconds
            yield
            with self._reported:
                self._reported.wait_for(lambda: len(reports) == self._others, max(0.0, ends - time.monotonic()))
        finally:
            with self._reported:
                del self._reports[task, name]
        for kind, text in reports:
            if kind:
                raise ERRORS.get(kind, OSError)(text)
        if len(reports) < self._others:
            raise TimeoutError(f"other ranks have not answered for {seconds:.3g} seconds")

    def _on_report(self, content: Sequence[str]) -> None:
        task, name, kind, text = content
        with self._reported:
            if (task, name) in self._reports:
                self._reports[task, name].append((kind, text))
                self._reported.notify_all()


# --- on the following ranks -------------------------------------------------------------------------------------------


class ShardFollower:
    """Handlers of the leader's messages, on a following rank.

    Args:
        communicator: for caches with a budget that are read from files.
        fingerprint: returns that of this rank's part of the model, and of its policy.
        caches: this rank's shards of the caches that have numbers.
    """

    def __init__(
        self,
        group: RankGroup,
        communicator: CacheCommunicator,
        fingerprint: Callable[[], str],
        caches: dict[int, list[Any]],
    ) -> None:
        self._group, self._link, self._communicator = group, group.follower, communicator
        self._fingerprint, self._caches = fingerprint, caches
        self._memory: EntryTable[MemoryEntry] = EntryTable()  # without tokens: the leader finds entries
        self._store: PromptStore | None = None
        self._packed: dict[str, PackedEntry] = {}  # to be written
        self._read: tuple[str, ReadFile] | None = None  # the last entry that was read
        self._disk = ThreadPoolExecutor(1, "mlx-kv disk")

    @property
    def handlers(self) -> Mapping[str, Callable[..., object]]:
        """By the names of messages, which ranks of other versions send, too."""
        return {
            "whose_parts": lambda: self._link.answer(self._fingerprint()),
            "weigh_part": self.weigh,
            "keep_part": self.keep,
            "clear_parts": self.clear,
            "take_part": self.take,
            "drop_part": self.drop,
            "open_parts": self.open,
            "pack_part": self.pack,
            "write_part": lambda name: self._on_disk("write_part", name, self.store.write_as, self._packed.pop(name)),
            "read_part": lambda name: self._on_disk("read_part", name, self._fetch, name),
            "restore_part": self.restore,
            "remove_part": self.remove,
            "only_parts": lambda names: self._on_disk("only_parts", "", self.store.only, names),
        }

    def weigh(self, number: int, tokens: int, measure: Measure) -> None:
        caches = self._caches[number]
        nbytes = kept_bytes(caches) if measure == "kept" else cache_statistics(caches).bytes_live
        self._link.answer([nbytes, min_tokens(caches, tokens)])

    # --- in memory --------------------------------------------------------------------------------------------------

    def keep(self, name: str, number: int, tokens: int, like: str | None, shared: int) -> None:
        try:
            other = None if like is None else self._memory[like].caches
            caches = BlockCaches.of(self._caches[number], tokens, other, shared)
        except Exception as error:  # memory may be full
            self._link.answer(f"rank {self._group.rank}: {type(error).__name__}: {error}")
            return
        self._memory.add(name, MemoryEntry(b"", 0, 0, name=name, caches=caches))
        self._link.answer(self._memory.nbytes)

    def clear(self) -> None:
        self._memory = EntryTable()

    def take(self, name: str, excess: int, capacity: int, number: int) -> None:
        self._caches[number] = self._memory[name].caches.restore(excess, capacity)

    def drop(self, name: str) -> None:
        self._memory.remove(name)
        self._link.answer(self._memory.nbytes)

    # --- in a directory ---------------------------------------------------------------------------------------------

    def open(self, directory: str, deadline: float) -> None:
        rank, size, split = self._group.rank, self._group.size, self._group.split
        shards = Shards(f"rank {rank} of {size} ranks, of which each has some {split}")
        try:
            self._store = PromptStore(f"{directory}/rank-{rank}", NO_LIMIT, shards.description, deadline, shards)
        except Exception as error:
            self._link.answer(f"rank {rank} {error}")
        else:
            self._link.answer("")

    @property
    def store(self) -> PromptStore:
        assert self._store is not None, "the leader opens it first"
        return self._store

    def pack(self, name: str, number: int, tokens: list[int], fingerprint: str) -> None:
        self._packed[name] = self.store.pack_as(name, tokens, self._caches[number], fingerprint)

    def _fetch(self, name: str) -> None:
        self._read = name, self.store.fetch_as(name)

    def restore(self, name: str, excess: int, number: int) -> None:
        read, self._read = self._read, None
        try:
            if read is None or read[0] != name:
                raise ValueError("it was not read")
            caches = read[1].restore().caches
            trim_prompt_cache(caches, excess, strict=True)
            set_communicator(caches, self._communicator)
        except ValueError as error:
            self._link.answer(f"rank {self._group.rank}: {error}")
        else:
            self._caches[number] = caches
            self._link.answer("")

    def remove(self, name: str) -> None:
        self._packed.pop(name, None)
        self._on_disk("remove_part", name, self.store.remove, name)

    def _on_disk(self, task: str, name: str, work: Callable[..., object], *arguments: Any) -> None:
        def run() -> None:
            kind, text = "", ""
            try:
                with self.store.within():
                    work(*arguments)
            except FileNotFoundError as error:
                kind, text = "gone", str(error)
            except ValueError as error:
                kind, text = "damaged", str(error)
            except Exception as error:
                kind, text = "failed", f"{type(error).__name__}: {error}"
            self._link.report([task, name, kind, text and f"rank {self._group.rank}: {text}"])

        self._disk.submit(run)
