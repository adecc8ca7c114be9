"""`mlx-kv chat`: a conversation in the terminal, whose history costs nothing to go on with.

Decides the order of a session: words into settings, models, an engine, the loop. Knows nothing about what is typed
(`chat_session`), nor what caches have read (`generation.conversation`).
"""

from __future__ import annotations

import logging
from typing import Any

import click

from mlx_kv.cli.decoding import Decoding, decoding_options
from mlx_kv.cli.loading import Loading, loading_options
from mlx_kv.cli.measured_policy import asked_policy, measured_policy_options
from mlx_kv.cli.options import model_option
from mlx_kv.cli.prompt import Chat, chat_options
from mlx_kv.cli.ranks import Machine, RankOptions, rank_options

EXAMPLES = """
\b
Examples:
  mlx-kv chat --model mlx-community/Qwen3-0.6B-4bit
  mlx-kv chat --model mlx-community/Qwen3-0.6B-4bit --system-prompt "Answer in verse." --temp 0.7
  mlx-kv chat --kv-bits 8 --draft auto
  echo "import os" | mlx-kv chat --max-tokens 20
\b
While it runs:
  /undo takes the last turn back, /reset all of them
  /save FILE and /load FILE keep a conversation, with its keys and values
  /stats says what is held, /help all of these; /exit, q or Ctrl-D ends
  Ctrl-C ends an answer, or clears the line; twice on an empty line it ends the chat
"""


@click.command(epilog=EXAMPLES)
@model_option()
@loading_options("adapter_path", "trust_remote_code")
@chat_options("system_prompt", "chat_template_config")
@click.option("--max-tokens", "-m", type=click.IntRange(1), default=256, show_default=True, metavar="N")
@decoding_options
@measured_policy_options
@rank_options
def chat(
    model: str, loading: Loading, chat: Chat, max_tokens: int, decoding: Decoding, ranks: RankOptions, **policy: Any
) -> None:
    """Talk with a model: answers stream to stdout, all else goes to stderr.

    Each line is a question; three quotation marks begin and end one of several lines. Ctrl-C ends an answer, which
    stays as far as it came. Questions that are longer than the model's context are refused.
    """
    with ranks.joined(model, loading) as machine:
        converse(machine, model, chat, max_tokens, decoding, **policy)


def converse(machine: Machine, model: str, chat: Chat, max_tokens: int, decoding: Decoding, **policy: Any) -> None:
    """What `chat` does, on each rank; what is typed and said is of the one that leads."""
    drafting = decoding.drafting
    asked, drafts = asked_policy(**policy), drafting.settings  # refuses bad settings before anything is loaded

    from mlx_kv.cli.chat_session import ChatFiles, ChatSession
    from mlx_kv.cli.typed_lines import lines_typed
    from mlx_kv.generation.conversation import Conversation
    from mlx_kv.generation.engine import Engine, make_engine
    from mlx_kv.generation.sampling import Sampler, sampler_of_sequence
    from mlx_kv.generation.two_pass_prefill import Instructions
    from mlx_kv.mlxlm.loading import context_length

    network, tokenizer = machine.load()
    logging.getLogger("transformers").setLevel(logging.ERROR)  # it warns of long prompts, which the session refuses
    cache_policy = asked.for_model(network, tokenizer, model)
    draft = drafting.load_model() if machine.leads else None

    def engine(**communicator: Any) -> Engine:
        return make_engine(
            network,
            set(tokenizer.eos_token_ids),
            cache_policy,
            1,
            decoding.prefill_step_size,
            draft,
            **vars(drafts),
            return_caches=True,
            instructions=Instructions.for_policy(cache_policy, tokenizer, network),
            **communicator,
        )

    sampler = decoding.sampler(tokenizer)

    def draws(position: int) -> Sampler | None:
        return sampler_of_sequence(sampler, decoding.seed, position)

    conversation = Conversation(machine.lead_or_follow(engine), tokenizer, chat.settings)
    files = ChatFiles(model, network, tokenizer, cache_policy, whole=machine.group is None)
    session = ChatSession(conversation, files, max_tokens, draws, decoding.processors, context_length(network))
    try:
        session.run(lines_typed(session.how_to_leave))
    finally:
        conversation.engine.close()
