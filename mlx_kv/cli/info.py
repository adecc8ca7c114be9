"""`mlx-kv info`: installed versions, and the speed of matrix products; `mlx-kv completion`: completion in a shell."""

from __future__ import annotations

import time

import click

from mlx_kv import blas
from mlx_kv.bundled import bundled_models, model_path

# --- info -------------------------------------------------------------------------------------------------------------


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


# --- completion -------------------------------------------------------------------------------------------------------


INSTALL = {
    "zsh": 'mlx-kv completion zsh > "${fpath[1]}/_mlx-kv", then start a new shell',
    "bash": "mlx-kv completion bash > ~/.local/share/bash-completion/completions/mlx-kv, then start a new shell",
    "fish": "mlx-kv completion fish > ~/.config/fish/completions/mlx-kv.fish",
}


@click.command(
    short_help="Print the completion script of a shell.",
    epilog="\b\nInstall it once:\n"
    + "\n".join(f"  {line.partition(', then')[0]}" for line in INSTALL.values())
    + "\n\b\nOr for one shell:\n"
    + '  eval "$(mlx-kv completion zsh)"      # or bash\n'
    + "  mlx-kv completion fish | source",
)
@click.argument("shell", type=click.Choice(list(INSTALL)))
@click.pass_context
def completion(ctx: click.Context, shell: str) -> None:
    """Print the script that completes commands, options and choices in zsh, bash or fish."""
    from click.shell_completion import get_completion_class

    kind = get_completion_class(shell)
    assert kind is not None
    click.echo(kind(ctx.find_root().command, {}, "mlx-kv", "_MLX_KV_COMPLETE").source().rstrip())
    click.echo(f"# Install: {INSTALL[shell]}.")
