"""Bytes of one sequence in all layers, at its peak and after that: for the planner, and for admission in the server.

    bytes = sum over caches of (state bytes + bytes per slot * slots + records of a budget)

Integers only.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from mlx_kv.cache.growth import DEFAULT, Growth, round_up
from mlx_kv.generation.prefill import NO_INSTRUCTIONS, OVERLAP, Instructions
from mlx_kv.planning.layers import Layer, Slots, as_laid_out
from mlx_kv.policy import CachePolicy


@dataclass(frozen=True)
class RowMemory:
    """Bytes of one sequence in all layers, at the peak of reading its prompt and after that.

    Slots are counted in multiples of `multiple`: 1 counts them as they fill, 256 as caches allocate them.

    Attributes:
        layers: and how many caches are alike.
        quantized_start: tokens from which on all is quantised. The first write allocates the slots that are reserved
            for prompt and answer, and allocates them plain.
        growth: how capacity grows.
        instructions: what comes before a repetition, where prompts are read twice; else None.
    """

    layers: tuple[tuple[Layer, int], ...] = ()
    quantized_start: int = 0
    growth: Growth = DEFAULT
    instructions: Instructions | None = None

    @classmethod
    def of(
        cls, layers: Iterable[Layer], policy: CachePolicy, instructions: Instructions = NO_INSTRUCTIONS
    ) -> RowMemory:
        alike = Counter(layers)
        twice = instructions if any(layer.read_twice for layer in alike) else None
        return cls(tuple(alike.items()), policy.quantized_start, policy.growth, twice)

    @property
    def bytes_per_slot(self) -> int:
        """Of one slot in every layer, before it is quantised if it is quantised late."""
        late = self.quantized_start > 0
        return sum(count * (each.plain_bytes_per_slot if late else each.bytes_per_slot) for each, count in self.layers)

    def after(self, tokens: int, multiple: int = 1, slots: Slots = as_laid_out) -> int:
        """Bytes of a sequence that has read so many tokens as a prompt."""
        plain = tokens <= self.quantized_start  # the write that comes next is the first to be quantised
        return sum(
            count * layer.nbytes(round_up(slots(layer, tokens), multiple), plain) for layer, count in self.layers
        )

    def at_peak(self, prompt: int, tokens: int, multiple: int = 1, slots: Slots = as_laid_out) -> int:
        """The most bytes that a sequence holds from its first token on.

        Args:
            prompt: tokens of the prompt.
            tokens: all that there will be, for which slots are reserved.
        """
        return max(self.read_once(tokens, multiple, slots), self.read_twice(prompt, tokens, multiple, slots))

    def read_once(self, tokens: int, multiple: int = 1, slots: Slots = as_laid_out) -> int:
        """The same but for the second reading of a prompt."""
        sizes = [(layer, count, round_up(slots(layer, tokens), multiple)) for layer, count in self.layers]
        return self._most(sizes, tokens)

    def read_twice(self, prompt: int, tokens: int, multiple: int = 1, slots: Slots = as_laid_out) -> int:
        """The most bytes while a prompt is read for the second time; 0 where it is read once.

        Layers whose score wants it hold the prompt and the part that is repeated, in slots that are allocated at the
        first token; all others are copied for the repetition (`generation.prefill`).
        """
        if self.instructions is None:
            return 0
        whole = self._slots_of_both(prompt, tokens, multiple, self.instructions)
        sizes = [
            (layer, count, whole)
            if layer.read_twice
            else (layer, 2 * count, round_up(slots(layer, max(tokens, whole)), multiple))
            for layer, count in self.layers
        ]
        return self._most(sizes, whole)

    def _slots_of_both(self, prompt: int, tokens: int, multiple: int, asked: Instructions) -> int:
        """Slots for a prompt and the longest part that is repeated: as reserved, or grown where that is too few."""
        chunk = asked.chunk_after(prompt)
        first = len(asked.first) + len(asked.answer) + min(chunk, prompt)
        later = 0 if prompt <= chunk else len(asked.later) + OVERLAP + len(asked.answer) + min(chunk, prompt - chunk)
        reserved, needed = round_up(max(tokens, prompt + first + OVERLAP), multiple), prompt + max(first, later)
        if needed <= reserved:
            return reserved
        return needed if multiple == 1 else self.growth.capacity(needed, reserved)

    def _most(self, sizes: Sequence[tuple[Layer, int, int]], tokens: int) -> int:
        """The most bytes of layers, each with how many caches are alike, and their slots, up to so many tokens.

        Where tensors are quantised late, all slots are plain first; then one layer after the other is quantised, of
        which one is held both plain and quantised.
        """
        stored = sum(count * layer.nbytes(slots) for layer, count, slots in sizes)
        if not self.quantized_start:
            return stored
        plain = sum(count * layer.nbytes(slots, plain=True) for layer, count, slots in sizes)
        if tokens <= self.quantized_start:
            return plain
        return max(stored, plain + max(layer.bytes_per_slot * slots for layer, _, slots in sizes))
