"""What was seen of the attention over a cache: the last queries, what tokens received, what queries are like.

`recent` holds queries that a trim may take back, `weights` says how they attend, `moments` what they are like before
RoPE, and `observation` keeps all of it in step with the rows of a cache. Nothing of it knows about scores.
"""
