"""`mlx-kv generate`: continues a prompt, and reports what the caches hold."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import click

from mlx_kv.cli.cache import load_for, tokens_read
from mlx_kv.cli.model import (
    ChatOptions,
    DraftOptions,
    ModelOptions,
    PromptOptions,
    draft_lines,
    generation_options,
    note_context,
    unseeded_sampler,
)
from mlx_kv.cli.options import EXISTING_FILE, LEADERS_FILE, command, given_options, option, options
from mlx_kv.cli.output import human_bytes, prefill_bar, tokens_line
from mlx_kv.cli.policy import PolicyOptions
from mlx_kv.cli.ranks import Machine, on_each_rank
from mlx_kv.generation.settings import SamplingSettings
from mlx_kv.settings import setting

if TYPE_CHECKING:
    from mlx_kv.generation.encoding import ChatSettings
    from mlx_kv.generation.grammar import GrammarProcessor


EXAMPLES = """
\b
Examples:
  mlx-kv generate --prompt "def fibonacci(n):"
  mlx-kv generate --prompt-file notes.py --kv-bits auto --max-tokens 400
  mlx-kv generate --prompt-file notes.py --kv-bits auto --max-loss 0.02
  mlx-kv generate --prompt-file notes.py --kv-bits 8
  mlx-kv generate --prompt-file notes.py --kv-bits 8,4 --kv-rotate --kv-residual 64
  mlx-kv generate --prompt "A person: " --json-schema person.json
  git show | mlx-kv generate - --temp 0.7 --top-p 0.9 --seed 1
  mlx-kv generate --prompt-file notes.py --kv-budget 256 --kv-score key_diff
  mlx-kv generate --prompt-file notes.py --draft suffix
  mlx-kv generate --prompt-file notes.py --draft-model reference
  mlx-kv generate --model models/qwen3-vl --image page.png --prompt "What is on it?"
  mlx-kv generate --prompt-cache-file notes.safetensors --prompt "def main():"
  mlx-kv generate --model mlx-community/Qwen3-0.6B-4bit --prompt "Hello" --json
  mlx.launch -n 2 mlx-kv generate --prompt "def fibonacci(n):"
"""


@dataclass(frozen=True)
class FormatOptions:
    """The format of an answer: a JSON schema, a regular expression, a grammar, or none of them."""

    SECTION: ClassVar = "Sampling"

    json_schema: Path | None = setting(
        None,
        option="--json-schema",
        summary="JSON schema that the answer follows.",
        kind=LEADERS_FILE,
        metavar="FILE",
    )
    regex: str | None = setting(
        None,
        option="--regex",
        summary="Regular expression of the whole answer.",
        metavar="PATTERN",
    )
    grammar: Path | None = setting(
        None,
        option="--grammar",
        kind=LEADERS_FILE,
        metavar="FILE",
        help="Grammar that the answer follows: llama.cpp's or Lark's.",
    )

    def __post_init__(self) -> None:
        formats = [name for name in ("json_schema", "grammar", "regex") if getattr(self, name) is not None]
        if len(formats) > 1:
            one, other, *_ = (f"--{name.replace('_', '-')}" for name in formats)
            raise click.UsageError(f"{one} and {other} both describe the answer: give one")

    def processors(
        self, tokenizer: Any, prompt: Sequence[int], before: int, chat: ChatSettings | None
    ) -> tuple[GrammarProcessor, ...]:
        """The logits processors that keep the answer to the format.

        Args:
            prompt: token ids that are read now.
            before: number of tokens before them that the processors receive as well.
            chat: in which the model may reason before it answers; None is none.

        Raises:
            ValueError: the format cannot be compiled, and why.
            click.BadParameter: a file that is no JSON.
        """
        if self.regex is None and self.grammar is None and self.json_schema is None:
            return ()
        from mlx_kv.generation.grammar import GrammarCompiler, grammar, json_schema, regex
        from mlx_kv.generation.thinking import LeadIn

        if self.regex is not None:
            constraint = regex(self.regex)
        elif self.grammar is not None:
            constraint = grammar(self.grammar.read_text())
        else:
            assert self.json_schema is not None
            try:
                constraint = json_schema(json.loads(self.json_schema.read_text()))
            except (ValueError, RecursionError) as error:
                message = f"{self.json_schema} is not JSON: {error}"
                raise click.BadParameter(message, param_hint="--json-schema") from None
        lead_in = None if chat is None else LeadIn.after(tokenizer, prompt, beginning=chat.beginning or "")
        return (GrammarCompiler(tokenizer).compile(constraint).processor(before + len(prompt), lead_in),)


@command(epilog=EXAMPLES, short_help="Continue a prompt.")
@options(
    ModelOptions,
    "model",
    *("name", "adapter_path", "trust_remote_code", "extra_eos_token", "quantize_activations", "wired_limit"),
)
@options(PromptOptions, "prompt")
@option(
    "--prompt-cache-file",
    type=EXISTING_FILE,
    metavar="FILE",
    section="Prompt",
    summary="File of mlx-kv cache to continue from.",
    help="Prompt cache of `mlx-kv cache` to continue from: the prompt follows its prompt.",
)
@option(
    "--image",
    "images",
    type=EXISTING_FILE,
    multiple=True,
    metavar="FILE",
    section="Prompt",
    summary="Image before the prompt; repeat it for more.",
    help="Image that the prompt is about, for a model that reads images; give it again for more of them.",
)
@option("--ignore-chat-template", is_flag=True, section="Prompt", help="Continue the prompt as plain text.")
@options(ChatOptions, "chat")
@generation_options
@options(FormatOptions, "answer_format")
@option(
    "--verbose",
    type=bool,
    default=True,
    show_default=True,
    help="Print statistics after the answer.",
)
@option("--json", "as_json", is_flag=True, summary="Print one JSON object.")
@on_each_rank
def generate(
    machine: Machine,
    model: ModelOptions,
    prompt: PromptOptions,
    prompt_cache_file: Path | None,
    images: tuple[Path, ...],
    ignore_chat_template: bool,
    chat: ChatOptions,
    max_tokens: int,
    sampling: SamplingSettings,
    prefill_step_size: int | None,
    drafts: DraftOptions,
    answer_format: FormatOptions,
    policy: PolicyOptions,
    verbose: bool,
    as_json: bool,
) -> None:
    """Continue a prompt: text streams to stdout, statistics follow on stderr.

    The prompt is --prompt, the content of --prompt-file, or stdin for a lone -. With --prompt-cache-file it follows
    the prompt in that file.
    """
    if prompt_cache_file is not None:
        if drafts.draft_model is not None:
            raise click.UsageError(
                "--prompt-cache-file has no caches of a draft model: leave out --draft-model, or give --draft suffix"
            )
        if policy_options_given := given_options(PolicyOptions).values():
            raise click.UsageError(
                "the caches of --prompt-cache-file keep the policy they were made with: leave out "
                + ", ".join(policy_options_given)
            )
    if images and (prompt_cache_file is not None or ignore_chat_template or machine.group is not None):
        raise click.UsageError(
            "--image needs a chat, read by one machine: leave out --prompt-cache-file and --ignore-chat-template"
        )
    text = prompt.read() if machine.leads else ""
    policy.checked()  # bad settings are refused before anything is loaded

    from mlx_kv.communicator import LOCAL
    from mlx_kv.generation.decode_batch import make_distributed_caches
    from mlx_kv.generation.encoding import encode_ending, encode_text, speaks_chat
    from mlx_kv.generation.generate import speculative_generate, stream_generate
    from mlx_kv.generation.images import ImagePrompt, encode_images
    from mlx_kv.generation.prefill import prefill_step
    from mlx_kv.generation.statistics import SpeculationStatistics, cache_statistics
    from mlx_kv.generation.thinking import ThinkingLimit
    from mlx_kv.mlxlm.convert import make_prompt_cache

    model.set_wired_limit()
    network, tokenizer = machine.load()
    cache_policy = policy.for_model(network, model.name)
    chats = speaks_chat(tokenizer, ignore_chat_template)
    already, before = 0, list[int]()  # tokens that the caches have read, and their ids, if known
    if prompt_cache_file is not None:
        file = load_for(prompt_cache_file, network, tokenizer, model.name)
        caches, already, before = file.caches, tokens_read(file), file.tokens or []
        tokens = encode_ending(tokenizer, text, chats, chat.settings)
    else:
        tokens = []
        if machine.leads and not images:
            tokens = encode_text(tokenizer, text, ignore_chat_template, chat.settings)
    asked = ImagePrompt(tokens)
    if images:
        messages = chat.settings.messages(text)
        parts = [*({"type": "image", "image": path} for path in images), {"type": "text", "text": text}]
        messages = [{**each, "content": parts} if each["role"] == "user" else each for each in messages]
        continues = chat.settings.beginning is not None
        asked = encode_images(network, tokenizer, messages, continues, **chat.settings.template)
        tokens = asked.tokens
    note_context(network, already + len(tokens), max_tokens)
    options: dict[str, Any] = {
        "max_tokens": max_tokens,
        "sampler": unseeded_sampler(sampling, tokenizer),
        "prefill_step_size": prefill_step_size,
        "seed": sampling.seed,
        "group": machine.group,
    }
    grammar: tuple[GrammarProcessor, ...] = ()
    if machine.leads:
        in_chat = chat.settings if chats else None
        grammar = answer_format.processors(tokenizer, tokens, len(before), in_chat)
        limit = None if in_chat is None else ThinkingLimit.after(tokenizer, tokens, in_chat, len(before))
        thinking = () if limit is None else (limit,)
        options["logits_processors"] = (*sampling.processors(), *grammar, *thinking) or None
    speculation = SpeculationStatistics()
    pieces, ids, response = [], [], None
    if prompt_cache_file is None:
        caches = make_distributed_caches(network, cache_policy, machine.group or LOCAL, strict=not drafts.enabled)
    step = prefill_step(network, caches, prefill_step_size)
    draft = machine.load_draft(drafts, network, tokenizer)
    if draft is not None:
        step = min(step, prefill_step(draft, make_prompt_cache(draft), prefill_step_size))
    known = ImagePrompt(before)  # may have places of images
    with prefill_bar(len(tokens), step) as advance:
        options["prompt_progress_callback"] = advance
        if not drafts.enabled:
            responses = stream_generate(network, tokenizer, asked, prompt_cache=caches, before=known, **options)
        else:
            options |= vars(drafts.settings) | {"statistics": speculation}
            options |= (
                {"policy": cache_policy} if prompt_cache_file is None else {"prompt_cache": caches, "before": known}
            )
            responses = speculative_generate(network, draft, tokenizer, asked, **options)
            caches = speculation.caches
        for response in responses:
            pieces.append(response.text)
            ids.append(response.token)
            if not as_json:
                click.echo(response.text, nl=False)
    assert response is not None, "generation ends with a response"
    for processor in grammar:
        if why := processor.error_in(ids, response.finish_reason == "stop"):
            click.echo()
            raise click.ClickException(f"the format could not be followed any longer: {why}")
    statistics, peak = machine.totals(cache_statistics(caches), round(response.peak_memory * 1e9))
    # The clock of generation starts when the first tokens are there: these alone are no rate.
    first = speculation.rounds <= 1 if drafts.enabled else response.generation_tokens == 1
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
            "kv_bytes_live": statistics.bytes_live,
            "kv_bytes_allocated": statistics.bytes_allocated,
            "kv_bytes_full": statistics.bytes_full,
            "kv_growths": statistics.growths,
            "kv_tokens_evicted": statistics.tokens_evicted,
            "kv_compactions": statistics.compactions,
            "kv_compaction_seconds": round(statistics.compaction_seconds, 4),
            "peak_memory_bytes": peak,
        }
        if machine.group is not None:
            answer["ranks"] = machine.group.size
        if drafts.enabled:
            answer |= speculation.figures()
        click.echo(json.dumps(answer))
        return
    click.echo()
    if not verbose:
        return
    of_ranks = "" if machine.group is None else f", the largest of {machine.group.size} ranks"
    lines = (
        "-" * 40,
        *([tokens_line("cached", already, None)] if already else []),
        tokens_line("prompt", response.prompt_tokens, response.prompt_tps),
        tokens_line("generation", response.generation_tokens, generation_tps),
        f"KV cache    {human_bytes(statistics.bytes_live)} live, {human_bytes(statistics.bytes_allocated)} allocated",
        f"growths     {statistics.growths:7,}",
        f"peak memory {human_bytes(peak)}{of_ranks}",
    )
    click.echo("\n".join(lines), err=True)
    if cache_policy.budget is not None or statistics.tokens_evicted:
        work = f"{statistics.tokens_evicted:,} tokens in {statistics.compactions:,} compactions"
        share = f"{statistics.bytes_live / max(statistics.bytes_full, 1):.0%} of {human_bytes(statistics.bytes_full)}"
        seconds = f"{statistics.compaction_seconds:.3f} s"
        click.echo(f"evicted     {work}, {seconds}; KV cache is {share} for all tokens", err=True)
    if drafts.enabled:
        click.echo(draft_lines(speculation), err=True)
