"""`python -m mlx_kv.cli`: the command `mlx-kv`, with the same guard against an interrupt at any moment."""

from mlx_kv_command import main

if __name__ == "__main__":
    main()
