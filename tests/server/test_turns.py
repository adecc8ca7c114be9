"""A conversation reads in each turn only what is new: also with models whose caches cannot be shortened."""

from __future__ import annotations

from typing import Any

import pytest
import serving
from chat_templates import TEMPLATES, with_template
from serving import running
from tiny_models import make_model

from mlx_kv import CachePolicy

WORDS = 12  # of an answer, a token each
ENDS: dict[str, dict[str, Any]] = {
    "length": {"max_tokens": WORDS},
    "end": {"max_tokens": 24, "regex": f"( import){{{WORDS}}}"},
}


@pytest.mark.parametrize("end", ENDS)
@pytest.mark.parametrize("family", ["llama", "gemma3_text", "lfm2", "falcon_h1"])
def test_the_next_turn_reads_what_is_new(family: str, end: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """It goes on from the end of the answer, which the template writes as it was."""
    model, load = make_model(family, vocab_size=4096), serving.load
    monkeypatch.setattr(serving, "load", lambda path, lazy=False: (model, load(path)[1]))

    def change(tokenizer: Any) -> Any:
        return with_template(tokenizer, TEMPLATES["qwen 2.5"].replace("<|end>", tokenizer.eos_token))

    with running(CachePolicy(), change=change, prompt_memory_bytes=2**27) as server:
        (word,) = server.worker.default.models.tokenizer.encode(" import", add_special_tokens=False)
        messages: list[dict[str, Any]] = [{"role": "user", "content": "Which files are there? " * 8}]
        text = 0
        for _ in range(4):
            asked = {"messages": messages, "logit_bias": {str(word): 100}, **ENDS[end]}
            answer = server.post("/v1/chat/completions", **asked).json()
            usage, said = answer["usage"], answer["choices"][0]["message"]["content"]
            assert said == " import" * WORDS
            reused = usage["prompt_tokens_details"]["cached_tokens"]
            assert text - 1 <= reused <= text + (end == "end") or not text  # its last token is the turn's, too
            server.wait_until_kept()
            text = usage["prompt_tokens"] + WORDS
            messages += [{"role": "assistant", "content": said}, {"role": "user", "content": "And then? " * 8}]
