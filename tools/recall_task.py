"""The task of the recall model: to bring back what stood earlier in a row of made-up words.

Its tokenizer and how its answers are counted; `recall_corpus` makes the rows.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from recall_card import recall_card
from recall_corpus import HELD_OUT, batch, held_out_rows  # which finds benchmarks
from reference_network import Llama, token_losses
from tokenizers import Tokenizer, models, pre_tokenizers

from benchmarks.eval.tasks import END, FIRST_FILLER, SUCCESSORS, WORDS

TOKENS_PER_STEP = 8192
HELD_OUT_ROWS, PROGRESS_ROWS = 400, 48
ROWS_AT_ONCE = 50


def make_tokenizer() -> Tokenizer:
    """One token a word, words apart by white space. Any other word becomes `<end>`: mlx-lm probes what it loads with
    words of its own, so that an error, which would be the better answer, is none.
    """
    tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate(WORDS)}, unk_token=WORDS[END]))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.add_special_tokens([WORDS[END]])
    return tokenizer


@torch.no_grad()
def predict(model: Llama, tokens: np.ndarray) -> torch.Tensor:
    """Logits (rows, length - 1, vocab) of (rows, length) ids: what is predicted of tokens 1 to the end."""
    cos, sin = model.angles(tokens.shape[1] - 1)
    parts = torch.from_numpy(tokens[:, :-1]).to(cos.device).split(ROWS_AT_ONCE)
    return torch.cat([model(rows, cos, sin).float().cpu() for rows in parts])


def answer_accuracy(model: Llama, task: str, length: int, size: int, rows: int) -> float:
    """Share of answers predicted (argmax, all words before them given) in held-out rows."""
    tokens, answers = held_out_rows(task, length, size, rows)
    right = predict(model, tokens).argmax(-1).numpy() == tokens[:, 1:]
    return float(right[answers[:, 1:]].mean())


def filler_loss(model: Llama, length: int, rows: int) -> float:
    """Nats per filler word that follows another, in held-out rows of the passkey task."""
    tokens, _ = held_out_rows("passkey", length, 1, rows)
    is_filler = torch.from_numpy(tokens >= FIRST_FILLER)
    wanted = is_filler[:, 1:] & is_filler[:, :-1]
    return float(F.cross_entropy(predict(model, tokens)[wanted], torch.from_numpy(tokens[:, 1:])[wanted]))


class RecallTask:
    """What a trainer asks: batches, a line of progress, the tokenizer, and measurements for the model card."""

    steps, end_of_text, card = 7200, WORDS[END], staticmethod(recall_card)
    peak, loss = 6e-3, staticmethod(token_losses)

    def __init__(self, work: Path) -> None:
        self.tokenizer = make_tokenizer()

    def begin(self, model: Llama) -> None:
        """At random."""

    def batch(self, seed: int, step: int, steps: int) -> tuple[np.ndarray, np.ndarray]:
        """(rows, length + 1) int64 tokens and the (rows, length) float32 weights of their predictions."""
        return batch(seed, step, TOKENS_PER_STEP)

    def progress(self, model: Llama) -> str:
        return "  ".join(
            f"{task} {size} in {length}: {answer_accuracy(model, task, length, size, PROGRESS_ROWS):.1%}"
            for task, length, size in HELD_OUT
        )

    def measure(self, model: Llama) -> dict[str, Any]:
        return {
            "rows": HELD_OUT_ROWS,
            "accuracy": [
                {
                    "task": task,
                    "length": length,
                    "size": size,
                    "accuracy": round(answer_accuracy(model, task, length, size, HELD_OUT_ROWS), 4),
                }
                for task, length, size in HELD_OUT
            ],
            "filler_successors": SUCCESSORS,
            "filler_nats_per_word": round(filler_loss(model, 512, HELD_OUT_ROWS), 4),
            "filler_nats_per_word_at_best": round(math.log(SUCCESSORS), 4),
        }
