"""Everything that depends on mlx-lm's internals: its models, their cache lists, and our caches in them.

    loading.py    models, and their names, sizes and limits
    convert.py    our caches instead of a model's own
    traverse.py   the caches of all layers: listed, trimmed, compacted
    recurrent.py  recurrent state with checkpoints
    replay.py     recurrent layers that go back within a pass
    batching.py   caches as rows of a batch, and mlx-lm's generator
    probe.py      probes: how a model uses its caches, and the RoPE of what it caches
    attention.py  a patch of the attention function, and which layers go through it
    taps.py       hidden states of any model
    heads.py      heads that draft, over layers of mlx-lm
    eagle.py      those of EAGLE-3
    head_files.py files of heads, and where they are found
    vision.py     models that read images
    cpu.py        attention and activation on a CPU
    cuda.py       attention over quantised caches on CUDA

Differences between models are found by probes, never by a model's name, but for the names of tensors in heads' files.
"""
