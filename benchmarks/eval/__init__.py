"""Measures how well a model answers when its cache keeps only part of a context: `python -m benchmarks.eval`.

tasks.py, questions.py     what is asked: made-up words, facts, texts, code and chats
measure.py, results.py     accuracy, perplexity and correlation under every policy, and their summary over seeds
contexts.py, attention.py  a context that is read once for all policies; the attention that its tokens receive
plots.py                   figures of results, and of what `mlx-kv inspect --json` wrote

score_table.py, score_rule.py   many scores on an instruct model, and the rule of docs/eval-results.md
codecs.py, partial_reads.py     what codecs cost, and what reading a part of a cache would
"""
