"""Drafters: the interface, the drafters of this package, and the open set of their names. B rows, V the vocabulary."""

from __future__ import annotations

import copy
from abc import abstractmethod
from array import array
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Protocol

import mlx.core as mx
import mlx.nn as nn

from mlx_kv.generation.decode_batch import DecodeBatch
from mlx_kv.generation.prefill import chunk_for, read_chunk, read_ragged
from mlx_kv.generation.speculation.acceptance import Choice
from mlx_kv.mlxlm.attention import attach_attention_hooks
from mlx_kv.mlxlm.batching import rows_are_alone
from mlx_kv.mlxlm.convert import make_prompt_cache
from mlx_kv.mlxlm.heads import DraftHead, head_policy
from mlx_kv.mlxlm.taps import Hidden, HiddenTap
from mlx_kv.mlxlm.traverse import trim_all, trim_prompt_cache
from mlx_kv.policy import CachePolicy
from mlx_kv.settings import OpenSet, shown

# --- the interface ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class DrafterContext:
    """The arguments with which a drafter is created.

    Attributes:
        model: the model that verifies drafts.
        vocabulary: V, of the model.
        draft_tokens: maximum drafted tokens of a row in one round.
        draft_model: a small model to draft with, or a head of the model, if the user gave one.
        lookup_min, lookup_max: minimum and maximum number of last tokens that a drafter searches for in the text, if it
            searches for a certain number.
        policy: how the model's keys and values are kept.
    """

    model: nn.Module
    vocabulary: int
    draft_tokens: int
    draft_model: nn.Module | None = None
    lookup_min: int = 2
    lookup_max: int = 4
    policy: CachePolicy = field(default_factory=CachePolicy)

    def tap(self, hidden: Hidden = "final") -> HiddenTap:
        """The model's embedding and output head, and its hidden states."""
        return HiddenTap(self.model, hidden)


class Drafter(Protocol):
    """Proposes tokens that continue the rows. Proposals never change the text: a wrong one only costs time.

    Rows are identified by their order: `join` appends new rows, and `keep` removes all but some. Each round calls
    `propose` once at most, and then passes the tokens that each row received. A subclass implements the abstract
    methods; the others have the behaviour of a drafter without caches.

    Attributes:
        name: in statistics; without one, that of its class.
        step_size: tokens of a prompt that it reads at once; None for any number.
        equal_rows: whether it supports a single row only.
        proposals_cost: whether proposals take noticeable time, such as a pass of a model. If false, `propose` may also
            be called while nothing is drafted, to estimate its accuracy; those proposals are not used.
        caches: of all rows, one for each layer; none by itself.
        hidden: the model's hidden states that it reads: "final" after its last norm, or those that layers of these
            numbers return, side by side. Then one more argument has the state of the token before each token: (B, n,
            width) in `read` and `accepted`, with anything after a row's own tokens, and in `join` (B, width) of the
            token before the last one. They are zeros where they are not known. None reads none.
    """

    name: ClassVar[str] = ""
    hidden: Hidden | None = None
    step_size: int | None = None
    equal_rows: bool = False
    proposals_cost: bool = True
    caches: Sequence[Any] = ()

    @abstractmethod
    def join(self, prompts: Sequence[Sequence[int]], caches: list[Any]) -> None:
        """New rows.

        Args:
            prompts: all tokens so far of each, at least one.
            caches: those of `make_caches`, of all these rows, which have read all but the last token of each.
        """

    @abstractmethod
    def keep(self, rows: Sequence[int]) -> None:
        """Lets all other rows go."""

    @abstractmethod
    def propose(self, most: int, choice: Choice) -> Sequence[Sequence[int]]:
        """Tokens that each row may go on with: any number up to `most`, also none, and not the same for all rows.

        Args:
            choice: with logits of its own, a drafter guesses by the random numbers with which the model will choose.
        """

    @abstractmethod
    def accepted(self, tokens: Sequence[Sequence[int]]) -> None:
        """What each row got, at least 1 token: those of its draft that were right, and the one that the model chose."""

    def keep_private(self, rows: Sequence[int]) -> None:
        """What these rows, which have just joined, were asked and say is for no other row. Asked only of such rows."""
        return

    def make_caches(self) -> list[Any]:
        """New caches of one row, like those of a model; none by itself."""
        return []

    def read(self, rows: Sequence[Sequence[int]], caches: list[Any]) -> None:
        """Reads some tokens of prompts, of each row any number, into such caches. Not asked where there are none."""
        return

    def behind(self, row: int) -> int:
        """How many tokens of a row its caches have yet to read."""
        return 0

    def extract(self, row: int, behind: int) -> list[Any] | None:
        """Copies of a row's caches, without its last `behind` tokens; None where they cannot be had."""
        return []


class RemoteDrafter(Drafter):
    """Replaces the leader's drafter in the other processes, where it is never called to propose.

    Args:
        step_size, equal_rows, hidden: of the leader's drafter. The other processes compute the states that it reads,
            too: they have parts of the layers.
    """

    def __init__(self, step_size: int | None, equal_rows: bool, hidden: Hidden | None = None) -> None:
        self.step_size, self.equal_rows, self.hidden = step_size, equal_rows, hidden

    def join(self, prompts: Sequence[Sequence[int]], caches: list[Any], states: mx.array | None = None) -> None: ...

    def keep(self, rows: Sequence[int]) -> None: ...

    def propose(self, most: int, choice: Choice) -> Sequence[Sequence[int]]:
        raise AssertionError("the leader drafts")

    def accepted(self, tokens: Sequence[Sequence[int]], states: mx.array | None = None) -> None: ...


# --- a draft model ----------------------------------------------------------------------------------------------------
# A small model with the same tokenizer, which reads the accepted tokens and proposes the next ones.


class ModelDrafter(Drafter):
    """As many tokens for every row as it is asked for: one pass for each of them.

    Raises:
        ValueError: no draft model, one with another vocabulary, or with caches that cannot take back tokens.
    """

    name = "model"

    def __init__(self, context: DrafterContext) -> None:
        if context.draft_model is None:
            raise ValueError("the drafter model drafts with a model of its own: give a draft_model")
        if isinstance(context.draft_model, DraftHead):
            raise ValueError("got a head of the model, with which the drafter mtp drafts: leave out the drafter")
        # Both models must have the same tokens. The draft's graph is built for one token, and not evaluated.
        if (size := context.draft_model(mx.array([[0]])).shape[-1]) != context.vocabulary:
            raise ValueError(
                f"the draft model has a vocabulary of {size:,} tokens, the model one of {context.vocabulary:,}: "
                "choose a draft model with the same tokenizer"
            )
        # It reads all drafts but the last one by one, and goes back to before any of them.
        self._rows = DecodeBatch(context.draft_model, CachePolicy(), context.draft_tokens, context.draft_tokens - 1)
        self.step_size = self._rows.step_size
        self._drafted: list[list[int]] = []  # of each row, in this round
        self._draft_tokens = context.draft_tokens

    @property
    def equal_rows(self) -> bool:  # type: ignore[override]
        return rows_are_alone(self._rows.model)

    def join(self, prompts: Sequence[Sequence[int]], caches: list[Any]) -> None:
        self._rows.join(caches, [[prompt[-1]] for prompt in prompts])
        self._drafted += [[] for _ in prompts]

    def keep(self, rows: Sequence[int]) -> None:
        self._rows.keep(rows)
        self._drafted = [self._drafted[row] for row in rows]

    def propose(self, most: int, choice: Choice) -> list[list[int]]:
        if most == 0:
            self._drafted = [[] for _ in self._rows.pending]
            return self._drafted
        self._catch_up()
        pending = self._rows.pending
        lengths = [len(tokens) for tokens in pending]
        logits = self._rows.read(pending)
        here = mx.take_along_axis(logits, (mx.array(lengths) - 1)[:, None, None], axis=1)[:, 0]  # (B, V)
        tokens: list[mx.array] = []
        for ahead in range(most):
            if ahead:
                here = self._rows.step(tokens[-1])
            tokens.append(choice.guess(here, ahead))
            mx.async_eval(tokens[-1])  # type: ignore[no-untyped-call]
        by_row: Any = mx.stack(tokens, axis=1).tolist()
        self._drafted = list(by_row)
        return self._drafted

    def accepted(self, tokens: Sequence[Sequence[int]]) -> None:
        # It has read all drafted tokens but the last one: if that was accepted, it is still to be read.
        pairs = list(zip(self._drafted, tokens, strict=True))
        wrong = [max(len(drafted) - len(received), 0) for drafted, received in pairs]
        trim_prompt_cache(self._rows.caches, wrong, strict=True)
        for row, (drafted, received) in enumerate(pairs):
            unread = drafted[-1:] if drafted else self._rows.pending[row]
            self._rows.pending[row] = [*(unread if len(received) > len(drafted) else []), received[-1]]
        self._drafted = [[] for _ in tokens]

    @property
    def caches(self) -> Sequence[Any]:  # type: ignore[override]
        return self._rows.caches

    def make_caches(self) -> list[Any]:
        return self._rows.make_caches()

    def read(self, rows: Sequence[Sequence[int]], caches: list[Any]) -> None:
        read_chunk(self._rows.model, caches, rows)

    def behind(self, row: int) -> int:
        self._catch_up()
        return len(self._rows.pending[row])

    def _catch_up(self) -> None:
        """Reads what came while nothing was drafted, but for a few tokens: a pass over those is no longer."""
        few, step = self._draft_tokens + 1, self._rows.step_size
        while (longest := max((len(tokens) for tokens in self._rows.pending), default=0)) > few:
            count = min(longest - 1, step)
            read_chunk(self._rows.model, self._rows.caches, [tokens[:-1][:count] for tokens in self._rows.pending])
            self._rows.pending = [[*tokens[:-1][count:], tokens[-1]] for tokens in self._rows.pending]

    def extract(self, row: int, behind: int) -> list[Any] | None:
        return self._rows.extract(row, behind)


# --- a head of the model ----------------------------------------------------------------------------------------------
# It reads each token with the model's state before it, and guesses on from there. Its cache holds as many tokens as the
# caches of the model. Guesses beyond the first read the head's own outputs; what they leave in the cache is trimmed at
# once, and tokens that were right are read again with the model's states. W is the width of the states.

MAX_UNREAD = 64  # tokens of a row whose states are kept while nothing is drafted


class HeadDrafter(Drafter):
    """As many tokens for every row as it is asked for, one small pass for each.

    Raises:
        ValueError: the context has no head.
    """

    name = "mtp"

    def __init__(self, context: DrafterContext) -> None:
        head = context.draft_model
        if not isinstance(head, DraftHead):
            raise ValueError("the drafter mtp drafts with a head of the model: give what load_draft_head returns")
        self._head, self.hidden, self.step_size = head, head.hidden, chunk_for(head)
        self._empty = make_prompt_cache(head, head_policy(head, context.policy, context.draft_tokens), strict=False)
        self.caches: list[Any] = []
        # Of each row, tokens that the head has yet to read, and in the same places of (B, n, W) the states before them.
        self._unread: list[list[int]] = []
        self._states: mx.array | None = None

    def make_caches(self) -> list[Any]:
        return copy.deepcopy(self._empty)

    def join(self, prompts: Sequence[Sequence[int]], caches: list[Any], states: mx.array | None = None) -> None:
        assert states is not None
        attach_attention_hooks(self._head, caches)  # those from a file have none
        for cache, other in zip(self.caches, caches, strict=False):
            cache.extend(other)
        self.caches = self.caches or caches
        self._unread += [[prompt[-1]] for prompt in prompts]
        states = states[:, None]
        if self._states is not None:
            states = mx.concatenate([self._states, _padded(states, self._states.shape[1])])
        self._states = states

    def keep(self, rows: Sequence[int]) -> None:
        if not rows:
            self.caches, self._states = [], None
        elif list(rows) != list(range(len(self._unread))):
            for cache in self.caches:
                cache.filter(list(rows))
            self._states = None if self._states is None else self._states[mx.array(list(rows))]
        self._unread = [self._unread[row] for row in rows]

    def read(self, rows: Sequence[Sequence[int]], caches: list[Any], states: mx.array | None = None) -> None:
        attach_attention_hooks(self._head, caches)
        read_chunk(self._with(states), caches, rows)

    def _with(self, states: mx.array | None) -> Any:
        """The head, called with tokens and caches alone."""

        def forward(tokens: mx.array, cache: list[Any]) -> mx.array:
            assert states is not None
            return self._head(tokens, cache, _padded(states, tokens.shape[1]))

        return forward

    def propose(self, most: int, choice: Choice) -> list[list[int]]:
        if most == 0 or self._states is None:
            return [[] for _ in self._unread]
        lengths = mx.array([len(tokens) for tokens in self._unread])
        outputs = read_ragged(self._with(self._states), self.caches, self._unread)
        here = mx.take_along_axis(outputs, (lengths - 1)[:, None, None], axis=1)  # (B, 1, D)
        self._unread, self._states = [[] for _ in self._unread], None
        tokens: list[mx.array] = []
        for ahead in range(most):
            if ahead:
                here = self._head(tokens[-1][:, None], self.caches, here)
            tokens.append(choice.guess(self._head.logits(here[:, 0]), ahead))
            mx.async_eval(tokens[-1])  # type: ignore[no-untyped-call]
        if most > 1:
            trimmed = trim_all(self.caches, most - 1)
            assert trimmed, "its caches plan for it"
        by_row: Any = mx.stack(tokens, axis=1).tolist()
        return list(by_row)

    def accepted(self, tokens: Sequence[Sequence[int]], states: mx.array | None = None) -> None:
        assert states is not None
        before = [len(unread) for unread in self._unread]
        longest = max(map(len, tokens))
        new = states[:, :longest]
        if self._states is not None:
            new = mx.concatenate([self._states[:, : max(before)], new], axis=1)
            if len(set(before)) > 1:  # those of a row stand together
                count = max(n + len(row) for n, row in zip(before, tokens, strict=True))
                places = [[i if i < n else i - n + max(before) for i in range(count)] for n in before]
                last = new.shape[1] - 1
                new = mx.take_along_axis(new, mx.minimum(mx.array(places), last)[..., None], axis=1)
            mx.async_eval(new)  # type: ignore[no-untyped-call]  # or rounds without drafts would chain them
        self._states = new
        self._unread = [[*unread, *row] for unread, row in zip(self._unread, tokens, strict=True)]
        if max(map(len, self._unread)) > MAX_UNREAD:
            self._catch_up()

    def _catch_up(self) -> None:
        """Reads what came while nothing was drafted, but for the last token of each row."""
        read_chunk(self._with(self._states), self.caches, [tokens[:-1] for tokens in self._unread], wait=False)
        assert self._states is not None
        lengths = mx.array([len(tokens) for tokens in self._unread])
        self._states = mx.take_along_axis(self._states, (lengths - 1)[:, None, None], axis=1)
        self._unread = [tokens[-1:] for tokens in self._unread]

    def extract(self, row: int, behind: int) -> list[Any] | None:
        each = [cache.extract(row) for cache in self.caches]
        unread = self._unread[row]
        if (beyond := len(unread) - behind) > 0:
            assert self._states is not None
            read_ragged(self._with(self._states[row : row + 1]), each, [unread[:beyond]])
            return each
        # One that began behind the row's first tokens holds fewer, and begins anew.
        return each if trim_all(each, -beyond) else self.make_caches()


def _padded(states: mx.array, count: int) -> mx.array:
    """States (B, count, W): the first ones, or zeros after them."""
    if states.shape[1] >= count:
        return states[:, :count]
    more = mx.zeros((states.shape[0], count - states.shape[1], states.shape[2]), states.dtype)
    return mx.concatenate([states, more], axis=1)


# --- lookup drafters --------------------------------------------------------------------------------------------------
# What followed the same tokens before is proposed again, without a pass of any model.


class Text:
    """The tokens of a row so far, prompt and answer, and how a drafter continues them. Abstract.

    Attributes:
        private: whether its tokens are for no other row.
    """

    private = False

    @abstractmethod
    def extend(self, tokens: Sequence[int]) -> None:
        """Appends tokens."""

    @abstractmethod
    def continuation(self, max_tokens: int) -> list[int]:
        """A draft of up to `max_tokens` tokens."""

    def ended(self) -> None:
        """Its row is removed; not called for one that is private."""


class LookupDrafter(Drafter):
    """A `Text` for each row. Abstract: a drafter makes new ones.

    Raises:
        ValueError: a draft model.
    """

    proposals_cost = False

    def __init__(self, context: DrafterContext) -> None:
        if context.draft_model is not None:
            raise ValueError(f"the drafter {self.name} drafts without a model: leave out draft_model, or the drafter")
        self.context = context
        self._texts: list[Text] = []

    @abstractmethod
    def new_text(self, prompt: Sequence[int]) -> Text:
        """The text of a row that begins with a prompt."""

    def join(self, prompts: Sequence[Sequence[int]], caches: list[Any]) -> None:
        self._texts += [self.new_text(prompt) for prompt in prompts]

    def keep(self, rows: Sequence[int]) -> None:
        for row in set(range(len(self._texts))).difference(rows):
            if not self._texts[row].private:
                self._texts[row].ended()
        self._texts = [self._texts[row] for row in rows]

    def keep_private(self, rows: Sequence[int]) -> None:
        for row in rows:
            self._texts[row].private = True

    def propose(self, most: int, choice: Choice) -> list[list[int]]:
        return [text.continuation(most) for text in self._texts]

    def accepted(self, tokens: Sequence[Sequence[int]]) -> None:
        for text, received in zip(self._texts, tokens, strict=True):
            text.extend(received)


def repeat_from(text: Sequence[int], start: int, count: int) -> list[int]:
    """`count` tokens of a text from one of its places on; past its end, the same tokens come again."""
    tokens = list(text[start : start + count])
    while 0 < len(tokens) < count:
        tokens += tokens[: count - len(tokens)]
    return tokens


# --- n-grams ----------------------------------------------------------------------------------------------------------
# The last n tokens of a row occurred before, and what followed them then is proposed. They are found at their most
# recent place, the longest n first. Every n-gram is recorded when its last token comes, so a token takes the same time
# in a text of any length, and up to 400 bytes.


class NgramText(Text):
    """One text, and where each of its n-grams was last.

    Args:
        shortest, longest: n.
    """

    def __init__(self, shortest: int, longest: int) -> None:
        self._lengths = range(shortest, longest + 1)
        self._tokens: list[int] = []
        self._after: dict[tuple[int, ...], int] = {}  # an n-gram to the place after its most recent one
        self._match_end: int | None = None  # the place after the earlier one of the longest n-gram that ends the text

    def extend(self, tokens: Sequence[int]) -> None:
        for token in tokens:
            self._tokens.append(token)
            self._match_end, end = None, len(self._tokens)
            for length in self._lengths:
                if length > end:
                    break
                last = tuple(self._tokens[-length:])
                # Looked up before it is recorded: it would else match itself.
                self._match_end = self._after.get(last, self._match_end)
                self._after[last] = end

    def continuation(self, max_tokens: int) -> list[int]:
        return [] if self._match_end is None else repeat_from(self._tokens, self._match_end, max_tokens)


class NgramDrafter(LookupDrafter):
    """As many tokens as it is asked for, of rows that end with `lookup_min` tokens or more that were there before."""

    name = "ngram"

    def new_text(self, prompt: Sequence[int]) -> NgramText:
        text = NgramText(self.context.lookup_min, self.context.lookup_max)
        text.extend(prompt)
        return text


# --- suffixes ---------------------------------------------------------------------------------------------------------
# The longest suffix that occurred before, in the row's own text or in recent answers of other rows, and what came after
# it. A draft has as many tokens as were matched, at most. It changes no token; but the speed of an answer can reveal
# that the same text was generated for another client recently.

# Below the root lies a state from which every token leads to the root: no walk along links needs another end.
BOTTOM, ROOT = 0, 1
MAX_RECENT = 2**16  # tokens of a generation of recent answers, of which there are two
LEAD = 16  # tokens of a prompt that are kept before its answer, so that the beginning of an answer is found
BETWEEN = -1  # separates two answers: no token has this id


class SuffixAutomaton:
    """A text, and the automaton of its substrings.

    A suffix automaton has every substring of a growing text, in a few numbers for each token, built online. A state
    represents substrings that end at the same places of the text, each a suffix of the longest of them; its link leads
    to the longest suffix that ends at more places. So the link of the state of the whole text is the longest suffix
    that occurred before, and a token is added in constant time on average (Blumer et al. 1985, "The smallest
    automaton recognizing the subwords of a text"). Most states continue with one token only, stored in flat arrays. A
    suffix is found where its state occurred most recently.

    Attributes:
        text: token ids, also negative ones.
        matched: tokens of the longest suffix of the text that was there before.
        after: the place after that suffix where it was met before; no place of interest if there is none.
        lengths, links: of each state, the tokens of its longest substring, and its link.
        ends: of each state, the place after its substrings where they were met most recently.
    """

    def __init__(self) -> None:
        self.text = array("i")
        self.matched = self.after = 0
        self.lengths = array("i", [-1, 0])
        self.links = array("i", [BOTTOM, BOTTOM])
        self.ends = array("i", [0, 0])
        self._last = ROOT
        # Of each state, the first token with which it goes on and where to (BOTTOM: it does not); others beside them.
        self._token = array("i", [0, 0])
        self._to = array("i", [BOTTOM, BOTTOM])
        self._others: dict[int, dict[int, int]] = {}

    def step(self, state: int, token: int) -> int:
        """Where a state goes on to with a token; BOTTOM where that is no substring."""
        if state == BOTTOM:
            return ROOT
        if self._token[state] == token:
            return self._to[state]
        others = self._others.get(state)
        return BOTTOM if others is None else others.get(token, BOTTOM)

    def extend(self, tokens: Iterable[int]) -> None:
        """The text goes on with these."""
        for token in tokens:
            self.text.append(token)
            end, state = len(self.text), self._last
            new = self._last = self._state(self.lengths[state] + 1, end)
            while (target := self.step(state, token)) == BOTTOM:
                self._lead(state, token, new)
                state = self.links[state]
            if self.lengths[target] > self.lengths[state] + 1:
                target = self._split(target, state, token)
            self.links[new] = target
            self.matched, self.after = self.lengths[target], self.ends[target]
            self.ends[target] = end

    def _state(self, length: int, end: int) -> int:
        """A new one, from which nothing leads on."""
        self.lengths.append(length)
        self.ends.append(end)
        for each in (self.links, self._token, self._to):
            each.append(0)
        return len(self.lengths) - 1

    def _lead(self, state: int, token: int, to: int) -> None:
        if self._to[state] == BOTTOM or self._token[state] == token:
            self._token[state], self._to[state] = token, to
        else:
            self._others.setdefault(state, {})[token] = to

    def _split(self, target: int, state: int, token: int) -> int:
        """The shorter substrings of a state, those by `state` and its links, end at one more place: a new state."""
        new = self._state(self.lengths[state] + 1, self.ends[target])
        self._token[new], self._to[new], self.links[new] = self._token[target], self._to[target], self.links[target]
        if target in self._others:
            self._others[new] = dict(self._others[target])
        self.links[target] = new
        while self.step(state, token) == target:
            self._lead(state, token, new)
            state = self.links[state]
        return new


class Matcher:
    """How much of the end of one text is in the automaton of another, which may grow meanwhile.

    Attributes:
        matched: tokens of the longest suffix that is in there; if the automaton has grown, it may be that a longer one
            is by now.
    """

    def __init__(self, automaton: SuffixAutomaton) -> None:
        self.automaton, self.matched, self._state = automaton, 0, ROOT

    @property
    def after(self) -> int:
        """The place in the automaton's text after that suffix."""
        return self.automaton.ends[self._current()]

    def extend(self, tokens: Iterable[int]) -> None:
        """The text goes on with these."""
        automaton = self.automaton
        for token in tokens:
            state = self._current()
            while (target := automaton.step(state, token)) == BOTTOM:
                state = automaton.links[state]
                self.matched = automaton.lengths[state]
            self._state, self.matched = target, self.matched + 1

    def _current(self) -> int:
        """The state of the suffix: if its state was split since, that may be the shorter ones' now."""
        automaton = self.automaton
        while automaton.lengths[automaton.links[self._state]] >= self.matched:
            self._state = automaton.links[self._state]
        return self._state


class RecentAnswers:
    """Answers of rows that are removed, each with the end of its prompt.

    Args:
        max_tokens: of a generation. When one is full, the one before it is forgotten.

    Attributes:
        generations: the newest first, one or two.
    """

    def __init__(self, max_tokens: int = MAX_RECENT) -> None:
        self._max_tokens = max_tokens
        self.generations = [SuffixAutomaton()]

    def add(self, tokens: Sequence[int]) -> None:
        tokens = [*tokens[-(self._max_tokens - 1) :], BETWEEN]
        if len(self.generations[0].text) + len(tokens) > self._max_tokens:
            self.generations = [SuffixAutomaton(), self.generations[0]]
        self.generations[0].extend(tokens)


class SuffixText(Text):
    """One text, its automaton, and how its end matches recent answers."""

    def __init__(self, prompt: Sequence[int], min_match: int, recent: RecentAnswers) -> None:
        self._automaton, self._min_match, self._recent = SuffixAutomaton(), min_match, recent
        self._shared_from = max(0, len(prompt) - LEAD)  # tokens from here on become a recent answer
        self._prompt = len(prompt)
        self._matchers: list[Matcher] = []
        self._automaton.extend(prompt)
        self._match(prompt[self._shared_from :])

    def extend(self, tokens: Sequence[int]) -> None:
        self._automaton.extend(tokens)
        self._match(tokens)

    def _match(self, tokens: Sequence[int]) -> None:
        matchers = {id(matcher.automaton): matcher for matcher in self._matchers}
        self._matchers = [matchers.get(id(each)) or Matcher(each) for each in self._recent.generations]
        for matcher in self._matchers:
            matcher.extend(tokens)

    def continuation(self, max_tokens: int) -> list[int]:
        """A draft from the longest match; from the row's text unless that of another answer is longer."""
        other = max(self._matchers, key=lambda matcher: matcher.matched)  # of the newest answers, if both are as long
        if other.matched >= self._min_match and other.matched > self._automaton.matched:
            draft = list(other.automaton.text[other.after : other.after + min(max_tokens, other.matched)])
            if draft[:1] != [BETWEEN]:
                return draft[: draft.index(BETWEEN)] if BETWEEN in draft else draft
        if self._automaton.matched < self._min_match:
            return []
        return repeat_from(self._automaton.text, self._automaton.after, min(max_tokens, self._automaton.matched))

    @property
    def matched(self) -> int:
        """Last tokens of the text that were there before."""
        return max(self._automaton.matched, *(matcher.matched for matcher in self._matchers))

    def ended(self) -> None:
        if len(self._automaton.text) > self._prompt:
            self._recent.add(list(self._automaton.text[self._shared_from :]))


class SuffixDrafter(LookupDrafter):
    """As many tokens as the end of a row has in common with what was said before, from `lookup_min` up."""

    name = "suffix"

    def __init__(self, context: DrafterContext) -> None:
        super().__init__(context)
        self._recent = RecentAnswers()

    @property
    def matched(self) -> list[int]:
        """Of each row, the last tokens that were there before."""
        return [text.matched for text in self._texts if isinstance(text, SuffixText)]

    def new_text(self, prompt: Sequence[int]) -> SuffixText:
        return SuffixText(prompt, self.context.lookup_min, self._recent)


# --- both -------------------------------------------------------------------------------------------------------------

SURE = 4  # tokens that were there before, from which on what followed them is right more often than a head
HEAD_TOKENS = 3  # guesses of a head in a row: each costs a pass of it


class JointDrafter(HeadDrafter):
    """For each row what followed its last tokens before, if these are many enough, else what a head guesses."""

    name = "mtp and suffix"

    def __init__(self, context: DrafterContext) -> None:
        super().__init__(context)
        self._suffixes = SuffixDrafter(replace(context, draft_model=None))

    def join(self, prompts: Sequence[Sequence[int]], caches: list[Any], states: mx.array | None = None) -> None:
        super().join(prompts, caches, states)
        self._suffixes.join(prompts, [])

    def keep(self, rows: Sequence[int]) -> None:
        super().keep(rows)
        self._suffixes.keep(rows)

    def keep_private(self, rows: Sequence[int]) -> None:
        self._suffixes.keep_private(rows)

    def propose(self, most: int, choice: Choice) -> list[list[int]]:
        found, sure = self._suffixes.propose(most, choice), self._suffixes.matched
        if all(count >= SURE for count in sure):
            return found
        guessed = super().propose(min(most, HEAD_TOKENS), choice)
        return [row if count >= SURE else other for row, count, other in zip(found, sure, guessed, strict=True)]

    def accepted(self, tokens: Sequence[Sequence[int]], states: mx.array | None = None) -> None:
        super().accepted(tokens, states)
        self._suffixes.accepted(tokens)


# --- names ------------------------------------------------------------------------------------------------------------


Factory = Callable[[DrafterContext], Drafter]


def make_best(context: DrafterContext) -> Drafter:
    """Suffixes, of which as many tokens are right as of n-grams, of a third; with a head where the model has one."""
    return JointDrafter(context) if isinstance(context.draft_model, DraftHead) else SuffixDrafter(context)


OURS: dict[str, Factory] = {
    "auto": make_best,
    "model": ModelDrafter,
    "mtp": HeadDrafter,
    "ngram": NgramDrafter,
    "suffix": SuffixDrafter,
}

DRAFTERS: OpenSet[Factory] = OpenSet("drafter", "one", OURS)


def drafter_names() -> list[str]:
    """The names that `drafter=` takes."""
    return DRAFTERS.names()


def register_drafter(name: str, factory: Factory) -> None:
    """Registers a drafter under a name, for `drafter=`.

    Args:
        name: replaces a drafter of the same name.
        factory: makes a new `Drafter` of a `DrafterContext`; a class will do.

    Raises:
        ValueError: a factory that cannot be called, or a name that is no text.
    """
    if not isinstance(name, str):
        raise ValueError(f"the name of a drafter is {name!r}: give a text")
    if not callable(factory):
        raise ValueError(f"the drafter {name} is {factory!r}: give a function DrafterContext -> Drafter")
    DRAFTERS.registered[name] = factory


def find_drafter(drafter: str | Factory | Drafter | None, context: DrafterContext) -> Drafter:
    """A drafter for one model: of a name, of a factory, or the one that is given; of None, the draft model.

    Raises:
        ValueError: no drafter has this name, or what the drafter itself refuses.
        TypeError: something else than these, or a factory that makes something else than a drafter.
    """
    if drafter is None:
        if context.draft_model is None:
            raise ValueError("got neither a draft_model nor a drafter: give one of them")
        drafter = "mtp" if isinstance(context.draft_model, DraftHead) else "model"
    if isinstance(drafter, str):
        return DRAFTERS.find(drafter)(context)
    instance = drafter(context) if callable(drafter) else drafter
    if not all(hasattr(instance, name) for name in Drafter.__abstractmethods__):
        subject = "drafter is" if instance is drafter else "the factory of drafter= has made"
        problem = f"{subject} {shown(instance)}"
        raise TypeError(f"{problem}: give a name of drafter_names(), a Drafter, or what makes one of a DrafterContext")
    if instance is drafter and context.draft_model is not None:
        raise ValueError("got a drafter, which is made already, and a draft_model that it cannot use: give one of them")
    return instance
