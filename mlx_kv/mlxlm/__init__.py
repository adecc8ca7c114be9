"""Every quirk of mlx-lm, in one place: what its models and their cache lists are, and our caches in them.

    loading.py    models, and their names, sizes and limits
    convert.py    our caches in the place of a model's own
    traverse.py   the caches of all layers, one by one
    trimming.py   tokens taken back, and compaction, in all layers or in none
    recurrent.py  recurrent state that can go back
    batching.py   caches as rows of a batch, and mlx-lm's generator
    probe.py      what a model does with its caches, found by asking it
    rope.py       the RoPE of a model's layers, found by asking it
    attention.py  where a model's attention can be seen, and answered
    observing.py  which layers show theirs, and caches that want to see it
    cpu.py        attention and activation on a CPU
    filters.py    filters of log-probabilities as they are before MLX compiles them

Quirks of a model are found by asking it, never by its name.
"""
