"""`mlx-kv info`: installed versions, and the speed of matrix products."""

from __future__ import annotations

import time

import click

from mlx_kv import blas
from mlx_kv.bundled import bundled_models, model_path

EXAMPLES = """
\b
Examples:
  mlx-kv info
  MLX_KV_BLAS=none mlx-kv info    # with MLX's own BLAS
"""


@click.command(epilog=EXAMPLES, short_help="Show versions, device, BLAS and bundled models.")
def info() -> None:
    """Show versions, device, BLAS and bundled models of this installation."""
    library = blas.preload()

    import importlib.metadata
    import platform

    import mlx.core as mx

    for package in ("mlx-kv", "mlx", "mlx-lm", "transformers"):
        click.echo(f"{package:<14}{importlib.metadata.version(package)}")
    click.echo(f"{'python':<14}{platform.python_version()} on {platform.system()} {platform.machine()}")
    click.echo(f"{'device':<14}{mx.default_device()}")
    click.echo(f"{'BLAS':<14}{library}")
    click.echo(f"{'':<14}{measure_matmul():,.0f} GFLOP/s in a float32 product of 1,024 x 1,024")
    for name in bundled_models():
        click.echo(f"{'model':<14}{name}: {model_path(name)}")


def measure_matmul() -> float:
    """GFLOP/s of a float32 matrix product, the best of five, or of those that a second is enough for."""
    import mlx.core as mx

    size = 1024
    a, b = mx.random.normal((size, size)), mx.random.normal((size, size))
    mx.eval(a, b)
    times: list[float] = []
    while len(times) < 5 and sum(times) < 1:
        started = time.perf_counter()
        mx.eval(a @ b)
        times.append(time.perf_counter() - started)
    return 2 * size**3 / min(times) / 1e9
