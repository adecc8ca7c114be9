"""Training of a head that drafts: one layer that learns to guess what a model says next from the model's own states.

The head reads each token with the model's state before it, and learns the model's distribution over the next token, and
again with its own output in the place of the state, as it drafts (as EAGLE-3 does, Li et al. 2025). It begins with the
linear map from both to the next state that ridge regression gives, which is worth as much as tens of thousands of
tokens of training. Matrices are trained with Muon (Jordan et al. 2024), the rest with AdamW.

B pieces of texts, S tokens of each, D the hidden size, n the tokens that the head guesses.
"""

from __future__ import annotations

import hashlib
import json
import os
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import mlx.optimizers as optim
import numpy as np
from mlx.utils import tree_flatten, tree_unflatten

from mlx_kv.cache.checks import check_type
from mlx_kv.cache.protocol import AttentionCall
from mlx_kv.calibration.requests import TrainingTexts
from mlx_kv.calibration.texts import MIN_TOKENS, Tokens
from mlx_kv.files import tensor_files
from mlx_kv.files.atomic_write import check_replaceable
from mlx_kv.files.serialization import model_fingerprint
from mlx_kv.generation.encoding import tokens_of_prompt, wrap_tokenizer
from mlx_kv.generation.generate import batch_generate
from mlx_kv.generation.sampling import TemperatureSampler
from mlx_kv.mlxlm.attention import AttentionPatch
from mlx_kv.mlxlm.head_files import HeadShape
from mlx_kv.mlxlm.heads import DraftHead
from mlx_kv.mlxlm.loading import fit_to_device, vocabulary_of
from mlx_kv.mlxlm.probe import check_model
from mlx_kv.mlxlm.taps import HiddenTap, states_before
from mlx_kv.settings import whole_number

TOKENS, VOCABULARY = 1_000_000, 8192  # to train on; that a head guesses
PIECE, BATCH = 256, 4  # tokens; pieces of one update
ROUND_TEXTS, ROUND_REQUESTS, ANSWER = 16, 32, 220  # of a round: texts, requests, tokens of each answer
FIRST_ROUNDS = 4  # whose tokens are read twice: for the linear map, and to train on
RATE, NORM_RATE, WARM_UP, LAST_RATE = 0.005, 1e-3, 20, 0.02  # of matrices; of the rest; updates; of the first rate
SECOND = 0.5  # weight of the guess after a guess
RIDGE = 1e-2  # penalty, relative to the mean of the diagonal
HELD_OUT, DEEP = 24, 3  # requests that are not trained on; guesses in a row that are measured
FAR = 10**9  # a number that no request of a training has
HEAD_DIM = 64
FORMAT = "mlx-kv draft head in progress 1"
STATE = "state.safetensors"


def train_drafter(
    model: nn.Module,
    tokenizer: Any,
    texts: Sequence[str | Sequence[int]] | None = None,
    *,
    tokens: int = TOKENS,
    vocabulary: int = VOCABULARY,
    progress: Callable[[int, int], None] | None = None,
    resume: str | Path | None = None,
) -> DraftHead:
    """Trains a head that drafts for a model, for `draft_model=` of all functions that generate, or `save_draft_head`.

    Half of what it learns from, or more, the model writes itself, as answers to requests, greedily and sampled.

    Args:
        model: any model of mlx-lm with an embedding and an output head.
        tokenizer: as `load` returns it.
        texts: strings or token ids, of at least 64 tokens each, read besides; None are texts of Python's library and of
            this package.
        tokens: to train on.
        vocabulary: the tokens that it guesses, the most frequent ones; all the model's at most.
        progress: called after each update, with the number of tokens done, and of all.
        resume: a directory for the training in progress, made if it is not there and removed at the end. A call with
            the same arguments continues an interrupted one.

    Returns:
        The head. Its `details` have the acceptance by position on held-out requests, after shares of the training.

    Raises:
        TypeError: an argument of another type.
        ValueError: texts that are too short, numbers below 1, or a `resume` that is no directory of a training.

    Example:
        >>> model, tokenizer = load("models/smollm2")  # doctest: +SKIP
        >>> head = train_drafter(model, tokenizer)  # doctest: +SKIP
        >>> save_draft_head("models/smollm2.kvdraft.safetensors", head, model)  # doctest: +SKIP
    """
    check_model("model", model)
    check_type("texts", texts, Sequence | None, "give a list of texts, each a string or token ids")
    if isinstance(texts, str | bytes):
        raise TypeError("texts is one text: give a list of texts")
    check_type("progress", progress, Callable | None, "give a function of two numbers, or None")
    check_type("resume", resume, str | os.PathLike | None, "give the name of a directory")
    whole_number("tokens", tokens, minimum=1)
    whole_number("vocabulary", vocabulary, minimum=1)
    tokenizer = wrap_tokenizer(tokenizer)
    known = vocabulary_of(model)
    own = None
    if texts is not None:
        own = [tokens_of_prompt(tokenizer, text, known, f"text {i}") for i, text in enumerate(texts)]
        if short := [i for i, text in enumerate(own) if len(text) < MIN_TOKENS]:
            raise ValueError(f"text {short[0]} has {len(own[short[0]])} tokens, of at least {MIN_TOKENS}")
    material = Material(model, tokenizer, own)
    training = Training(model, material, tokens, min(vocabulary, known), None if resume is None else Path(resume))
    training.run(progress or (lambda done, total: None))
    return training.head


class Material:
    """Pieces of texts, in rounds: each has some to read, and answers of the model to requests.

    Args:
        texts: token ids; None are those of `TrainingTexts`.
    """

    def __init__(self, model: nn.Module, tokenizer: Any, texts: Sequence[Tokens] | None) -> None:
        self._model, self._tokenizer, self._texts = model, tokenizer, texts
        self._drawn = TrainingTexts(tokenizer)
        self._first: dict[int, list[Tokens]] = {}  # rounds that are wanted twice
        told = json.dumps([texts, self._drawn.request(0)])
        self.digest = hashlib.blake2b(told.encode(), digest_size=16).hexdigest()

    def first_rounds(self) -> list[Tokens]:
        """The pieces of the rounds that come first."""
        self._first = {number: self.round(number) for number in range(FIRST_ROUNDS)}
        return [piece for pieces in self._first.values() for piece in pieces]

    def round(self, number: int) -> list[Tokens]:
        """The pieces of a round, in a random order; the same ones each time."""
        if (known := self._first.pop(number, None)) is not None:
            return known
        drawn = random.Random(f"round {number}")
        first, count = number * ROUND_TEXTS, number * ROUND_REQUESTS
        if self._texts is None:
            texts = [self._drawn.text(first + i, PIECE) for i in range(ROUND_TEXTS)]
        else:
            texts = [_window(drawn, drawn.choice(self._texts)) for _ in range(ROUND_TEXTS)]
        requests = [self._drawn.request(count + i) for i in range(ROUND_REQUESTS)]
        sampler = TemperatureSampler(0.7) if number % 2 else None
        answered = self.answers(requests, sampler, number)
        texts += [[*request, *answer] for request, answer in zip(requests, answered, strict=True)]
        pieces = [text[i : i + PIECE] for text in texts for i in range(0, len(text), PIECE)]
        pieces = [piece for piece in pieces if len(piece) >= PIECE // 4]
        drawn.shuffle(pieces)
        return pieces

    def held_out(self) -> list[tuple[Tokens, Tokens]]:
        """Requests of which no round has any, and the model's greedy answers."""
        requests = [self._drawn.request(FAR + i) for i in range(HELD_OUT)]
        return list(zip(requests, self.answers(requests, None, 0), strict=True))

    def answers(self, requests: Sequence[Tokens], sampler: TemperatureSampler | None, seed: int) -> list[Tokens]:
        said: list[Tokens] = [[] for _ in requests]
        told = batch_generate(
            self._model,
            self._tokenizer,
            requests,
            max_tokens=ANSWER,
            max_batch_size=len(requests),
            sampler=sampler,
            seed=None if sampler is None else seed,
        )
        for token in told:
            said[token.index].append(token.token)
        return said


@dataclass
class Progress:
    """Where a training is.

    Attributes:
        rounds: that are done.
        tokens: that were trained on.
        curve: tokens trained on, and the acceptance at each position then.
    """

    rounds: int = 0
    tokens: int = 0
    curve: list[tuple[int, list[float]]] = field(default_factory=list)


class Training:
    """One training, in memory and, to continue later, in a directory.

    Args:
        tokens: to train on.
        vocabulary: n.
        folder: where it is stored; None stores nothing.

    Attributes:
        head: that is trained.
    """

    def __init__(self, model: nn.Module, material: Material, tokens: int, vocabulary: int, folder: Path | None) -> None:
        self._model, self._material, self._tokens, self._folder = model, material, tokens, folder
        self._tap, self._at = HiddenTap(model), Progress()
        self._subject = f"{model_fingerprint(model)} {tokens} {vocabulary} {material.digest}"
        size = self._tap.width
        heads = max(1, size // HEAD_DIM)
        kv_heads = next(count for count in range(max(1, heads // 3), 0, -1) if heads % count == 0)
        embedded = self._tap.embed(mx.array([[0]])).shape[-1]
        if embedded != size:
            raise ValueError(f"its embeddings have {embedded} channels, its states {size}: no head can be trained")
        shape = HeadShape(size, heads, kv_heads, min(size, HEAD_DIM), 8 * size // 3 // 32 * 32 or 32, vocabulary)
        mx.random.seed(0)
        self.head = shape.make_head()
        fit_to_device(self.head)
        rate = self._rate(RATE)
        self._optimizer = optim.MultiOptimizer(
            [optim.Muon(rate, weight_decay=0.0), optim.AdamW(self._rate(NORM_RATE), betas=[0.9, 0.95])],
            [lambda _, weight: weight.ndim == 2],
        )
        parameters: Any = self.head.trainable_parameters  # untyped
        self._optimizer.init(parameters())
        self._gradient = nn.value_and_grad(self.head, self._loss)
        self._held_out: list[tuple[Tokens, Tokens]] = []
        if folder is not None:
            self._load(folder)

    def _rate(self, first: float) -> Any:
        updates = max(2 * WARM_UP, self._tokens // (BATCH * PIECE))
        parts = [
            optim.linear_schedule(0, first, WARM_UP),
            optim.cosine_decay(first, updates - WARM_UP, first * LAST_RATE),
        ]
        return optim.join_schedules(parts, [WARM_UP])

    def run(self, progress: Callable[[int, int], None]) -> None:
        """All of it, from where it is."""
        at, total = self._at, self._tokens
        if not at.rounds:
            self._begin()
        self._held_out = self._material.held_out()
        marks = [share for share in (total // 8, total // 4, total // 2) if share > at.tokens]
        while at.tokens < total:
            pieces = self._material.round(at.rounds)
            for i in range(0, len(pieces), BATCH):
                at.tokens += self._update(pieces[i : i + BATCH])
                progress(min(at.tokens, total), total)
                if marks and at.tokens >= marks[0]:
                    self._measure()
                    marks = [mark for mark in marks if mark > at.tokens]
                if at.tokens >= total:
                    break
            at.rounds += 1
            self._save()
        self._measure()
        self.head.details.update(tokens=at.tokens, acceptance=at.curve)
        self.head.set_dtype(self._tap.embed(mx.array([[0]])).dtype)  # it learned in float32
        self._remove()

    # --- the beginning ------------------------------------------------------------------------------------------------

    def _begin(self) -> None:
        """Chooses the tokens to guess, and makes the head the linear map to the next state."""
        pieces = self._material.first_rounds()
        assert self.head.ids is not None
        counts = np.bincount(np.concatenate(pieces), minlength=self._tap.vocabulary)
        # Those that were not met follow in the order of their ids: in most tokenizers the frequent ones come first.
        ids = np.sort(np.argsort(-counts, kind="stable")[: self.head.ids.size])
        self.head.guess_only(mx.array(ids.astype(np.int32)))
        self.head.bind(self._model)
        size = self._tap.width
        gram, product = mx.zeros((2 * size, 2 * size)), mx.zeros((2 * size, size))
        squares, count = mx.array(0.0), 0
        for i in range(0, len(pieces), BATCH):
            embedded, states, mask = self._read(pieces[i : i + BATCH])
            both = [self.head.enorm(embedded), self.head.hnorm(states_before(states))]
            known = mask.reshape(-1, 1)
            x = (mx.concatenate(both, axis=-1).reshape(-1, 2 * size) * known).astype(mx.float32)
            gram, product = gram + x.T @ x, product + x.T @ _normed(states.astype(mx.float32)).reshape(-1, size)
            squares = squares + (states.astype(mx.float32).square().mean(axis=-1) * mask).sum()
            count += sum(map(len, pieces[i : i + BATCH]))
            mx.eval(gram, product, squares)
        wide = np.array(gram.astype(mx.float32), dtype=np.float64)
        wide += np.eye(2 * size) * np.trace(wide) / (2 * size) * RIDGE
        weights = np.linalg.solve(wide, np.array(product.astype(mx.float32), dtype=np.float64)).T
        layer: Any = self.head.layer
        self.head.fc.weight = mx.array(weights.astype(np.float32)).astype(self.head.fc.weight.dtype)
        layer.self_attn.o_proj.weight *= 0.0  # the layer adds nothing yet
        layer.mlp.down_proj.weight *= 0.0
        self.head.norm.weight *= mx.sqrt(squares / count)
        mx.eval(self._weights())

    # --- updates ------------------------------------------------------------------------------------------------------

    def _read(self, pieces: Sequence[Tokens]) -> tuple[mx.array, mx.array, mx.array]:
        """Embedded tokens and states (B, S, D) of pieces, padded, and which tokens are theirs (B, S)."""
        longest = max(map(len, pieces))
        tokens = mx.array([[*piece, *[0] * (longest - len(piece))] for piece in pieces])
        mask = mx.arange(longest) < mx.array([len(piece) for piece in pieces])[:, None]
        _, states = self._tap(tokens)
        embedded = self._tap.embed(tokens)
        return embedded, states, mask.astype(states.dtype)

    def _loss(
        self, head: DraftHead, embedded: mx.array, states: mx.array, wanted: mx.array, mask: mx.array
    ) -> mx.array:
        """Cross entropy of both guesses with the model's distribution over the tokens that the head guesses."""
        total, before = mx.array(0.0), states_before(states)
        for weight in (1.0, SECOND):
            outputs = head.read(embedded, before, "causal", None)
            logits = outputs @ head.output_rows().T
            losses = mx.logsumexp(logits, axis=-1) - (wanted * logits).sum(axis=-1)
            total = total + weight * (losses * mask).sum() / mask.sum()
            before = states_before(outputs)
        return total

    def _update(self, pieces: Sequence[Tokens]) -> int:
        """One update of the weights; returns the number of tokens."""
        embedded, states, mask = self._read(pieces)
        wanted = mx.softmax(states @ self.head.output_rows().T, axis=-1)
        mx.eval(embedded, states, wanted)
        with AttentionPatch(self.head, backend=_Forward()):  # what computes attention here may have no gradient
            loss, gradients = self._gradient(self.head, embedded, states, wanted, mask)
        gradients = _clipped(gradients)
        self._optimizer.update(self.head, gradients)
        mx.eval(self._weights(), self._optimizer.state, loss)
        return sum(map(len, pieces))

    def _measure(self) -> None:
        """Measures how many held-out tokens are right at each position of a draft, of those before which all are."""
        right, tried = np.zeros(DEEP), np.zeros(DEEP)
        for request, answer in self._held_out:
            embedded, states, _ = self._read([[*request, *answer]])
            said = np.array([*request, *answer])[len(request) :]
            before, alive = states_before(states), np.ones(len(answer), bool)
            for depth in range(DEEP):
                outputs = self.head.read(embedded, before, "causal", None)
                guessed = np.array(mx.argmax(self.head.logits(outputs[0]), axis=-1))[len(request) - 1 : -1]
                alive[:depth] = False  # drafts begin in the answer
                tried[depth] += alive.sum()
                alive &= guessed == said
                right[depth] += alive.sum()
                alive, before = np.concatenate([[False], alive[:-1]]), states_before(outputs)
        rates = right / np.maximum(tried, 1)
        self._at.curve.append((self._at.tokens, [round(float(rate), 4) for rate in rates]))

    def _weights(self) -> Any:
        return self.head.parameters()  # type: ignore[no-untyped-call]

    # --- files --------------------------------------------------------------------------------------------------------

    def _save(self) -> None:
        if self._folder is None:
            return
        self._folder.mkdir(exist_ok=True)
        arrays = {f"head.{name}": x for name, x in _flat(self._weights())}
        arrays |= {f"optimizer.{name}": x for name, x in _flat(self._optimizer.state)}
        assert self.head.ids is not None
        at = self._at
        words = {"format": FORMAT, "subject": self._subject, "curve": json.dumps(at.curve)}
        words |= {"at": json.dumps([at.rounds, at.tokens])}
        check_replaceable(self._folder / STATE, is_training, "file of a training in progress", fix="")
        tensor_files.write(self._folder / STATE, arrays | {"ids": self.head.ids}, words)

    def _load(self, folder: Path) -> None:
        """Continues what is stored, if it is of this model and these settings."""
        if folder.exists() and not folder.is_dir():
            raise ValueError(f"{folder} exists and is not a directory: give the name of one for the training")
        if not folder.is_dir():
            if not folder.parent.is_dir():
                raise ValueError(f"there is no folder {folder.parent}: make it first")
            return
        check_replaceable(folder / STATE, is_training, "file of a training in progress", fix="")
        try:
            file = tensor_files.read(folder / STATE)
        except (OSError, ValueError):
            return
        if file.words.get("subject") != self._subject:
            return
        parts: dict[str, list[tuple[str, mx.array]]] = {"head": [], "optimizer": [], "ids": []}
        for name, array in file.arrays.items():
            part, _, rest = name.partition(".")
            parts.setdefault(part, []).append((rest, array))
        self.head.guess_only(file.arrays["ids"])
        self.head.load_weights(parts["head"])
        self.head.bind(self._model)
        self._optimizer.state = tree_unflatten(parts["optimizer"])
        rounds, tokens = json.loads(file.words["at"])
        self._at = Progress(rounds, tokens, [tuple(point) for point in json.loads(file.words["curve"])])

    def _remove(self) -> None:
        if self._folder is None or not is_training(self._folder / STATE):
            return
        (self._folder / STATE).unlink()
        if not any(self._folder.iterdir()):
            self._folder.rmdir()


def _window(drawn: random.Random, text: Tokens) -> Tokens:
    """A piece of a text."""
    first = drawn.randrange(max(1, len(text) - PIECE + 1))
    return text[first : first + PIECE]


class _Forward:
    """Attention as mlx-lm computes it."""

    def attend(self, call: AttentionCall) -> mx.array:
        return call.forward()


def _normed(states: mx.array) -> mx.array:
    return mx.fast.rms_norm(states, None, 1e-5)


def _clipped(gradients: Any) -> Any:
    clip: Any = optim.clip_grad_norm  # untyped
    return clip(gradients, 1.0)[0]


def _flat(tree: Any) -> list[tuple[str, mx.array]]:
    named: Any = tree_flatten(tree)
    return [(name, x) for name, x in named if isinstance(x, mx.array)]


def is_training(path: Path) -> bool:
    """Whether a file is of a training in progress."""
    return tensor_files.has_format(path, FORMAT)
