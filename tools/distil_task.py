"""The task of the draft: to say what the reference model would say next.

Decides which rows the reference model goes on with, what of it is learnt, and how drafts are counted. Knows nothing
about optimisers, checkpoints or the format of a shipped model; how a row is continued is `teacher`'s affair, what
stands in a prompt `reference_corpus`'s.

A draft that is right is a token of the teacher's own text, so that is what is read: prompts of the corpus and how the
teacher goes on, greedily in two rows of three, drawn in the third. Shards of it are made when they are first asked for,
and kept in --work.
B rows, T tokens, P of them the prompt, K likeliest tokens.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from draft_card import draft_card
from induction import widen
from reference_corpus import HELD_OUT_PERCENT
from reference_network import PRESETS, Llama
from teacher import LIKELIEST, continued, likeliest, read_model
from text_task import SHORT, TextTask, held_out_loss, make_corpus
from torch import Tensor

SHARDS, ROWS, PARTS = 11, 128, 16  # a step reads one of the parts of a shard
LENGTH, PROMPTS = 768, (128, 320, 512)  # tokens of a row, and how many of them are source
TEMPERATURES = (0.0, 0.0, 0.8)
WIDENED_ON = 3  # the shard on which sizes are measured
FIRST_CHOICE = 0.5  # the share of the loss that asks for the teacher's first choice, whatever it thinks of the others

HELD_OUT_ROWS, PROGRESS_ROWS = 64, 16
HELD_OUT_PROMPT, HELD_OUT_LENGTH = 600, 728
DRAFTED = (1, 2, 3, 4, 8)
TEACHER = Path(__file__).parent.parent / "mlx_kv" / "models" / "reference"


def distilled(model: Llama, tokens: Tensor, cos: Tensor, sin: Tensor, ids: Tensor, logprobs: Tensor) -> Tensor:
    """Mean over the teacher's tokens of the cross-entropy with what it finds likeliest, and with its first choice.

    Args:
        tokens: (B, T + 1).
        ids, logprobs: (B, S, K) of the last S tokens, likeliest first; what is not among them counts as impossible.
    """
    own = F.log_softmax(model(tokens[:, :-1], cos, sin, last=ids.shape[1]).float(), -1).gather(-1, ids.long())
    all_of_them = (F.softmax(logprobs.float(), -1) * own).sum(-1)
    return -(FIRST_CHOICE * own[..., 0] + (1 - FIRST_CHOICE) * all_of_them).mean()


def accepted_of_drafted(right: np.ndarray, most: int) -> tuple[int, int]:
    """Drafted tokens that greedy speculation accepts of a text, and how many it drafts.

    Args:
        right: (T,) whether the draft, having read the text so far, says its next token. More is not asked: what is
            drafted behind a wrong token is not accepted, and behind right ones the draft has read the text itself.
        most: tokens drafted in a round.
    """
    accepted = drafted = place = 0
    while place + most < len(right):
        wrong = np.flatnonzero(~right[place : place + most])
        got = int(wrong[0]) if len(wrong) else most
        accepted, drafted, place = accepted + got, drafted + most, place + got + 1
    return accepted, drafted


def prompt_length(shard: int) -> int:
    return PROMPTS[shard // len(TEMPERATURES) % len(PROMPTS)]


class DistilTask(TextTask):
    """What a trainer asks: batches, a line of progress, the tokenizer, and measurements for the model card."""

    steps, peak = 750, 2e-3
    card, loss = staticmethod(draft_card), staticmethod(distilled)

    def __init__(self, work: Path) -> None:
        super().__init__(work)
        self.shards: list[dict[str, np.ndarray]] = []  # read when training starts

    def begin(self, model: Llama) -> None:
        """As a draft that has learnt from source alone, widened."""
        path = self.work / "draft.pt"
        if not path.exists():
            sys.exit(f"there is no {path} to begin with: train --model draft first")
        narrow = Llama(PRESETS["draft"])
        narrow.load_state_dict(torch.load(path, map_location="cpu", weights_only=True)["model"])
        with np.load(self.shard(WIDENED_ON)) as arrays:
            widen(model, narrow, torch.from_numpy(arrays["tokens"][::PARTS].astype(np.int64)))

    def shard(self, number: int) -> Path:
        """The file of a shard: tokens (B, T), and what is likeliest after each, ids and logprobs (B, T, K)."""
        path = self.work / "said" / f"{number:04d}.npz"
        if not path.exists():
            self.train = self.train or make_corpus(self.tokenizer, self.work, held_out=False)
            prompts = torch.from_numpy(self.train.batch(0, -1 - number, ROWS, LENGTH)[:, : prompt_length(number)])
            temperature = TEMPERATURES[number % len(TEMPERATURES)]
            tokens = continued(read_model(TEACHER).bfloat16(), prompts, LENGTH, temperature, seed=number)
            ids, logprobs = likeliest(read_model(TEACHER), tokens)
            path.parent.mkdir(exist_ok=True)
            temporary = path.with_suffix(".tmp.npz")
            arrays = {"tokens": tokens.short(), "ids": ids.short(), "logprobs": logprobs.half()}
            np.savez(temporary, **{name: array.numpy() for name, array in arrays.items()})
            temporary.replace(path)
        return path

    def held_out_text(self) -> np.ndarray:
        """(B, T) windows of held-out source, and how the teacher, in float32, goes on greedily."""
        path = self.work / "held_out_said.npy"
        if not path.exists():
            source = self.held_out.tokens
            starts = np.linspace(0, len(source) - HELD_OUT_PROMPT, HELD_OUT_ROWS).astype(int)
            prompts = np.stack([source[start : start + HELD_OUT_PROMPT] for start in starts]).astype(np.int64)
            np.save(path, continued(read_model(TEACHER), torch.from_numpy(prompts), HELD_OUT_LENGTH).numpy())
        return np.load(path)

    @torch.no_grad()
    def acceptance(self, model: Llama, rows: int) -> dict[int, float]:
        """By tokens drafted: the share of them that greedy speculation accepts in the teacher's held-out text."""
        tokens = torch.from_numpy(self.held_out_text()[:: HELD_OUT_ROWS // rows])
        cos, sin = model.angles(HELD_OUT_LENGTH - 1)
        guesses = torch.cat([model(few.to(cos.device), cos, sin).argmax(-1).cpu() for few in tokens[:, :-1].split(8)])
        right = (guesses == tokens[:, 1:])[:, HELD_OUT_PROMPT - 1 :].numpy()
        counts = {most: np.sum([accepted_of_drafted(row, most) for row in right], 0) for most in DRAFTED}
        return {most: round(float(accepted / drafted), 4) for most, (accepted, drafted) in counts.items()}

    def batch(self, seed: int, step: int, steps: int) -> tuple[np.ndarray, ...]:
        """tokens (B, T + 1), ids and log-probabilities (B, T, K), of what the teacher says."""
        if not self.shards:
            for number in range(SHARDS):
                with np.load(self.shard(number)) as arrays:
                    self.shards.append(dict(arrays))
        epoch, turn = divmod(step, SHARDS * PARTS)
        number, part = divmod(int(np.random.default_rng((seed, epoch)).permutation(SHARDS * PARTS)[turn]), PARTS)
        rows = slice(part, None, PARTS)
        tokens, ids, logprobs = (self.shards[number][name][rows] for name in ("tokens", "ids", "logprobs"))
        spoken = slice(prompt_length(number) - 1, -1)  # places whose next token is the teacher's own
        return tokens.astype(np.int64), ids[:, spoken], logprobs[:, spoken]

    def progress(self, model: Llama) -> str:
        return " ".join(f"K={most}: {share:.1%}" for most, share in self.acceptance(model, PROGRESS_ROWS).items())

    def measure(self, model: Llama) -> dict[str, Any]:
        return {
            "taught_rows": SHARDS * ROWS,
            "taught_length": LENGTH,
            "taught_tokens": sum(ROWS * (LENGTH - prompt_length(number)) for number in range(SHARDS)),
            "likeliest": LIKELIEST,
            "held_out_percent_of_files": HELD_OUT_PERCENT,
            "held_out_tokens": len(self.held_out.tokens),
            "held_out_nats_per_token_at_1024": round(held_out_loss(model, self.held_out, SHORT), 4),
            "accepted_prompts": HELD_OUT_ROWS,
            "accepted_after": HELD_OUT_PROMPT,
            "accepted_tokens": HELD_OUT_LENGTH - HELD_OUT_PROMPT,
            "accepted_by_drafted": self.acceptance(model, HELD_OUT_ROWS),
        }
