"""`mlx-kv completion`: completion of commands and options in a shell."""

from __future__ import annotations

import click

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
