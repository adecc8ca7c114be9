"""Acceptance of drafts: the tokens that the samplers of rows choose, by the random numbers of each position.

The token at a position follows from the model's distribution there and that position's random key. So a drafter may
guess it, drawing from its own distribution with the same key, and a drafted token is accepted where the model chose the
same. That is exact for any draft. B rows, V the vocabulary, L the most tokens drafted for a row.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import mlx.core as mx

from mlx_kv.generation.sampling import Sampler, SeededSampler, TemperatureSampler, gumbel_noise
from mlx_kv.generation.settings import LogitsProcessor

# --- logits processors at several places ------------------------------------------------------------------------------


class RowContext:
    """All tokens of one row, and its logits processors.

    Args:
        tokens: of the prompt, what was read before among them; not needed without processors.
    """

    def __init__(self, processors: Sequence[LogitsProcessor], tokens: Sequence[int]) -> None:
        self.processors = tuple(processors)
        self._tokens = mx.array(list(tokens) if self.processors else [], dtype=mx.int32)

    def add(self, tokens: Sequence[int]) -> None:
        """Adds tokens that the row got."""
        if not (self.processors and tokens):
            return
        self._tokens = self.followed([mx.array(list(tokens))])
        mx.async_eval(self._tokens)  # type: ignore[no-untyped-call]  # a processor that never looks would chain them

    def adjust(self, tokens: mx.array, logits: mx.array) -> mx.array:
        """Logits (1, V) of what comes after tokens (n,), by the processors; of the same dtype, which all rows share."""
        adjusted = logits
        for processor in self.processors:
            adjusted = processor(tokens, adjusted)
        return adjusted.astype(logits.dtype)

    def followed(self, more: Sequence[mx.array]) -> mx.array:
        """Its tokens (n,), and others (m,) after them, which need not be evaluated yet."""
        return mx.concatenate([self._tokens, *(tokens.reshape(-1).astype(mx.int32) for tokens in more)])

    def allowed(self, drafted: Sequence[int]) -> int:
        """How many drafted tokens can stand, by those processors that can say so."""
        count = len(drafted)
        for processor in self.processors:
            allowed: Any = getattr(processor, "allowed", None)
            if allowed is not None and count:
                count = min(count, int(allowed(self._tokens, list(drafted[:count]))))
        return count


class RowContexts:
    """The contexts of all rows, in their order."""

    def __init__(self, rows: Iterable[RowContext] = ()) -> None:
        self._rows = list(rows)

    def join(self, rows: Sequence[RowContext]) -> None:
        self._rows += rows

    def keep(self, rows: Sequence[int]) -> None:
        self._rows = [self._rows[row] for row in rows]

    def record(self, tokens: Sequence[Sequence[int]]) -> None:
        """Adds the tokens that each row received."""
        for row, received in zip(self._rows, tokens, strict=True):
            row.add(received)

    @property
    def any(self) -> bool:
        """Whether any row has processors."""
        return any(row.processors for row in self._rows)

    def cut(self, drafted: Sequence[list[int]]) -> list[list[int]]:
        """The drafts up to the first token that the processors of their row exclude."""
        pairs = zip(self._rows, drafted, strict=True)
        return [draft[: row.allowed(draft)] if row.processors else draft for row, draft in pairs]

    def after(self, logits: mx.array, more: Sequence[mx.array]) -> mx.array:
        """Logits (B, V) of what comes after each row's tokens and `more` of the first n rows, (n,), known or not."""
        if not self.any:
            return logits
        rows = []
        for index, row in enumerate(self._rows):
            here = logits[index : index + 1]
            if row.processors:
                here = row.adjust(row.followed([tokens[index] for tokens in more if index < tokens.size]), here)
            rows.append(here)
        return mx.concatenate(rows)

    def along(self, logits: mx.array, drafted: Sequence[Sequence[int]]) -> mx.array:
        """Logits (B, L + 1, V) at the places of drafted tokens and of the one after them: all of a row's own places."""
        if not self.any:
            return logits
        rows = []
        for index, (row, draft) in enumerate(zip(self._rows, drafted, strict=True)):
            here = logits[index]  # (L + 1, V)
            if row.processors:
                tokens = row.followed([mx.array(list(draft))] if draft else [])
                known = tokens.size - len(draft)
                places = range(len(draft) + 1)
                done = [row.adjust(tokens[: known + place], here[place : place + 1]) for place in places]
                here = mx.concatenate([*done, here[len(done) :]])
            rows.append(here)
        return mx.stack(rows)


# --- choices ----------------------------------------------------------------------------------------------------------


class Choice:
    """How the next tokens of all rows are chosen, in one round.

    Args:
        samplers: of each row; None is greedy.
        vocabulary: V.
        max_drafts: tokens that may be drafted for a row.
        agreed: what is made of the model's tokens before they are anybody's.
        contexts: of the rows, whose processors guesses are to please as well.
    """

    def __init__(
        self,
        samplers: Sequence[Sampler | None],
        vocabulary: int,
        max_drafts: int,
        agreed: Callable[[mx.array], mx.array] = lambda tokens: tokens,
        contexts: RowContexts | None = None,
    ) -> None:
        self._samplers, self._vocabulary, self._max_drafts, self._agreed = samplers, vocabulary, max_drafts, agreed
        self._random = any(isinstance(sampler, SeededSampler) for sampler in samplers)
        self._drawn: mx.array | None = None  # (B, n, V), for as many positions as were asked for
        self._contexts, self._guessed = contexts or RowContexts(), list[mx.array]()  # (B,) of each place

    def guess(self, logits: mx.array, ahead: int) -> mx.array:
        """Tokens (B,) that the samplers would choose, if these logits (B, V) were the model's.

        Args:
            ahead: 0 for the next token of each row, 1 for the one after it, and so on. Its random numbers are those
                with which the model will choose; of a sampler that is no `SeededSampler`, it is the likeliest token.
        """
        noise = self._noise(self._max_drafts + 1)
        if ahead <= len(self._guessed):
            logits = self._contexts.after(logits, self._guessed[:ahead])
        if noise is None:
            tokens = mx.argmax(logits, axis=-1)  # of the vocabulary's logarithm a guess has no use
        else:
            tokens = self._chosen(log_probabilities(logits), noise[:, ahead], range(ahead, ahead + 1))
        self._guessed[ahead:] = [tokens]
        return tokens

    def follow(self, logprobs: mx.array, ahead: int) -> mx.array:
        """The tokens (B,) that the rows get next, by the model's log-probabilities (B, V); not evaluated.

        Args:
            ahead: as in `guess`; the samplers that are no `SeededSampler` are called once for each token.
        """
        places = range(ahead, ahead + 1)
        noise = self._noise_at(places)
        chosen = self._chosen(logprobs, None if noise is None else noise[:, 0], places)
        drawn = [
            None if sampler is None or isinstance(sampler, SeededSampler) else sampler(logprobs[row : row + 1])
            for row, sampler in enumerate(self._samplers)
        ]
        if all(tokens is None for tokens in drawn):
            return self._agreed(chosen)
        rows = [chosen[row : row + 1] if tokens is None else tokens.reshape(1) for row, tokens in enumerate(drawn)]
        return self._agreed(mx.concatenate([tokens.astype(mx.uint32) for tokens in rows]))

    def accept(self, drafted: Sequence[Sequence[int]], logprobs: mx.array) -> list[tuple[int, int]]:
        """For each row, how many of its drafted tokens are right, and the token that the model chose after them.

        Args:
            drafted: of each row, any number.
            logprobs: the model's (B, L + 1, V), at the places of the drafted tokens and of the one after them. What
                stands after a row's own is not looked at.
        """
        tokens = self._chosen(logprobs, self._noise(logprobs.shape[1]), range(logprobs.shape[1]))  # (B, L + 1)
        for row, (guessed, sampler) in enumerate(zip(drafted, self._samplers, strict=True)):
            if not (sampler is None or isinstance(sampler, SeededSampler)):
                tokens[row, : len(guessed) + 1] = sampler(logprobs[row, : len(guessed) + 1])
        chosen: Any = self._agreed(tokens).tolist()
        decided = []
        for guessed, tokens_of_row in zip(drafted, chosen, strict=True):
            right = 0
            while right < len(guessed) and guessed[right] == tokens_of_row[right]:
                right += 1
            decided.append((right, tokens_of_row[right]))
        return decided

    def _noise(self, count: int) -> mx.array | None:
        """What is added to log-probabilities (B, count, V) of each row's next tokens before the likeliest is taken.

        Zeros where that is the model's, or another sampler's, own choice; None where it is in every row.
        """
        if self._drawn is None:
            self._drawn = self._noise_at(range(count))
        return None if self._drawn is None else self._drawn[:, :count]

    def _noise_at(self, places: range) -> mx.array | None:
        """The same, (B, n, V) at these places alone, counted from the next token of each row."""
        if not self._random:
            return None
        none = mx.zeros((len(places), self._vocabulary))
        return mx.stack(
            [
                gumbel_noise([sampler.key(place) for place in places], self._vocabulary)
                if isinstance(sampler, SeededSampler)
                else none
                for sampler in self._samplers
            ]
        )

    def _chosen(self, logprobs: mx.array, noise: mx.array | None, places: range) -> mx.array:
        """Tokens (B, ...) for log-probabilities and noise (B, ..., V) at these places."""
        if noise is None:
            return mx.argmax(logprobs, axis=-1)
        rules = [sampler.rules if isinstance(sampler, SeededSampler) else None for sampler in self._samplers]
        coins = [sampler.coins(places) if isinstance(sampler, SeededSampler) else None for sampler in self._samplers]

        def scaled(rule: TemperatureSampler | None, rows: mx.array, coins: list[mx.array | None]) -> mx.array:
            if rule is None:
                return rows
            tossed = [coin for coin in coins if coin is not None]  # of all of these rows, or of none
            return rule.scaled(rows, mx.stack(tossed).reshape(*rows.shape[:-1], 1) if tossed else None)

        if all(rule == rules[0] for rule in rules):
            return mx.argmax(scaled(rules[0], logprobs, coins) + noise, axis=-1)
        scaled_rows = [scaled(rule, logprobs[row : row + 1], coins[row : row + 1]) for row, rule in enumerate(rules)]
        return mx.argmax(mx.concatenate(scaled_rows) + noise, axis=-1)


def log_probabilities(logits: mx.array) -> mx.array:
    """Log-probabilities (..., V) of logits (..., V)."""
    return logits - mx.logsumexp(logits, axis=-1, keepdims=True)
