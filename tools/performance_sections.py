"""The sections of docs/performance.md: which benchmarks it has, with which arguments, and the words around them."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

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
        "*Slowest write*: the longest of all calls of `update_and_fetch`. Steady decoding has the same speed, since "
        "attention reads the same bytes. Not measured on a GPU, where allocations take other times.",
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
        "operations",
        "What it costs in calls",
        (),
        "Operations that a GPU launches in each layer for one token of each row, counted in the graph of the step. A "
        "host needs about 20 µs for each, in which a GPU reads tens of megabytes: a small model's step takes as long "
        "as its calls. Rows of segments share 3,000 tokens; mlx-lm has copies of them.",
        "mlx-lm",
        "calls of mlx-lm / ours",
        "Counts, not times: which copies of arrays MLX needs for a reshape is not in the graph. mlx-lm has no batches "
        "of quantised caches, so its single row stands for them.",
    ),
    Section(
        "ring",
        "Sliding windows",
        ("--rounds", "3"),
        "Prefill and decoding with a sliding window, ours against mlx-lm's `RotatingKVCache`. Rows *whole model* run a "
        "random gemma3 model of 9 layers, the other rows one cache. This benchmark stores ratios of times without "
        "the times, so their columns are empty. For scale: a one-token write takes about a tenth of a millisecond.",
        "mlx-lm",
        "times as fast as mlx-lm's rotating cache",
        "Weights are random, so this measures time and memory, and not the quality of answers.",
    ),
    Section(
        "compaction",
        "Eviction",
        ("--rounds", "3"),
        "Compaction, which moves as few tokens as possible, against a *gather*, which copies all kept tokens to a new "
        "array: with `take_along_axis`, the usual way, or *with one index* for all heads, the fastest in MLX. Also "
        "decoding with a budget against decoding with all tokens.",
        "alternative",
        "times as fast as copying all kept tokens, or as a cache without a budget",
        "Evicted tokens are lost: [evaluation results](eval-results.md) show how many answers become wrong.",
    ),
    Section(
        "batch",
        "Rows of different lengths",
        ("--rounds", "3"),
        "A batch whose rows have different lengths, ours against mlx-lm's left-padded batches. *Trim*: mlx-lm rolls "
        "the whole buffer to align the rows again; ours only changes where each row ends. *Speculation*: our batches "
        "with the bundled draft model, against our batches without one.",
        "alternative",
        "times as fast as mlx-lm's left-padded batches; for speculation: as our batches without it",
        "The bundled model and draft model continue source code from their training data. With other texts, another "
        "share of the drafted tokens is right, and the speed of speculation differs.",
    ),
    Section(
        "ragged",
        "One long row among short ones",
        ("--rounds", "3"),
        "A batch of one long and fifteen short rows. Ours stores rows of similar length (a "
        "[length class](batches.md#rows-of-very-different-lengths)) in a buffer of their own. The alternatives: one "
        "buffer as long as the longest row, and two separate batches, one after the other.",
        "alternative",
        "times as fast with length classes as in one buffer, or as in two separate batches",
        "Random keys and values, decoding only.",
    ),
    Section(
        "speculation",
        "Speculative decoding",
        ("--rounds", "1", "--model", MODEL),
        "Greedy [speculative decoding](speculative.md) against plain decoding. *Ours* and *plain* are the number of "
        "tokens that one pass of the model generates; the ratio compares tokens per second.\n\n"
        "- Tasks, for SmolLM2: *edit* code, *repeat* a text, *summarise* it, *extract* facts as JSON, answer an "
        "*open* question without a text, or write *code*.\n"
        "- `ngram` and `suffix` copy from earlier text, [without a model](speculative.md#drafts-without-a-model). "
        "The number of drafted tokens adapts, except in rows *fixed length*.\n"
        "- `mtp` is a [head](speculative.md#heads) that was trained for this model; `auto` takes suffixes and, where "
        "there are none, the head.\n"
        "- *bundled pair*: the reference model and its draft model, or its head, continue source code.\n"
        "- *recurrent layers*: a small random model (qwen3_next), with a drafter that makes the given share of drafts "
        "wrong.\n"
        "- *a text that changes*: the reference model generates a given text: repeating tokens, then random ones, then "
        "repeating ones again.",
        "plain",
        "times as fast as plain decoding",
        "Six tasks and one small model. The gain depends on how much of an answer repeats its prompt, which differs "
        "between models. The bundled pair was measured anew in five rounds, recurrent layers in three.",
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
        "4, *rotated* multiplies them by a [Hadamard matrix](quantisation.md#rotation) first, and *centred* subtracts "
        "a [mean](quantisation.md#centred-keys) from keys. *plain* caches are not quantised. The picture shows the "
        "whole model; the table adds memory, and the attention of one layer, compared with dequantising all keys and "
        "values before attention, and with mlx-lm's attention.",
        "alternative",
        "times as fast as plain caches",
        "On a CPU, quantising saves memory and costs time: attention must convert codes to floats, block by block. On "
        "a GPU, MLX's kernels multiply by quantised arrays directly; this was not measured.",
    ),
    Section(
        "server",
        "Server",
        ("--rounds", "1", "--tokens", "24", "--workloads", "own,shared,sampled", "--model", MODEL),
        "Streaming clients of `mlx-kv serve`, against `mlx_lm.server`, both with the same model. `own` prompts have "
        "nothing in common, `shared` ones begin with the same 250 tokens. Both are decoded greedily. `sampled` prompts "
        "have nothing in common, and are decoded with a sampler.",
        "mlx_lm.server",
        "our throughput / mlx_lm.server's, and mlx_lm.server's time to first token / ours",
        "Answers of 24 tokens after prompts of 300, so prompts take most of the time. One round.",
    ),
    Section(
        "accelerator",
        "On an accelerator",
        (),
        "Steps, rows that come and go, prompts, segments, quantised caches and the server on a GPU, in one run of some "
        "minutes, with random weights of 16 and of 4 bits.",
        "mlx-lm, or what the line names",
        "times as fast as mlx-lm, or as what the line names",
        "One run. The output also has the bytes that must move over the bandwidth, and the operations launched.",
    ),
    Section(
        "token_waits",
        "Token latency beside a long prompt",
        ("--model", MODEL),
        "The longest time between two tokens of three streams while the server reads a prompt of 4,000 tokens, and how "
        "long that prompt takes.",
        "mlx_lm.server",
        "longest wait of mlx_lm.server / longest wait of ours",
        "One prompt beside three streams.",
    ),
    Section(
        "structured",
        "Structured output",
        ("--model", MODEL),
        "Decoding with a JSON schema, against decoding without one. The last rows are the time of the grammar itself: "
        "a *token mask* says which tokens of the vocabulary may come next, and is computed for each token of a row.",
        "without",
        "times as fast as without a schema",
        "One schema: others take longer to compile.",
    ),
)
OTHER_PAGES = {
    "agents": "coding agents: [agents](agents.md#what-is-reused)",
    "budget_decode": "decoding with a budget: [budgets](budgets.md)",
    "cluster_table": "several machines: [clusters](clusters.md)",
    "conversations": "reused prompts of conversations: [stores](store.md#measured)",
    "embeddings": "embeddings against mlx-lm: [server API](server-api.md#embeddings)",
    "growth_rules": "choice of the default growth: [caches](caches.md)",
    "head_groups": "heads of unequal lengths in groups: [budgets](budgets.md#adaptive-heads)",
    "models": "several models under one limit: [several models](several-models.md#what-is-in-memory)",
    "observing": "cost of scores that use attention: [budgets](budgets.md)",
    "replay": "what coding agents sent, in four servers: [comparison](comparison.md#one-coding-agent)",
    "peers": "four servers side by side: [comparison](comparison.md#figures)",
    "ranks": "several machines: [clusters](clusters.md)",
    "file_questions": "quality of scores, questions about files: [evaluation results](eval-results.md)",
    "images": "images: [images](images.md#measured)",
    "room": "requests with large limits, and preemption: [servers under load](#servers-under-load)",
    "prefix_soak": "memory at a limit: [servers under load](#servers-under-load)",
    "soak": "failures under load: [servers under load](#servers-under-load)",
    "server_drafts": "speculation in the server: [drafts](speculative.md#speedup)",
    "shared_prefix": "shared prefixes: [batches](batches.md#shared-prefixes)",
    "shared_store": "servers that share a store: [clusters](clusters.md#several-servers-one-store)",
    "uneven_heads": "heads with different budgets: [budgets](budgets.md)",
    "windows": "windows of a real model: [windows](windows.md#on-a-real-model)",
}
WITHOUT_PAGE = {
    "clients": "checks the answers that clients receive; no times",
    "draft_sizes": "chose the size of the bundled draft model",
    "kvpress_equality": "compares kept tokens with kvpress; no times",
    "parsing": "time to parse a request, compared with an older revision of mlx-kv; results are printed, not stored",
    "ranks_equal": "compares tokens; no times",
    "ranks_soak": "compares tokens; no times",
}
ELSEWHERE = OTHER_PAGES | WITHOUT_PAGE
INTRODUCTION = """
Measured speed and memory of caches, generation and the server, against mlx-lm or the obvious alternative. Use this page
to see what a feature gains or costs before you enable it; to compare servers, see also
[the comparison](comparison.md#figures).

- Both sides take turns in one process (servers: in two processes on one machine), so the load of the machine affects
  both alike. Compare the **ratios**; speeds depend on the machine.
- A ratio above 1 is in our favour, and below 1 against us. Bars of the pictures begin at 1, on a logarithmic scale.
- In the summary, the lowest ratio is that of all rows of a section, single slow steps included; the highest is that of
  the main ones, which the pictures show.
- Ratios are medians of rounds: they can differ slightly from the quotient of the two values beside them.
- The docstring at the top of each file in `benchmarks/` explains what is measured, and what limits the speed.

Terms are in the [glossary](glossary.md).

`make bench` runs the benchmarks that need only random weights and the bundled models. To run all, create SmolLM2 first:
`python tools/smollm2.py build/smollm2`, then `make bench MODEL=build/smollm2`. `tools/performance.py` writes this page
from the results in `docs/performance/`.
""".strip()
# Single runs, by hand.
SINGLE_RUNS = (
    "| [GPU](#gpu), one H200: a server's clients | our throughput / mlx_lm.server's | 0.75 | 1.69 |",
    "| the same GPU: shared prefixes, where sharing was forced | times as fast as a copy for each row | 0.68 | 1.28 |",
)
GPU, SERVERS = (
    Path(__file__).with_name(f"performance_{name}.md").read_text(encoding="utf-8") for name in ("gpu", "server")
)
