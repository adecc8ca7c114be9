"""Trains the models that mlx-kv ships: a small llama on the standard library's sources, its draft, and a recall model.

    pip install "mlx-kv[train]"
    python tools/train_reference_model.py --model reference --work build/train
    python tools/train_reference_model.py --model draft --work build/train --steps 1600
    python tools/train_reference_model.py --model distilled --work build/train
    python tools/train_reference_model.py --model recall --work build/train
    python tools/train_reference_model.py --model reference --work build/train --export mlx_kv/models/reference

Decides how a model learns, how a run goes on and what a shipped folder holds; what is read and what is measured is the
task's affair (`text_task`, `recall_task`).

Reproducible from --seed: step N draws the same batch however often the run was interrupted, and the learning rate is a
function of the step alone: warm-up, constant, then linear to zero over the last quarter. A run that is started again
goes on from its last checkpoint.

Matrices inside the layers learn by Muon (Jordan et al. 2024; PyTorch's own), everything else by AdamW.
Matrix products run in bfloat16.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from distil_task import DistilTask
from recall_task import RecallTask
from reference_network import PRESETS, Llama
from text_task import TextTask
from tokenizers import Tokenizer
from torch import Tensor

WARM_UP, DECAY_FROM = 100, 0.75
TASKS = {"reference": TextTask, "draft": TextTask, "distilled": DistilTask, "recall": RecallTask}


class Task(Protocol):
    """What a model is trained for."""

    steps: int  # unless --steps says otherwise
    peak: float  # learning rate, unless --lr says otherwise
    end_of_text: str
    tokenizer: Tokenizer
    loss: Callable[..., Tensor]  # of the model, a batch's tokens, cos, sin, and whatever else the batch holds

    def begin(self, model: Llama) -> None:
        """Sets the weights that a run begins with, unless they are to be random."""

    def batch(self, seed: int, step: int, steps: int) -> tuple[np.ndarray, ...]:
        """(rows, length + 1) int64 tokens, and what the loss asks for besides."""

    def progress(self, model: Llama) -> str:
        """A line for the log, from a quick measurement."""

    def measure(self, model: Llama) -> dict[str, Any]:
        """What measurements.json says of the shipped weights."""

    def card(self, name: str, config: dict[str, Any], measured: dict[str, Any]) -> str:
        """The model card, in Markdown."""


def learning_rate(step: int, steps: int) -> float:
    """The factor on the peak learning rate."""
    decay = (steps - step) / (steps * (1 - DECAY_FROM))
    return min(1.0, (step + 1) / WARM_UP, decay)


class Trainer:
    """Model, optimisers and progress of one run, with checkpoints that a killed run goes on from."""

    def __init__(self, args: argparse.Namespace, task: Task) -> None:
        torch.manual_seed(args.seed)
        self.args, self.step, self.seconds, self.tokens = args, 0, 0.0, 0
        self.device = "cuda" if torch.cuda.is_available() else "cpu"
        self.path = args.work / f"{args.model}.pt"
        self.model = Llama(PRESETS[args.model])
        if not self.path.exists():
            task.begin(self.model)
        self.model.to(self.device)
        matrices = [p for n, p in self.model.named_parameters() if p.ndim == 2 and "embed" not in n]
        others = [p for n, p in self.model.named_parameters() if p.ndim == 1 or "embed" in n]
        self.optimizers = [
            torch.optim.Muon(matrices, lr=args.lr, weight_decay=0.1, adjust_lr_fn="match_rms_adamw"),
            torch.optim.AdamW(others, lr=args.lr, betas=(0.9, 0.95), weight_decay=0.0),
        ]
        if self.path.exists():
            saved = torch.load(self.path, map_location=self.device, weights_only=True)
            if saved.get("seed", args.seed) != args.seed:
                sys.exit(f"{self.path} is of seed {saved['seed']}: choose another --work, or --seed {saved['seed']}")
            self.model.load_state_dict(saved["model"])
            for optimizer, state in zip(self.optimizers, saved["optimizers"], strict=True):
                optimizer.load_state_dict(state)
            self.step, self.seconds = saved["step"], saved["seconds"]
            self.tokens = saved.get("tokens", 8192 * self.step)  # what every step of older checkpoints read
            print(f"going on from step {self.step}", file=sys.stderr)

    def save(self) -> None:
        saved = {
            "model": self.model.state_dict(),
            "optimizers": [o.state_dict() for o in self.optimizers],
            "step": self.step,
            "seconds": self.seconds,
            "tokens": self.tokens,
            "seed": self.args.seed,
        }
        temporary = self.path.with_suffix(".tmp")
        torch.save(saved, temporary)
        temporary.replace(self.path)

    def run(self, task: Task) -> None:
        loss_of = task.loss if self.args.no_compile else torch.compile(task.loss)
        while self.step < self.args.steps:
            started = time.monotonic()
            batch = task.batch(self.args.seed, self.step, self.args.steps)
            tokens, *others = (torch.from_numpy(array).to(self.device) for array in batch)
            cos, sin = self.model.angles(tokens.shape[1] - 1)
            with torch.autocast(self.device, torch.bfloat16):
                loss: Tensor = loss_of(self.model, tokens, cos, sin, *others)
            loss.backward()
            torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
            for optimizer in self.optimizers:
                for group in optimizer.param_groups:
                    group["lr"] = self.args.lr * learning_rate(self.step, self.args.steps)
                optimizer.step()
                optimizer.zero_grad()
            self.step += 1
            self.tokens += tokens[:, 1:].numel()
            self.seconds += time.monotonic() - started
            if self.step % 20 == 0:
                speed = tokens[:, 1:].numel() / (time.monotonic() - started)
                print(f"step {self.step:5d}  loss {loss.item():.3f}  {speed:6.0f} tokens/s", flush=True)
            if self.step % self.args.checkpoint_every == 0 or self.step == self.args.steps:
                self.save()
                print(f"step {self.step:5d}  {task.progress(self.model)}", flush=True)


def export(trainer: Trainer, task: Task, to: Path) -> None:
    """Writes config, tokenizer, float16 weights and measurements.json into a folder that mlx_lm.load reads."""
    from safetensors.torch import save_file

    to.mkdir(parents=True, exist_ok=True)
    model, end = trainer.model.eval().float(), task.tokenizer.token_to_id(task.end_of_text)
    weights = {name: p.detach().to("cpu", torch.float16).contiguous() for name, p in model.state_dict().items()}
    save_file(weights, str(to / "model.safetensors"), metadata={"format": "mlx"})
    (to / "model.safetensors").chmod(0o644)
    model.load_state_dict({name: p.float() for name, p in weights.items()})  # measure what is shipped
    config = {**model.config.to_json(), "bos_token_id": end, "eos_token_id": end, "torch_dtype": "float16"}
    (to / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    task.tokenizer.save(str(to / "tokenizer.json"))
    special = {"bos_token": task.end_of_text, "eos_token": task.end_of_text}
    tokenizer_config = {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False, **special}
    (to / "tokenizer_config.json").write_text(json.dumps(tokenizer_config, indent=2) + "\n")
    measured = {
        "parameters": sum(p.numel() for p in model.parameters()),
        "python": sys.version.split()[0],
        "torch": torch.__version__,
        "device": trainer.device,
        "threads": torch.get_num_threads(),
        "seed": trainer.args.seed,
        "steps": trainer.step,
        "tokens_seen": trainer.tokens,
        "training_seconds": round(trainer.seconds),
        **task.measure(model),
    }
    (to / "measurements.json").write_text(json.dumps(measured, indent=2) + "\n")
    (to / "MODEL_CARD.md").write_text(task.card(trainer.args.model, config, measured))
    print(json.dumps(measured))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=sorted(PRESETS), default="reference")
    parser.add_argument("--work", type=Path, default=Path("build/train"), help="tokenizer, tokens and checkpoints")
    parser.add_argument("--steps", type=int, help="of about 8,192 tokens each; the task knows how many")
    parser.add_argument("--lr", type=float, help="peak learning rate; the task knows which")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--checkpoint-every", type=int, default=200, metavar="STEPS")
    parser.add_argument("--no-compile", action="store_true", help="without torch.compile (needs no C++ compiler)")
    parser.add_argument("--export", type=Path, metavar="DIR", help="measure the checkpoint and write the model")
    args = parser.parse_args()
    args.work.mkdir(parents=True, exist_ok=True)
    task: Task = TASKS[args.model](args.work)
    args.steps, args.lr = args.steps or task.steps, args.lr or task.peak
    trainer = Trainer(args, task)
    if args.export:
        export(trainer, task, args.export)
    else:
        trainer.run(task)


if __name__ == "__main__":
    main()
