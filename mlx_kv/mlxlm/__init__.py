"""Every quirk of mlx-lm, in one place: what its models and their cache lists are, and our caches in them."""
