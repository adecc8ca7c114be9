"""The MODEL_CARD.md of the recall model, written from what was measured. Knows nothing about how it was measured."""

from __future__ import annotations

from typing import Any

from reference_card import architecture, made_by


def recall_card(name: str, config: dict[str, Any], m: dict[str, Any]) -> str:
    """Markdown from a config.json and the measurements of `train_reference_model.export`."""
    lines = "\n".join(
        f"| {row['task']} | {row['size']} | {row['length']:,} | {row['accuracy']:.1%} |" for row in m["accuracy"]
    )
    return f"""# {name}

an instrument: a model that brings back what stood earlier in its context, for measuring what a cache that evicts or
compresses still lets a model find. It knows {config["vocab_size"]} made-up words and no language: it recalls these
words only, and what it shows about a method says nothing yet about a language model.

| | |
| --- | --- |
{architecture(config, m)}
| tokenizer | one token a word, words apart by white space; any other word is read as `<end>` |
| context | {config["max_position_embeddings"]:,} tokens |
{made_by(name, m)}
| licence | MIT, as mlx-kv. The corpus is generated; there is nothing else in it |

## Rows

    <end> f017 f101 set k05 v33 f020 .. set k61 v02 f007 .. get k61 v02 get k05 v33
    <end> f017 .. copy f090 f003 f111 f054 again f090 f003 f111 f054 f031 ..

Recall: keys `k00` to `k63`, no two alike in a row, get values `v00` to `v63` anywhere in filler, and each is asked for
at the end; in most training rows some are asked for in between, too. A single pair is the passkey task. Copy: the words
after `copy` follow `again`; they are drawn one by one, from filler or from keys and values. No training row mixes the
two in one copy, and the model fails where a text does. Filler `f000` to `f122` walks on a fixed table of
{m["filler_successors"]} successors a word. Keys, values and copied words are drawn anew for every row, so that there is
nothing to know by heart. Training rows are 64 tokens long at first, and 64 to 1,024 in the end.

## Measured, on the float16 weights that are shipped

The share of answers (the value after `get KEY`, words after `again`) predicted greedily with all words before them
given, in {m["rows"]} fresh rows each, full cache, float32 arithmetic. Queries stand at the end.

| task | pairs, or words copied | tokens in the row | accuracy |
| --- | ---: | ---: | ---: |
{lines}

Filler: {m["filler_nats_per_word"]:.3f} nats a word; who knows the table needs {m["filler_nats_per_word_at_best"]:.3f}.
"""
