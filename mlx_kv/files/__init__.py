"""What is written to disk and read again: prompt caches of ours and of mlx-lm, and whose they are."""
