"""`mlx-kv cache`: reads a prompt and stores its keys and values in a file; `generate` continues from there."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from mlx_kv.cli.model import ModelOptions, PromptOptions, note_context, prefill_option
from mlx_kv.cli.options import command, option, options
from mlx_kv.cli.output import file_errors, human_bytes, prefill_bar, tokens_line
from mlx_kv.cli.policy import PolicyOptions, policy_options

if TYPE_CHECKING:
    from mlx_kv.files.serialization import PromptFile

EXAMPLES = """
\b
Examples:
  mlx-kv cache --prompt-file notes.py --output notes.safetensors
  mlx-kv generate --prompt-cache-file notes.safetensors --prompt "def main():"
  mlx-kv cache --prompt-file notes.py --output small.safetensors --kv-budget 256 --kv-bits 8
"""


def load_for(path: Path, network: Any, tokenizer: Any, model: str) -> PromptFile:
    """A file of caches for this model.

    Raises:
        click.UsageError, ValueError: it is of another model, tokenizer or version, damaged, or empty.
    """
    from mlx_kv.files.serialization import check_fingerprint, load_prompt_file, model_fingerprint
    from mlx_kv.mlxlm.convert import make_prompt_cache
    from mlx_kv.mlxlm.loading import vocabulary_of
    from mlx_kv.mlxlm.vision import text_tokens

    with file_errors(f"read {path}"):
        file = load_prompt_file(path)
    made_with = file.metadata.get("model")
    if not file.stock:
        check_fingerprint(str(path), file.fingerprint, model_fingerprint(network, tokenizer), made_with)
    elif made_with not in (None, model) or len(file.caches) != len(make_prompt_cache(network)):
        fix = f"give --model {made_with}" if made_with not in (None, model) else "give the model that it was made with"
        raise click.UsageError(f"{path} is a prompt cache of another model: {fix}")
    if not any(not cache.empty() for cache in file.caches):
        raise click.UsageError(f"{path} holds no tokens: make it again")
    if max(text_tokens(network, file.tokens or []), default=0) >= vocabulary_of(network):
        raise click.UsageError(f"{path} has read tokens that the model does not have: make it again")
    return file


def tokens_read(file: PromptFile) -> int:
    """How many tokens the caches of a file have read."""
    from mlx_kv.mlxlm.traverse import attention_caches

    if file.tokens is not None:
        return len(file.tokens)
    return max((row.offset for cache in attention_caches(file.caches) for row in cache.view.rows), default=0)


@command(epilog=EXAMPLES, short_help="Store the keys and values of a prompt in a file.")
@options(ModelOptions, "model", "name", "adapter_path", "trust_remote_code")
@options(PromptOptions, "prompt")
@option(
    "--output",
    required=True,
    metavar="FILE",
    section="Output",
    summary="File for the prompt cache.",
    help="File for the prompt cache; an older prompt cache is replaced when the new one is complete.",
)
@option("--force", is_flag=True, section="Output", help="Replace a file that is no prompt cache, too.")
@option("--ignore-chat-template", is_flag=True, section="Prompt", help="Read the prompt as plain text.")
@prefill_option()
@policy_options()
def cache(
    model: ModelOptions,
    prompt: PromptOptions,
    output: str,
    force: bool,
    ignore_chat_template: bool,
    prefill_step_size: int | None,
    policy: PolicyOptions,
) -> None:
    """Read a prompt and store its keys and values in a file, for `generate --prompt-cache-file`.

    The prompt is --prompt, the content of --prompt-file, or stdin for a lone -.
    """
    if output == "-":
        raise click.UsageError("--output -: a prompt cache cannot go to stdout; give the name of a file (./- for -)")
    text = prompt.read()
    policy.checked()  # bad settings are refused before anything is loaded

    from mlx_kv.files.serialization import check_output, save_prompt_cache

    with file_errors(f"write {output}"):
        check_output(output, force, "--force")  # before anything is read, and again when it is written

    from mlx_kv.files.serialization import model_fingerprint
    from mlx_kv.generation.encoding import encode_beginning, speaks_chat
    from mlx_kv.generation.prefill import Instructions, prefill_all, prefill_step, reserve_for
    from mlx_kv.generation.statistics import cache_statistics
    from mlx_kv.mlxlm.convert import make_prompt_cache
    from mlx_kv.mlxlm.traverse import compact

    network, tokenizer = model.load()
    cache_policy = policy.for_model(network, model.name)
    tokens = encode_beginning(tokenizer, text, speaks_chat(tokenizer, ignore_chat_template))
    note_context(network, len(tokens))
    caches = make_prompt_cache(network, cache_policy)
    reserve_for(caches, len(tokens), 0)
    step = prefill_step(network, caches, prefill_step_size)
    started = time.perf_counter()
    with prefill_bar(len(tokens), step) as advance:
        instructions = Instructions.for_policy(cache_policy, tokenizer, network)
        prefill_all(network, caches, tokens, step, instructions, advance)
        if cache_policy.reads_twice:
            compact(caches)
    read = time.perf_counter()
    with file_errors(f"write {output}"):
        check_output(output, force, "--force")
        fingerprint = model_fingerprint(network, tokenizer)
        save_prompt_cache(output, caches, {"model": model.name}, tokens=tokens, fingerprint=fingerprint, force=force)
    saved = time.perf_counter()
    statistics = cache_statistics(caches)
    lines = (
        tokens_line("prompt", len(tokens), len(tokens) / (read - started)),
        f"KV cache    {human_bytes(statistics.bytes_live)} live, {human_bytes(statistics.bytes_allocated)} allocated",
        f"file        {human_bytes(os.path.getsize(output))} in {saved - read:.2f} s: {output}",
    )
    click.echo("\n".join(lines), err=True)
