"""`mlx-kv chat`: a conversation in the terminal that never reads its history again."""

from __future__ import annotations

import logging
import sys

from mlx_kv.cli.model import ChatOptions, DraftOptions, ModelOptions, generation_options, unseeded_sampler
from mlx_kv.cli.options import command, options
from mlx_kv.cli.output import say
from mlx_kv.cli.policy import PolicyOptions
from mlx_kv.cli.ranks import Machine, on_each_rank
from mlx_kv.generation.settings import SamplingSettings

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
  /image FILE adds an image to the next question, for models that read images
  /save FILE and /load FILE keep a conversation, with its keys and values
  /stats shows what the caches hold, /help lists commands; /exit, q or Ctrl-D ends
  Ctrl-C ends an answer, or clears the line; twice on an empty line it ends the chat
"""


@command(epilog=EXAMPLES, short_help="Chat with a model in the terminal.")
@options(ModelOptions, "model", "name", "adapter_path", "trust_remote_code")
@options(ChatOptions, "chat", "system_prompt", "chat_template_config", "thinking_budget", "thinking_closing")
@generation_options
@on_each_rank
def chat(
    machine: Machine,
    model: ModelOptions,
    chat: ChatOptions,
    max_tokens: int,
    sampling: SamplingSettings,
    prefill_step_size: int | None,
    drafts: DraftOptions,
    policy: PolicyOptions,
) -> None:
    """Chat with a model: answers stream to stdout, all else goes to stderr.

    Each line is a question; three quotation marks begin and end one of several lines. Ctrl-C ends an answer, which
    is kept as far as it came. Questions that are longer than the model's context are refused.
    """
    policy.checked()  # bad settings are refused before anything is loaded
    on_screen = machine.leads and sys.stdin is not None and sys.stdin.isatty()
    if on_screen:
        say(f"loading {model.name}")

    from mlx_kv.cli.chat_session import ChatFiles, ChatSession
    from mlx_kv.generation.conversation import Conversation
    from mlx_kv.generation.sampling import Sampler, sampler_of_sequence
    from mlx_kv.mlxlm.loading import context_length

    network, tokenizer = machine.load()
    logging.getLogger("transformers").setLevel(logging.ERROR)  # its warnings of long prompts, which the session refuses
    cache_policy = policy.for_model(network, model.name)
    engine = machine.engine(
        network,
        tokenizer,
        cache_policy,
        drafts,
        max_batch_size=1,
        prefill_step_size=prefill_step_size,
        return_caches=True,
    )
    sampler = unseeded_sampler(sampling, tokenizer)

    def draws(position: int) -> Sampler | None:
        return sampler_of_sequence(sampler, sampling.seed, position)

    conversation = Conversation(engine, tokenizer, chat.settings, network)
    files = ChatFiles(model.name, network, tokenizer, cache_policy, whole=machine.group is None)
    session = ChatSession(conversation, files, max_tokens, draws, sampling.processors(), context_length(network))
    if on_screen:
        session.greet(model.name, cache_policy)
    try:
        session.run()
    finally:
        engine.close()
