"""Trains the models that mlx-kv ships: a small llama on the standard library's sources, and its draft.

    pip install "mlx-kv[train]"
    python tools/train_reference_model.py --model reference --work build/train
    python tools/train_reference_model.py --model draft --work build/train --steps 1600
    python tools/train_reference_model.py --model reference --work build/train --export mlx_kv/models/reference

Reproducible from --seed: step N draws the same batch however often the run was interrupted, and the learning rate is a
function of the step alone: warm-up, constant, then linear to zero over the last quarter, in which windows are
4,096 tokens long instead of 1,024. A run that is started again goes on from its last checkpoint.

Matrices inside the layers learn by Muon (Jordan et al. 2024; PyTorch's own), everything else by AdamW.
Matrix products run in bfloat16.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import time
from pathlib import Path

import numpy as np
import torch
from reference_card import model_card
from reference_corpus import END_OF_TEXT, HELD_OUT_PERCENT, TEMPLATES, VOCAB_SIZE, Corpus, make_pairs, read_sources
from reference_network import PRESETS, Llama, token_losses
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor

TOKENS_PER_STEP = 8192
SHORT, LONG = 1024, 4096
WARM_UP, DECAY_FROM = 100, 0.75
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


def learning_rate(step: int, steps: int) -> float:
    """The factor on the peak learning rate."""
    decay = (steps - step) / (steps * (1 - DECAY_FROM))
    return min(1.0, (step + 1) / WARM_UP, decay)


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


class Trainer:
    """Model, optimisers and progress of one run, with checkpoints that a killed run goes on from."""

    def __init__(self, args: argparse.Namespace) -> None:
        torch.manual_seed(args.seed)
        self.args, self.step, self.seconds = args, 0, 0.0
        self.device = "cuda" if torch.cuda.is_available() else "cpu"
        self.model = Llama(PRESETS[args.model]).to(self.device)
        matrices = [p for n, p in self.model.named_parameters() if p.ndim == 2 and "embed" not in n]
        others = [p for n, p in self.model.named_parameters() if p.ndim == 1 or "embed" in n]
        self.optimizers = [
            torch.optim.Muon(matrices, lr=args.lr, weight_decay=0.1, adjust_lr_fn="match_rms_adamw"),
            torch.optim.AdamW(others, lr=args.lr, betas=(0.9, 0.95), weight_decay=0.0),
        ]
        self.path = args.work / f"{args.model}.pt"
        if self.path.exists():
            saved = torch.load(self.path, map_location=self.device, weights_only=True)
            if saved.get("seed", args.seed) != args.seed:
                sys.exit(f"{self.path} is of seed {saved['seed']}: choose another --work, or --seed {saved['seed']}")
            self.model.load_state_dict(saved["model"])
            for optimizer, state in zip(self.optimizers, saved["optimizers"], strict=True):
                optimizer.load_state_dict(state)
            self.step, self.seconds = saved["step"], saved["seconds"]
            print(f"going on from step {self.step}", file=sys.stderr)

    def save(self) -> None:
        saved = {
            "model": self.model.state_dict(),
            "optimizers": [o.state_dict() for o in self.optimizers],
            "step": self.step,
            "seconds": self.seconds,
            "seed": self.args.seed,
        }
        temporary = self.path.with_suffix(".tmp")
        torch.save(saved, temporary)
        temporary.replace(self.path)

    def run(self, train: Corpus, held_out: Corpus) -> None:
        loss_of = token_losses if self.args.no_compile else torch.compile(token_losses)
        while self.step < self.args.steps:
            started = time.monotonic()
            length = LONG if self.step >= DECAY_FROM * self.args.steps else SHORT
            cos, sin = self.model.angles(length)
            batch = train.batch(self.args.seed, self.step, TOKENS_PER_STEP // length, length)
            with torch.autocast(self.device, torch.bfloat16):
                loss: Tensor = loss_of(self.model, torch.from_numpy(batch).to(self.device), cos, sin)
            loss.backward()
            torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
            for optimizer in self.optimizers:
                for group in optimizer.param_groups:
                    group["lr"] = self.args.lr * learning_rate(self.step, self.args.steps)
                optimizer.step()
                optimizer.zero_grad()
            self.step += 1
            self.seconds += time.monotonic() - started
            if self.step % 20 == 0:
                speed = TOKENS_PER_STEP / (time.monotonic() - started)
                print(f"step {self.step:5d}  loss {loss.item():.3f}  {speed:6.0f} tokens/s", flush=True)
            if self.step % self.args.checkpoint_every == 0 or self.step == self.args.steps:
                self.save()
                print(f"step {self.step:5d}  held out {held_out_loss(self.model, held_out, SHORT, 24):.3f}", flush=True)


def export(trainer: Trainer, held_out: Corpus, tokenizer: Tokenizer, work: Path, to: Path) -> None:
    """Writes config, tokenizer, float16 weights and measurements.json into a folder that mlx_lm.load reads."""
    from safetensors.torch import save_file

    to.mkdir(parents=True, exist_ok=True)
    model, end = trainer.model.eval().float(), tokenizer.token_to_id(END_OF_TEXT)
    weights = {name: p.detach().to("cpu", torch.float16).contiguous() for name, p in model.state_dict().items()}
    save_file(weights, str(to / "model.safetensors"), metadata={"format": "mlx"})
    (to / "model.safetensors").chmod(0o644)
    model.load_state_dict({name: p.float() for name, p in weights.items()})  # measure what is shipped
    config = {**model.config.to_json(), "bos_token_id": end, "eos_token_id": end, "torch_dtype": "float16"}
    (to / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    (to / "tokenizer.json").write_text((work / "tokenizer.json").read_text())
    special = {"bos_token": END_OF_TEXT, "eos_token": END_OF_TEXT}
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
        "tokens_seen": trainer.step * TOKENS_PER_STEP,
        "training_seconds": round(trainer.seconds),
        "held_out_percent_of_files": HELD_OUT_PERCENT,
        "held_out_tokens": len(held_out.tokens),
        "held_out_nats_per_token_at_1024": round(held_out_loss(model, held_out, SHORT), 4),
        "held_out_nats_per_token_at_4096": round(held_out_loss(model, held_out, LONG), 4),
        "recall_trials": RECALL_TRIALS,
        "recall_accuracy_by_distance": {d: recall_accuracy(model, held_out, tokenizer, d) for d in DISTANCES},
    }
    (to / "measurements.json").write_text(json.dumps(measured, indent=2) + "\n")
    (to / "MODEL_CARD.md").write_text(model_card(trainer.args.model, config, measured))
    print(json.dumps(measured))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=sorted(PRESETS), default="reference")
    parser.add_argument("--work", type=Path, default=Path("build/train"), help="tokenizer, tokens and checkpoints")
    parser.add_argument("--steps", type=int, default=4800, help=f"of {TOKENS_PER_STEP:,} tokens each")
    parser.add_argument("--lr", type=float, default=6e-3, help="peak learning rate")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--checkpoint-every", type=int, default=200, metavar="STEPS")
    parser.add_argument("--no-compile", action="store_true", help="without torch.compile (needs no C++ compiler)")
    parser.add_argument("--export", type=Path, metavar="DIR", help="measure the checkpoint and write the model")
    args = parser.parse_args()
    args.work.mkdir(parents=True, exist_ok=True)
    tokenizer = get_tokenizer(args.work)
    held_out = make_corpus(tokenizer, args.work, held_out=True)
    trainer = Trainer(args)
    if args.export:
        export(trainer, held_out, tokenizer, args.work, args.export)
    else:
        trainer.run(make_corpus(tokenizer, args.work, held_out=False), held_out)


if __name__ == "__main__":
    main()
