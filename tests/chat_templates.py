"""Chat templates that behave as those of families of models do, each with the rules that make it hard to serve."""

from __future__ import annotations

from typing import Any

from mlx_lm.tokenizer_utils import TokenizerWrapper

CHATML = r"""{%- for message in messages %}<|{{ message.role }}>{{ message.content }}<|end>
{% endfor %}{% if add_generation_prompt %}<|assistant>{% endif %}"""

# One call in a message, whose text is dropped; a system message may come anywhere.
LLAMA_3 = r"""{%- set rest = messages[1:] if messages[0].role == "system" else messages %}
{{- "<|system>" + (messages[0].content | trim if messages[0].role == "system" else "none") + "<|end>" }}
{%- if tools %}<|tools>{{ tools | tojson }}<|end>{% endif %}
{%- for message in rest %}
{%- if "tool_calls" in message %}
{%- if message.tool_calls | length != 1 %}{{ raise_exception("this model calls one tool at a time") }}{% endif %}
{%- set call = message.tool_calls[0].function %}
{{- '<|assistant>{"name": "' + call.name + '", "parameters": ' + (call.arguments | tojson) + "}<|end>" }}
{%- elif message.role in ["tool", "ipython"] %}{{ "<|ipython>" + (message.content | tojson) + "<|end>" }}
{%- else %}{{ "<|" + message.role + ">" + message.content | trim + "<|end>" }}
{%- endif %}{% endfor %}{% if add_generation_prompt %}<|assistant>{% endif %}"""

# Turns alternate, ids have nine letters, text beside calls is dropped, and the system message moves to the last turn.
MISTRAL_3 = r"""{%- set rest = messages[1:] if messages[0].role == "system" else messages %}
{%- set users = rest | selectattr("role", "equalto", "user") | list %}
{%- set turn = namespace(number=0) %}
{%- for message in rest %}
{%- if message.role == "user" or (message.role == "assistant" and message.tool_calls is not defined) %}
{%- if (message.role == "user") != (turn.number % 2 == 0) %}{{ raise_exception("turns have to alternate") }}{% endif %}
{%- set turn.number = turn.number + 1 %}
{%- endif %}{% endfor %}
{{- "<s>" }}
{%- for message in rest %}
{%- if message.role == "user" %}
{%- if tools and message == users[-1] %}[TOOLS]{{ tools | tojson }}[/TOOLS]{% endif %}
{{- "[INST]" + (messages[0].content + "\n\n" if loop.last and messages[0].role == "system" else "") }}
{{- message.content + "[/INST]" }}
{%- elif message.tool_calls is defined %}
{{- "[CALLS][" }}
{%- for call in message.tool_calls %}
{%- if call.id | length != 9 %}{{ raise_exception("ids have nine letters") }}{% endif %}
{{- call.function | tojson + ', "id": "' + call.id + '"' + (", " if not loop.last else "") }}
{%- endfor %}{{ "]</s>" }}
{%- elif message.role == "assistant" %}{{ message.content + "</s>" }}
{%- elif message.role == "tool" %}
{%- if message.tool_call_id | length != 9 %}{{ raise_exception("ids have nine letters") }}{% endif %}
{{- '[RESULT]{"content": ' + message.content + ', "call_id": "' + message.tool_call_id + '"}[/RESULT]' }}
{%- else %}{{ raise_exception("only users, assistants and tools speak") }}
{%- endif %}{% endfor %}"""

# Results are turns of the user; with a text for arguments, they are escaped.
QWEN = r"""{%- if tools %}
{{- "<|system>" + (messages[0].content + "\n\n" if messages[0].role == "system" else "") }}
{{- (tools | tojson) + "<|end>\n" }}
{%- elif messages[0].role == "system" %}{{ "<|system>" + messages[0].content + "<|end>\n" }}{% endif %}
{%- set last = namespace(query=messages | length - 1) %}
{%- for message in messages %}{% if message.role == "user" %}{% set last.query = loop.index0 %}{% endif %}{% endfor %}
{%- for message in messages %}
{%- if message.role == "user" or (message.role == "system" and not loop.first) %}
LATE_SYSTEM
{{- "<|" + message.role + ">" + message.content + "<|end>\n" }}
{%- elif message.role == "assistant" %}{{ "<|assistant>" }}
{%- if message.reasoning_content is string and loop.index0 > last.query %}
{{- "<think>" + message.reasoning_content + "</think>" }}{% endif %}
{{- message.content }}
{%- for call in message.tool_calls or [] %}
{{- '<tool_call>{"name": "' + call.function.name + '", "arguments": ' }}
{{- (call.function.arguments | tojson) + "}</tool_call>" }}
{%- endfor %}{{ "<|end>\n" }}
{%- elif message.role == "tool" %}
{%- if loop.first or messages[loop.index0 - 1].role != "tool" %}<|user>{% endif %}
{{- "<tool_response>" + message.content + "</tool_response>" }}
{%- if loop.last or messages[loop.index0 + 1].role != "tool" %}{{ "<|end>\n" }}{% endif %}
{%- endif %}{% endfor %}{% if add_generation_prompt %}<|assistant>{% endif %}"""
QWEN_3 = QWEN.replace("LATE_SYSTEM", "")  # earlier reasoning is dropped
QWEN_2_5 = QWEN_3.replace("message.reasoning_content is string", "false")
QWEN_3_5 = QWEN.replace(
    "LATE_SYSTEM",
    '{%- if message.role == "system" %}{{ raise_exception("a system message has to be the first") }}{% endif %}',
).replace(
    "{%- set last",
    '{%- if not messages | selectattr("role", "equalto", "user") | list %}{{ raise_exception("no user") }}{% endif %}'
    "{%- set last",
    1,
)

# Users and the model alternate, and there is neither a system nor a tool.
GEMMA_3 = r"""<bos>{%- if messages[0].role == "system" %}
{%- set first, rest = messages[0].content + "\n\n", messages[1:] %}
{%- else %}{% set first, rest = "", messages %}{% endif %}
{%- for message in rest %}
{%- if (message.role == "user") != (loop.index0 % 2 == 0) %}{{ raise_exception("roles have to alternate") }}{% endif %}
{{- "<turn>" + ("model" if message.role == "assistant" else message.role) + "\n" + (first if loop.first else "") }}
{%- if message.content is string %}{{ message.content | trim }}{% else %}
{%- for part in message.content if part.type == "text" %}{{ part.text | trim }}{% endfor %}{% endif %}
{{- "</turn>\n" }}
{%- endfor %}{% if add_generation_prompt %}{{ "<turn>model\n" }}{% endif %}"""

# System messages from all places come first, arguments are texts, and `tool_calls` says that there are some.
DEEPSEEK_3 = r"""{%- set system = namespace(text="") %}
{%- for message in messages if message.role == "system" %}
{%- set system.text = system.text + ("\n\n" if system.text else "") + message.content %}{% endfor %}
{{- "<begin>" + system.text }}
{%- for message in messages %}
{%- if message.role == "user" %}{{ "<|user>" + message.content }}
{%- elif message.role == "assistant" and message.tool_calls is defined and message.tool_calls is not none %}
{{- "<|assistant>" + (message.content or "") + "<calls>" }}
{%- for call in message.tool_calls %}
{{- "<call>" + call.function.name + "<sep>" + call.function.arguments + "</call>" }}{% endfor %}{{ "</calls><end>" }}
{%- elif message.role == "assistant" %}{{ "<|assistant>" + message.content.split("</think>")[-1] + "<end>" }}
{%- elif message.role == "tool" %}{{ "<output>" + message.content + "</output>" }}
{%- endif %}{% endfor %}{% if add_generation_prompt %}<|assistant>{% endif %}"""

# Contents are lists of parts.
VISION = r"""{%- for message in messages %}{{ "<|" + message.role + ">" }}
{%- for part in message.content %}{{ part.text if part["type"] == "text" else "<image>" }}{% endfor %}{{ "<|end>" }}
{%- endfor %}{% if add_generation_prompt %}<|assistant>{% endif %}"""

# Arguments are written as they are given.
AS_GIVEN = r"""{%- for message in messages %}{{ "<|" + message.role + ">" + message.content }}
{%- for call in message.tool_calls or [] %}[{{ call.function.name }}: {{ call.function.arguments }}]{% endfor %}
{{- "<|end>" }}{% endfor %}{% if add_generation_prompt %}<|assistant>{% endif %}"""

TEMPLATES = {
    "chatml": CHATML,
    "llama 3": LLAMA_3,
    "mistral v3": MISTRAL_3,
    "qwen 2.5": QWEN_2_5,
    "qwen 3": QWEN_3,
    "qwen 3.5": QWEN_3_5,
    "gemma 3": GEMMA_3,
    "deepseek v3": DEEPSEEK_3,
    "vision": VISION,
    "as given": AS_GIVEN,
}


def with_template(tokenizer: Any, template: str) -> TokenizerWrapper:
    """mlx-lm's tokenizer with another chat template."""
    tokenizer._tokenizer.chat_template = template
    return TokenizerWrapper(tokenizer._tokenizer)
