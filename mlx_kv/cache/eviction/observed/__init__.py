"""What was seen of the attention over a cache: the last queries, what tokens received, what queries are like.

`recent` holds queries that a trim may take back, `moments` says what queries are like before RoPE, `observation` keeps
all of it in step with the rows of a cache, `state` is what a file holds of it, `sizes` says how many bytes it takes.
"""
