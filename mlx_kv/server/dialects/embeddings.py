"""Embeddings: OpenAI's request and Ollama's, and their answers."""

from __future__ import annotations

import base64
import time
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator, Field

from mlx_kv.generation.embedding import Pooling
from mlx_kv.server.dialects.completions import Tokens, prompt_list
from mlx_kv.server.dialects.ollama import KeepAlive, nanoseconds
from mlx_kv.server.requests import Body, EmbeddingRequest, RequestRules, Text, Vectors

MAX_INPUTS, MAX_DIMENSIONS = 2_048, 2**20


Inputs = Annotated[
    list[Annotated[Text | Tokens, Field(union_mode="left_to_right")]],
    Field(max_length=MAX_INPUTS, fail_fast=True, description="a text, token ids, or up to 2,048 of these"),
    BeforeValidator(prompt_list),
]
Dimensions = Annotated[int | None, Field(ge=1, le=MAX_DIMENSIONS)]


class EmbeddingBody(Body):
    """A request of OpenAI's API, with `pooling` and `input_type` beside."""

    ignored: ClassVar[frozenset[str]] = frozenset({"user"})
    model: str | None = None
    input: Inputs
    encoding_format: Literal["float", "base64"] = "float"
    dimensions: Dimensions = None
    pooling: Pooling | None = None
    input_type: str | None = None

    def answer(self, model: str, vectors: Vectors, tokens: int) -> dict[str, Any]:
        """The response."""
        as_text = self.encoding_format == "base64"
        data = [
            {
                "object": "embedding",
                "index": index,
                "embedding": base64.b64encode(vector.astype("<f4").tobytes()).decode() if as_text else vector.tolist(),
            }
            for index, vector in enumerate(vectors)
        ]
        usage = {"prompt_tokens": tokens, "total_tokens": tokens}
        return {"object": "list", "data": data, "model": model, "usage": usage}


def embeddings(body: Any, rules: RequestRules) -> EmbeddingRequest:
    """OpenAI's request."""
    parsed = EmbeddingBody.parse(body, rules.unknown)
    return EmbeddingRequest(parsed.input, parsed.answer, parsed.dimensions, parsed.pooling, parsed.input_type)


class OllamaEmbedBody(Body):
    """A request of /api/embed."""

    ignored: ClassVar[frozenset[str]] = frozenset({"options"})
    model: str | None = None
    input: Inputs
    truncate: bool = True
    dimensions: Dimensions = None
    keep_alive: KeepAlive = None


def ollama_embed(body: Any, rules: RequestRules) -> EmbeddingRequest:
    """Ollama's request."""
    parsed, since = OllamaEmbedBody.parse(body, rules.unknown), time.monotonic()

    def answer(model: str, vectors: Vectors, tokens: int) -> dict[str, Any]:
        taken = {"total_duration": nanoseconds(time.monotonic() - since), "load_duration": 0}
        found = [vector.tolist() for vector in vectors]
        return {"model": parsed.model or model, "embeddings": found, "prompt_eval_count": tokens} | taken

    return EmbeddingRequest(
        parsed.input,
        answer,
        parsed.dimensions,
        truncate=parsed.truncate,
        keep_alive=parsed.keep_alive,
    )
