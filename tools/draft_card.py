"""The MODEL_CARD.md of the draft model, written from what was measured. Knows nothing about how it was measured."""

from __future__ import annotations

from typing import Any

from reference_card import ROLE, architecture, made_by


def draft_card(name: str, config: dict[str, Any], m: dict[str, Any]) -> str:
    """Markdown from a config.json and the measurements of `train_reference_model.export`."""
    accepted = "\n".join(f"| {drafted} | {share:.1%} |" for drafted, share in m["accepted_by_drafted"].items())
    taught, length = m["taught_tokens"] / 1e6, m["taught_length"]
    times = m["tokens_seen"] / m["taught_rows"] / length
    loss = m["held_out_nats_per_token_at_1024"]
    return f"""# draft

{ROLE["draft"]}. It says what `reference` would say next, and is good for nothing else.

| | |
| --- | --- |
{architecture(config, m)}
| tokenizer | that of `reference`: byte-level BPE of {config["vocab_size"]:,} tokens |
| context | {config["max_position_embeddings"]:,} tokens |
{made_by(name, m)}
| licence | MIT, as mlx-kv. The corpus is the standard library of Python {m["python"]}, under the PSF licence |

## The head

`reference.kvdraft.safetensors` is a head that drafts for `reference`, from its states: one layer, 0.8 M parameters in
float16, made by `mlx-kv train-drafter reference --tokens 1000000` in 32 minutes on two busy cores. Of held-out
requests, 83.7% of the first tokens of its drafts are right, 91.2% of the second and 91.4% of the third, where all
before are right.

## Learnt from

The draft began as a model of half its width, trained as `reference` was, on source (`--model draft --steps 1600`). It
was widened by hand with heads that find where the last two tokens stood before and say what came next
(`tools/induction.py`): that is what greedy text asks for most. Then it learnt from what `reference` says,
{taught:.1f} M tokens after prompts from the training side of its corpus, in rows of {length:,} with the prompt, each
read {times:.1f} times. Two rows of three go on greedily, the third is drawn at temperature 0.8. The loss is the
cross-entropy with the {m["likeliest"]} tokens that `reference` finds likeliest at each place, half of it with the first
of them alone.

## Measured, on the float16 weights that are shipped

`reference` goes on greedily for {m["accepted_tokens"]} tokens after each of {m["accepted_prompts"]} windows of held-out
source, {m["accepted_after"]} tokens each; the share of drafted tokens that are accepted, by how many are drafted in a
round:

| drafted | accepted |
| ---: | ---: |
{accepted}

Held-out loss on {m["held_out_tokens"]:,} tokens of source, windows of 1,024: {loss:.3f} nats per token. What
`reference` says is not what source says, and a draft is not asked for the latter.
"""
