"""The sections of docs/performance.md: which benchmarks it has, with which arguments, and the words around them."""

from __future__ import annotations

from dataclasses import dataclass

MODEL = "MODEL"  # in the place of a checkpoint's directory


@dataclass(frozen=True)
class Section:
    """A benchmark of the page.

    Attributes:
        name: of the file in benchmarks/.
        arguments: with which it is run here; `MODEL` is the checkpoint.
        about: what is compared.
        other: heading of the column of the alternative.
        ratios: label of the picture's axis.
        limits: what its figures do not cover.
    """

    name: str
    title: str
    arguments: tuple[str, ...]
    about: str
    other: str
    ratios: str
    limits: str

    @property
    def command(self) -> str:
        words = ("build/smollm2" if word == MODEL else word for word in self.arguments)
        return " ".join(["python", f"benchmarks/{self.name}.py", *words])


SECTIONS = (
    Section(
        "growth",
        "Growth",
        ("--rounds", "3"),
        "Appending tokens to a full-attention cache. mlx-lm's cache grows by 256 slots at a time and copies its "
        "contents each time; ours grows in larger steps, or reserves its capacity.",
        "mlx-lm",
        "times as fast as mlx-lm's cache, which grows by 256 slots",
        "Steady decoding has the same speed, since attention reads the same bytes. The allocator of a GPU differs.",
    ),
    Section(
        "host",
        "Host time of a decode step",
        ("--rounds", "200"),
        "Time that a cache spends in Python for each layer and token, before the device computes.",
        "mlx-lm",
        "times as fast as mlx-lm's caches, in Python, for each layer and token",
        "Relevant where the device finishes before Python: a small model on a GPU, not a CPU.",
    ),
    Section(
        "ring",
        "Sliding windows",
        ("--rounds", "3"),
        "Prefill and decoding with a sliding window, ours against mlx-lm's `RotatingKVCache`. This benchmark stores "
        "the ratios of times, without the times. A one-token write takes about a tenth of a millisecond.",
        "mlx-lm",
        "times as fast as mlx-lm's rotating cache",
        "Random weights: the loss in quality of a window is not measured.",
    ),
    Section(
        "compaction",
        "Eviction",
        ("--rounds", "3"),
        "Compaction of a cache with a budget, which moves as few tokens as possible, against a gather of all "
        "survivors; and decoding with a budget against decoding with all tokens.",
        "alternative",
        "times as fast as gathering all survivors, or as a cache that keeps all",
        "Evicted tokens are lost: [evaluation results](eval-results.md) have the cost in answers.",
    ),
    Section(
        "batch",
        "Rows of different lengths",
        ("--rounds", "3"),
        "A batch whose rows have different lengths, ours against mlx-lm's left-padded batches. Speculation is compared "
        "with our plain batches.",
        "alternative",
        "times as fast as mlx-lm's left-padded batches; of speculation, as our plain ones",
        "The bundled pair of models on source code from its training data: acceptance differs for other texts.",
    ),
    Section(
        "ragged",
        "One long row among short ones",
        ("--rounds", "3"),
        "A batch of one long and fifteen short rows, grouped by length class (ours), in one buffer as long as the "
        "longest row, or as two batches one after the other.",
        "alternative",
        "times as fast by class as in one buffer, or as two batches one after the other",
        "Random keys and values, decoding only.",
    ),
    Section(
        "speculation",
        "Speculative decoding",
        ("--rounds", "1", "--model", MODEL),
        "Greedy [speculative decoding](speculative.md) against plain decoding, by task and drafter. The columns of "
        "both sides are tokens for each pass of the model; the ratio is that of speeds.",
        "plain",
        "times as fast as plain decoding",
        "Five tasks and one small model: answers of other models may repeat their prompt more, or less.",
    ),
    Section(
        "cpu_attention",
        "Prompts and decoding on a CPU",
        ("--rounds", "3", "--model", MODEL, "--prompts", "256,1024", "--contexts", "1024,8192"),
        "The attention and activation of this package on a CPU, against those of MLX, in the whole model.",
        "MLX",
        "times as fast as MLX's own attention and activation",
        "x86-64 on Linux, float32. On a GPU and on macOS MLX computes everything.",
    ),
    Section(
        "packed_attention",
        "Decoding from quantised caches",
        ("--contexts", "8192", "--rounds", "3", "--model", MODEL),
        "Decoding after 8,192 tokens by [storage format](quantisation.md): `K8V4` has keys of 8 bits and values of "
        "4. The picture compares the whole model with plain caches; the table adds memory, and one layer's attention.",
        "alternative",
        "of the speed of plain caches",
        "On a CPU, quantising saves memory and costs time. On a GPU attention reads packed words directly, which is "
        "not measured here.",
    ),
    Section(
        "server",
        "Server",
        ("--rounds", "1", "--tokens", "24", "--workloads", "own,shared,sampled", "--model", MODEL),
        "Streaming clients of `mlx-kv serve`, against `mlx_lm.server`, both with the same model. `own` prompts have "
        "nothing in common, `shared` ones begin with the same 250 tokens, and `sampled` ones are own prompts without "
        "greedy decoding.",
        "mlx_lm.server",
        "times mlx_lm.server: its throughput, and its time to a first token over ours",
        "Answers of 24 tokens after prompts of 300, so prompts take most of the time. One round. For 8 bits see "
        "[the server's page](server.md#measured).",
    ),
    Section(
        "token_waits",
        "Token latency beside a long prompt",
        ("--model", MODEL),
        "The longest time between two tokens of three streams while the server reads a prompt of 4,000 tokens, and how "
        "long that prompt takes.",
        "mlx_lm.server",
        "the longest wait of mlx_lm.server over ours",
        "One prompt beside three streams.",
    ),
    Section(
        "structured",
        "Structured output",
        ("--model", MODEL),
        "Decoding with a JSON schema, against decoding without one, and the time of the grammar itself.",
        "without",
        "of the speed without a form",
        "One schema: others take longer to compile.",
    ),
)
OTHER_PAGES = {
    "budget_decode": "decoding with a budget: [budgets](budgets.md)",
    "cluster_table": "several machines: [clusters](clusters.md)",
    "codecs": "quality of quantised caches: [quantisation](quantisation.md#quality)",
    "conversations": "reused prompts of conversations: [stores](store.md#measured)",
    "growth_rules": "choice of the default growth: [caches](caches.md)",
    "observing": "cost of scores that use attention: [budgets](budgets.md)",
    "partial_reads": "quality of partial reads: [evaluate](eval-results.md#reading-a-part-of-the-cache)",
    "peers": "three servers side by side: [batches](batches.md#shared-prefixes)",
    "ranks": "several machines: [clusters](clusters.md)",
    "score_rule": "quality of scores: [evaluation results](eval-results.md)",
    "file_questions": "quality of scores, questions about files: [evaluation results](eval-results.md)",
    "score_table": "quality of scores: [evaluation results](eval-results.md)",
    "server_drafts": "speculation in the server: [drafts](speculative.md#speedup)",
    "shared_prefix": "shared prefixes: [batches](batches.md#shared-prefixes)",
    "shared_store": "a store in a bucket: [clusters](clusters.md#several-servers-one-store)",
    "uneven_heads": "heads with different budgets: [budgets](budgets.md)",
}
WITHOUT_PAGE = {
    "clients": "checks the answers that clients receive; no times",
    "draft_sizes": "chose the size of the bundled draft model",
    "kvpress_equality": "compares kept tokens with kvpress; no times",
    "parsing": "latency of parsing requests against an older checkout; printed only",
    "prefix_soak": "compares answers; no times",
    "quick_softmax": "part of `score_table`",
    "ranks_equal": "compares tokens; no times",
    "ranks_soak": "compares tokens; no times",
    "score_cells": "part of `score_table`",
    "soak": "searches for failures under load; no times",
}
ELSEWHERE = OTHER_PAGES | WITHOUT_PAGE
INTRODUCTION = """
Measured speed and memory of caches, generation and the server, against mlx-lm or the obvious alternative. Use this page
to see what a feature gains or costs before you enable it; to compare servers, see also
[batches](batches.md#shared-prefixes).

- Both sides run in turns in one process (of the server: two servers in turns), so the **ratio** is the result.
- A ratio above 1 is in our favour, and below 1 against us. Bars of the pictures begin at 1, on a logarithmic scale.
- Ratios are medians of rounds: they can differ slightly from the quotient of the two values beside them.
- The header of each benchmark states which bytes must move, and so the limit of what is possible.

`make bench` measures again what needs no checkpoint; `make bench MODEL=build/smollm2`, after
`python tools/smollm2.py build/smollm2`, measures all. `tools/performance.py` writes this page from the results in
`docs/performance/`.
""".strip()
GPU = """## GPU

Not measured: no GPU was available when this page was made. To measure on a machine that has one:

    python tools/smollm2.py build/smollm2-4bit --bits 4
    make EXTRAS=cuda bench MODEL=build/smollm2-4bit    # Linux, NVIDIA; on macOS leave EXTRAS out

`cpu_attention` has nothing to measure there.
"""
