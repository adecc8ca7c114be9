"""Tokenizers of models that think before they answer, and sometimes never stop."""

from __future__ import annotations

from typing import Any

from mlx_lm.tokenizer_utils import TokenizerWrapper

TEMPLATE = r"""{%- for message in messages %}{{ message.role }}: {{ message.reasoning }}{{ message.content }}
{%- for call in message.tool_calls or [] %} {{ call.function.name }}({{ call.function.arguments | tojson }}){% endfor %}
{{- "\n" }}{% endfor %}{{ tools | tojson if tools }}{% if add_generation_prompt %}assistant:{% endif %}"""


def with_thinking(changed: TokenizerWrapper) -> TokenizerWrapper:
    """The tokenizer, which is told the marks of reasoning: its vocabulary has none."""
    for name, mark in (("start", "<think>"), ("end", "</think>")):
        ids = tuple(changed.encode(mark, add_special_tokens=False))
        object.__setattr__(changed, f"_think_{name}", mark)
        object.__setattr__(changed, f"_think_{name}_tokens", ids)
    return changed


def thinker(tokenizer: Any) -> Any:
    """A model whose answers begin within thinking, which it never ends by itself."""
    changed = with_thinking(tokenizer)
    changed._tokenizer.chat_template = TEMPLATE.replace("assistant:{%", "assistant:<think>{%")
    changed.chat_template = changed._tokenizer.chat_template
    object.__setattr__(changed, "has_chat_template", True)
    return changed
