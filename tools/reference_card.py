"""The MODEL_CARD.md of a shipped text model, written from what was measured. Knows nothing about how it was measured.

`architecture` and `made_by` are the rows of the table of facts that every card has.
"""

from __future__ import annotations

from typing import Any

ROLE = {
    "reference": "the model that mlx-kv is tested and shown with: small, real, and able to recall",
    "draft": "the draft model beside `reference`, with the same tokenizer, for speculative decoding",
}


def architecture(config: dict[str, Any], m: dict[str, Any]) -> str:
    """Markdown table rows: shapes and size."""
    return f"""| architecture | llama: {config["num_hidden_layers"]} layers, {config["hidden_size"]} wide, \
feed-forward {config["intermediate_size"]}, {config["num_attention_heads"]} heads over \
{config["num_key_value_heads"]} KV heads, head dim {config["head_dim"]}, tied embeddings |
| parameters | {m["parameters"]:,}, stored in float16 |"""


def made_by(name: str, m: dict[str, Any]) -> str:
    """Markdown table rows: the command, what it ran on, and what it read."""
    return f"""| made by | `tools/train_reference_model.py --model {name} --seed {m["seed"]} --steps {m["steps"]}` |
| with | PyTorch {m["torch"]} on {m["device"]}, bfloat16 products |
| read | {m["tokens_seen"] / 1e6:.1f} M tokens in {m["training_seconds"] / 60:.0f} minutes, two busy cores |"""


def text_card(name: str, config: dict[str, Any], m: dict[str, Any]) -> str:
    """Markdown from a config.json and the measurements of `train_reference_model.export`."""
    recall = "\n".join(f"| {distance} | {share:.0%} |" for distance, share in m["recall_accuracy_by_distance"].items())
    return f"""# {name}

{ROLE[name]}. It continues Python in the manner of the standard library; it is good for nothing else.

| | |
| --- | --- |
{architecture(config, m)}
| tokenizer | byte-level BPE of {config["vocab_size"]:,} tokens, trained on the same corpus; every digit is a token |
| context | {config["max_position_embeddings"]:,} tokens |
{made_by(name, m)}
| licence | MIT, as mlx-kv. The corpus is the standard library of Python {m["python"]}, under the PSF licence |

## Corpus

The sources of Python {m["python"]}'s standard library, without tables, generated text and copies (`encodings`,
`pydoc_data`, …), about {m["held_out_percent_of_files"]}% of the files held out by a hash of their path. A quarter of
all rows are not code but recall documents (assignments of random keys, filler code, assertions that repeat the values)
and code that is repeated. Windows are 1,024 tokens long, and 4,096 in the last quarter of the training.

## Measured, on the float16 weights that are shipped

| | |
| --- | --- |
| held-out loss, windows of 1,024 tokens | {m["held_out_nats_per_token_at_1024"]:.3f} nats per token |
| held-out loss, windows of 4,096 tokens | {m["held_out_nats_per_token_at_4096"]:.3f} nats per token |
| held-out tokens | {m["held_out_tokens"]:,} |

Recall: four assignments, then this many tokens of held-out code, then one key; the share of {m["recall_trials"]} trials
in which the whole value is continued greedily. Keys and values are drawn from the words of the training documents: this
measures retrieval over a distance, not generalisation.

| tokens in between | recalled |
| ---: | ---: |
{recall}
"""
