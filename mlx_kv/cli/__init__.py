"""The commands of `mlx-kv`, a file each. They decide nothing about caches; MLX is imported when one of them runs."""
