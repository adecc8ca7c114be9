"""The task of the text models: Python's standard library, with documents that ask for what stood earlier.

Decides their tokenizer, which windows a step reads, and what is measured of a trained model. Knows nothing about
optimisers, checkpoints or the format of a shipped model; what stands in a document is `reference_corpus`'s affair.
"""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy as np
import torch
from reference_card import text_card
from reference_corpus import END_OF_TEXT, HELD_OUT_PERCENT, TEMPLATES, VOCAB_SIZE, Corpus, make_pairs, read_sources
from reference_network import Llama, token_losses
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

TOKENS_PER_STEP = 8192
SHORT, LONG = 1024, 4096
LONG_FROM = 0.75  # the share of the steps after which windows are long
DISTANCES = (64, 256, 512, 900, 2000, 3600)
RECALL_TRIALS = 100


def get_tokenizer(work: Path) -> Tokenizer:
    """The byte-level BPE of 4,096 tokens, trained once on the training side of the corpus. Digits stand alone."""
    path = work / "tokenizer.json"
    if not path.exists():
        tokenizer = Tokenizer(models.BPE())
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
            [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
        )
        tokenizer.decoder = decoders.ByteLevel()
        trainer = trainers.BpeTrainer(
            vocab_size=VOCAB_SIZE,
            special_tokens=[END_OF_TEXT],
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
            show_progress=False,
        )
        tokenizer.train_from_iterator(read_sources(held_out=False), trainer)
        tokenizer.save(str(path))
    return Tokenizer.from_file(str(path))


def get_tokens(tokenizer: Tokenizer, work: Path, held_out: bool) -> np.ndarray:
    """All texts of one side as one array of ids, files separated by the end-of-text token."""
    path = work / ("held_out.npy" if held_out else "train.npy")
    if not path.exists():
        ids: list[int] = []
        for encoding in tokenizer.encode_batch(read_sources(held_out)):
            ids += [*encoding.ids, tokenizer.token_to_id(END_OF_TEXT)]
        np.save(path, np.array(ids, dtype=np.int32))
    return np.load(path)


def make_corpus(tokenizer: Tokenizer, work: Path, held_out: bool) -> Corpus:
    return Corpus(
        get_tokens(tokenizer, work, held_out),
        encode=lambda text: tokenizer.encode(text).ids,
        decode=lambda ids: tokenizer.decode(ids),
        end_of_text=tokenizer.token_to_id(END_OF_TEXT),
    )


@torch.no_grad()
def held_out_loss(model: Llama, corpus: Corpus, length: int, most_windows: int | None = None) -> float:
    """Nats per token on consecutive windows of held-out files."""
    tokens = torch.from_numpy(corpus.tokens.astype(np.int64))
    windows = [tokens[i : i + length + 1] for i in range(0, len(tokens) - length - 1, length)][:most_windows]
    cos, sin = model.angles(length)
    device = cos.device
    return sum(float(token_losses(model, w[None].to(device), cos, sin)) for w in windows) / len(windows)


@torch.no_grad()
def recall_accuracy(
    model: Llama, corpus: Corpus, tokenizer: Tokenizer, distance: int, trials: int = RECALL_TRIALS
) -> float:
    """Share of values repeated whole (greedy) when their only assignment stands about `distance` tokens back."""
    rng, correct, pairs = random.Random(f"recall/{distance}"), 0, 4
    for _ in range(trials):
        assign, check = rng.choice(TEMPLATES)
        items = make_pairs(rng, pairs)
        key, value = rng.choice(items)
        head = "".join(assign.format(key=k, value=v) for k, v in items)
        filler = corpus.decode(corpus._code(rng, distance)) + "\n"
        text = head + filler + check.format(key=key, value=value)
        encoding = tokenizer.encode(text)
        span_end = len(text) - len(check.split("{value}")[1])
        span_start = span_end - len(value)
        wanted = [i for i, (a, b) in enumerate(encoding.offsets) if b > span_start and a < span_end]
        ids = torch.tensor(encoding.ids, device=model.model.norm.weight.device)
        if len(ids) > LONG:
            ids = ids[-LONG:]
            wanted = [i - (len(encoding.ids) - LONG) for i in wanted]
        cos, sin = model.angles(len(ids) - 1)
        best = model(ids[None, :-1], cos, sin)[0].argmax(-1)
        correct += all(int(best[i - 1]) == int(ids[i]) for i in wanted)
    return correct / trials


class TextTask:
    """What a trainer asks: batches, a line of progress, the tokenizer, and measurements for the model card."""

    steps, end_of_text, card = 4800, END_OF_TEXT, staticmethod(text_card)
    peak, loss = 6e-3, staticmethod(token_losses)

    def __init__(self, work: Path) -> None:
        self.work, self.tokenizer = work, get_tokenizer(work)
        self.held_out = make_corpus(self.tokenizer, work, held_out=True)
        self.train: Corpus | None = None  # read when training starts: measuring does without it

    def begin(self, model: Llama) -> None:
        """At random."""

    def batch(self, seed: int, step: int, steps: int) -> tuple[np.ndarray, ...]:
        """(rows, length + 1) int64 token windows; every token weighs the same."""
        if self.train is None:
            self.train = make_corpus(self.tokenizer, self.work, held_out=False)
        length = LONG if step >= LONG_FROM * steps else SHORT
        return (self.train.batch(seed, step, TOKENS_PER_STEP // length, length),)

    def progress(self, model: Llama) -> str:
        return f"held out {held_out_loss(model, self.held_out, SHORT, 24):.3f}"

    def measure(self, model: Llama) -> dict[str, Any]:
        return {
            "held_out_percent_of_files": HELD_OUT_PERCENT,
            "held_out_tokens": len(self.held_out.tokens),
            "held_out_nats_per_token_at_1024": round(held_out_loss(model, self.held_out, SHORT), 4),
            "held_out_nats_per_token_at_4096": round(held_out_loss(model, self.held_out, LONG), 4),
            "recall_trials": RECALL_TRIALS,
            "recall_accuracy_by_distance": {
                d: recall_accuracy(model, self.held_out, self.tokenizer, d) for d in DISTANCES
            },
        }
