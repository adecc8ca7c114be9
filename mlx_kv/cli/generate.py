"""`mlx-kv generate`: continues a prompt, and says what the caches did.

Decides the order of a run: words into settings, models, the loop, the statistics. Knows nothing about how tokens are
chosen or kept.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import click

from mlx_kv.cli.cache import load_for, tokens_read
from mlx_kv.cli.decoding import Decoding, decoding_options, said_of_drafts
from mlx_kv.cli.forms import Form, form_options
from mlx_kv.cli.loading import Loading, loading_options
from mlx_kv.cli.measured_policy import asked_policy, measured_policy_options
from mlx_kv.cli.options import human_bytes, model_option, tokens_line
from mlx_kv.cli.prompt import Chat, chat_options, note_context, prefill_bar, prompt_options, read_prompt
from mlx_kv.cli.ranks import Machine, RankOptions, rank_options

EXAMPLES = """
\b
Examples:
  mlx-kv generate --prompt "def fibonacci(n):"
  mlx-kv generate --prompt-file notes.py --kv-bits 8 --max-tokens 400
  mlx-kv generate --prompt-file notes.py --kv-bits 8,4 --kv-rotate
  mlx-kv generate --prompt-file notes.py --kv-bits auto --max-loss 0.02
  mlx-kv generate --prompt "A person: " --json-schema person.json
  git show | mlx-kv generate - --temp 0.7 --top-p 0.9 --seed 1
  mlx-kv generate --prompt-file notes.py --kv-budget 256 --kv-score key_diff
  mlx-kv generate --prompt-file notes.py --draft suffix
  mlx-kv generate --prompt-file notes.py --draft-model reference
  mlx-kv generate --prompt-cache-file notes.safetensors --prompt "def main():"
  mlx-kv generate --model mlx-community/Qwen3-0.6B-4bit --prompt "Hello" --json
  mlx.launch -n 2 mlx-kv generate --prompt "def fibonacci(n):"
"""


def check_cache_file(policy: dict[str, Any], draft_model: str | None) -> None:
    """Refuses what cannot go with --prompt-cache-file."""
    if draft_model is not None:
        raise click.UsageError(
            "--prompt-cache-file has no caches of a draft model: leave out --draft-model, or give --draft suffix"
        )
    ctx = click.get_current_context()
    given = [name for name in policy if ctx.get_parameter_source(name) is click.core.ParameterSource.COMMANDLINE]
    if given:
        options = ", ".join(f"--{name.replace('_', '-')}" for name in given)
        raise click.UsageError(
            f"the caches of --prompt-cache-file keep the policy they were made with: leave out {options}"
        )


@click.command(epilog=EXAMPLES)
@model_option()
@loading_options("adapter_path", "trust_remote_code", "extra_eos_token", "quantize_activations")
@prompt_options
@click.option(
    "--prompt-cache-file",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    metavar="FILE",
    help="Go on from a prompt that `mlx-kv cache` kept: this one follows it.",
)
@click.option("--ignore-chat-template", is_flag=True, help="Continue the prompt as plain text.")
@chat_options("system_prompt", "chat_template_config", "prefill_response")
@click.option("--max-tokens", "-m", type=click.IntRange(1), default=256, show_default=True, metavar="N")
@decoding_options
@form_options
@measured_policy_options
@rank_options
@click.option("--verbose", type=bool, default=True, show_default=True, help="Statistics follow; false leaves them out.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object instead of streaming.")
def generate(
    model: str,
    loading: Loading,
    prompt_cache_file: Path | None,
    decoding: Decoding,
    form: Form,
    ranks: RankOptions,
    **given: Any,
) -> None:
    """Continue a prompt: text streams to stdout, statistics follow on stderr.

    The prompt is --prompt, the content of --prompt-file, or stdin for a lone -. With --prompt-cache-file it follows
    the one that was kept.
    """
    with ranks.joined(model, loading) as machine:
        continue_prompt(machine, model, prompt_cache_file, decoding, form, **given)


def continue_prompt(
    machine: Machine,
    model: str,
    prompt_cache_file: Path | None,
    decoding: Decoding,
    form: Form,
    source: str | None,
    prompt: str | None,
    prompt_file: Path | None,
    ignore_chat_template: bool,
    chat: Chat,
    max_tokens: int,
    verbose: bool,
    as_json: bool,
    **policy: Any,
) -> None:
    """What `generate` does, on each rank; the prompt and what is printed are those of the one that leads."""
    drafting = decoding.drafting
    if prompt_cache_file is not None:
        check_cache_file(policy, drafting.draft_model)
        if machine.group is not None:
            raise click.UsageError("--prompt-cache-file has all of each layer, and a rank only a part: leave it out")
    text = read_prompt(prompt, prompt_file, source) if machine.leads else ""
    asked, drafts = asked_policy(**policy), drafting.settings  # refuses bad settings before anything is loaded

    from mlx_kv.communicator import LOCAL
    from mlx_kv.generation.distributed_caches import make_distributed_caches
    from mlx_kv.generation.encoding import encode_ending, encode_text, speaks_chat
    from mlx_kv.generation.prefill import prefill_step
    from mlx_kv.generation.statistics import SpeculationStatistics, cache_statistics
    from mlx_kv.generation.stream import shown_before, speculative_generate, stream_generate
    from mlx_kv.mlxlm.convert import make_prompt_cache

    network, tokenizer = machine.load()
    cache_policy = asked.for_model(network, tokenizer, model)
    chats = speaks_chat(tokenizer, ignore_chat_template)
    already, before = 0, list[int]()  # tokens that the caches have read, and which, as far as they are known
    if prompt_cache_file is not None:
        file = load_for(prompt_cache_file, network, tokenizer, model)
        caches, already, before = file.caches, tokens_read(file), file.tokens or []
        tokens = encode_ending(tokenizer, text, chats, chat.settings)
    else:
        tokens = encode_text(tokenizer, text, ignore_chat_template, chat.settings) if machine.leads else []
    note_context(network, already + len(tokens), max_tokens)
    options: dict[str, Any] = {
        "max_tokens": max_tokens,
        "sampler": decoding.sampler(tokenizer),
        "prefill_step_size": decoding.prefill_step_size,
        "seed": decoding.seed,
        "group": machine.group,
    }
    if machine.leads and (made := (*decoding.processors, *form.processors(tokenizer, tokens, len(before), chats))):
        # mlx-lm's loop knows only what it reads itself.
        options["logits_processors"] = made if drafting.asked else [shown_before(each, before) for each in made]
    speculation = SpeculationStatistics()
    pieces, ids, response = [], [], None
    if prompt_cache_file is None:
        caches = make_distributed_caches(network, cache_policy, machine.group or LOCAL, strict=not drafting.asked)
    step = prefill_step(network, caches, decoding.prefill_step_size)
    draft = drafting.load_model() if machine.leads else None
    if draft is not None:
        step = min(step, prefill_step(draft, make_prompt_cache(draft), decoding.prefill_step_size))
    with prefill_bar(len(tokens), step) as advance:
        options["prompt_progress_callback"] = advance
        if not drafting.asked:
            responses = stream_generate(network, tokenizer, tokens, prompt_cache=caches, **options)
        else:
            options |= vars(drafts) | {"statistics": speculation}
            options |= (
                {"policy": cache_policy} if prompt_cache_file is None else {"prompt_cache": caches, "before": before}
            )
            responses = speculative_generate(network, draft, tokenizer, tokens, **options)
            caches = speculation.caches
        for response in responses:
            pieces.append(response.text)
            ids.append(response.token)
            if not as_json:
                click.echo(response.text, nl=False)
    assert response is not None, "mlx-lm's loop ends with a response"
    held, peak = machine.totals(cache_statistics(caches), round(response.peak_memory * 1e9))
    # The clock of generation starts when the first tokens are there: these alone are no rate.
    first = speculation.rounds <= 1 if drafting.asked else response.generation_tokens == 1
    generation_tps = None if first else response.generation_tps
    if as_json:
        answer = {
            "text": "".join(pieces),
            "tokens": ids,
            "finish_reason": response.finish_reason,
            "cached_tokens": already,
            "prompt_tokens": response.prompt_tokens,
            "prompt_tokens_per_second": round(response.prompt_tps, 2),
            "generation_tokens": response.generation_tokens,
            "generation_tokens_per_second": None if generation_tps is None else round(generation_tps, 2),
            "kv_bytes_live": held.bytes_live,
            "kv_bytes_allocated": held.bytes_allocated,
            "kv_bytes_full": held.bytes_full,
            "kv_growths": held.growths,
            "kv_tokens_evicted": held.tokens_evicted,
            "kv_compactions": held.compactions,
            "kv_compaction_seconds": round(held.compaction_seconds, 4),
            "peak_memory_bytes": peak,
        }
        if machine.group is not None:
            answer["ranks"] = machine.group.size
        if drafting.asked:
            answer |= speculation.figures()
        click.echo(json.dumps(answer))
        return
    click.echo()
    if not verbose:
        return
    lines = (
        "-" * 40,
        *([tokens_line("cached", already, None)] if already else []),
        tokens_line("prompt", response.prompt_tokens, response.prompt_tps),
        tokens_line("generation", response.generation_tokens, generation_tps),
        f"KV cache    {human_bytes(held.bytes_live)} live, {human_bytes(held.bytes_allocated)} allocated",
        f"growths     {held.growths:7,}",
        f"peak memory {human_bytes(peak)}{machine.of_each}",
    )
    click.echo("\n".join(lines), err=True)
    if cache_policy.budget is not None or held.tokens_evicted:
        of_full = f"{held.bytes_live / max(held.bytes_full, 1):.0%} of {human_bytes(held.bytes_full)} for all tokens"
        work = f"{held.tokens_evicted:,} tokens in {held.compactions:,} compactions, {held.compaction_seconds:.3f} s"
        click.echo(f"evicted     {work}; KV cache is {of_full}", err=True)
    if drafting.asked:
        click.echo(said_of_drafts(speculation), err=True)
