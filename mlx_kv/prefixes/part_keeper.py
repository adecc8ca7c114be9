"""What a rank that follows keeps of prompts: its part of each entry, under the names that the leader gives.

Decides nothing: what the leader's memory and store keep, find and remove (`parts`), this keeps, finds and removes. What
takes the disk's time is done by a thread of its own, one thing after the other, which then says what came of it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

from mlx_kv.cache.eviction.peers import Peers
from mlx_kv.files.serialization import ReadFile
from mlx_kv.generation.statistics import cache_statistics
from mlx_kv.mlxlm.traverse import hear_from
from mlx_kv.mlxlm.trimming import trim_prompt_cache
from mlx_kv.prefixes.blocks import Block, KeptCaches, kept_bytes
from mlx_kv.prefixes.entry_files import PackedEntry
from mlx_kv.prefixes.index import Holdings
from mlx_kv.prefixes.parts import Alone, Measure
from mlx_kv.prefixes.place import least_tokens
from mlx_kv.prefixes.store import PromptStore
from mlx_kv.ranks.group import RankGroup

Caches = dict[int, list[Any]]
NO_LIMIT = 2**62  # bytes: the leader's store has one


class PartKeeper:
    """This rank's part of what the leader keeps.

    Args:
        peers: whom caches with a budget hear, which files know nothing of.
        whose: what tells this rank's part of the model, and its policy, from others.
        caches: this rank's part of those that have numbers.
    """

    def __init__(self, group: RankGroup, peers: Peers, whose: Callable[[], str], caches: Caches) -> None:
        self._group, self._link, self._peers = group, group.follower, peers
        self._whose, self._caches = whose, caches
        self._kept: dict[str, KeptCaches] = {}
        self._holdings: Holdings[Block] = Holdings()
        self._store: PromptStore | None = None
        self._packed: dict[str, PackedEntry] = {}  # to be written
        self._read: tuple[str, ReadFile] | None = None  # the last
        self._disk = ThreadPoolExecutor(1, "mlx-kv disk")

    @property
    def handlers(self) -> Mapping[str, Callable[..., object]]:
        """What the leader's `RankParts` tells, by its name."""
        own = (self.whose_parts, self.weigh_part, self.keep_part, self.take_part, self.drop_part, self.open_parts)
        on_disk = (self.pack_part, self.write_part, self.read_part, self.restore_part, self.remove_part)
        return {handler.__name__: handler for handler in (*own, *on_disk, self.clear_parts, self.only_parts)}

    def whose_parts(self) -> None:
        self._link.answer(self._whose())

    def weigh_part(self, number: int, tokens: int, measure: Measure) -> None:
        caches = self._caches[number]
        nbytes = kept_bytes(caches) if measure == "kept" else cache_statistics(caches).bytes_live
        self._link.answer([nbytes, least_tokens(caches, tokens)])

    # --- in memory --------------------------------------------------------------------------------------------------

    def keep_part(self, name: str, number: int, tokens: int, like: str | None, shared: int) -> None:
        try:
            kept = KeptCaches.of(self._caches[number], tokens, self._kept.get(like or ""), shared)
        except Exception as error:  # memory may be full
            self._link.answer(f"rank {self._group.rank}: {type(error).__name__}: {error}")
            return
        self._kept[name] = kept
        self._holdings.add(name, kept.own_bytes, kept.blocks)
        self._link.answer(self._holdings.nbytes)

    def clear_parts(self) -> None:
        self._kept.clear()
        self._holdings = Holdings()

    def take_part(self, name: str, excess: int, room: int, number: int) -> None:
        self._caches[number] = self._kept[name].caches(excess, room)

    def drop_part(self, name: str) -> None:
        self._kept.pop(name, None)
        self._holdings.remove(name)
        self._link.answer(self._holdings.nbytes)

    # --- in a directory ---------------------------------------------------------------------------------------------

    def open_parts(self, directory: str, deadline: float) -> None:
        try:
            words = f"rank {self._group.rank} of {self._group.size} ranks, of which each has some {self._group.split}"
            where = f"{directory}/rank-{self._group.rank}"
            self._store = PromptStore(where, NO_LIMIT, words, deadline, Alone(words))
        except Exception as error:
            self._link.answer(f"rank {self._group.rank} {error}")
            return
        self._link.answer("")

    @property
    def store(self) -> PromptStore:
        assert self._store is not None, "the leader opens it first"
        return self._store

    def pack_part(self, name: str, number: int, tokens: list[int], fingerprint: str) -> None:
        self._packed[name] = self.store.pack_as(name, tokens, self._caches[number], fingerprint)

    def write_part(self, name: str) -> None:
        self._on_disk("write_part", name, partial(self.store.write_as, self._packed.pop(name)))

    def read_part(self, name: str) -> None:
        self._on_disk("read_part", name, lambda: self._fetch(name))

    def _fetch(self, name: str) -> None:
        self._read = name, self.store.fetch_as(name)

    def restore_part(self, name: str, excess: int, number: int) -> None:
        read, self._read = self._read, None
        try:
            if read is None or read[0] != name:
                raise ValueError("it was not read")
            caches = read[1].restore().caches
            trim_prompt_cache(caches, excess, strict=True)
            hear_from(caches, self._peers)
        except ValueError as error:
            self._link.answer(f"rank {self._group.rank}: {error}")
            return
        self._caches[number] = caches
        self._link.answer("")

    def remove_part(self, name: str) -> None:
        self._packed.pop(name, None)
        self._on_disk("remove_part", name, lambda: self.store.remove(name))

    def only_parts(self, names: list[str]) -> None:
        self._on_disk("only_parts", "", lambda: self.store.only(names))

    def _on_disk(self, what: str, name: str, work: Callable[[], object]) -> None:
        def done() -> None:
            kind, why = "", ""
            try:
                with self.store.within():
                    work()
            except FileNotFoundError as error:
                kind, why = "gone", str(error)
            except ValueError as error:
                kind, why = "damaged", str(error)
            except Exception as error:
                kind, why = "failed", f"{type(error).__name__}: {error}"
            self._link.report([what, name, kind, f"rank {self._group.rank}: {why}" if kind else ""])

        self._disk.submit(done)
