"""The request that every API's bodies become, and the model of the fields that all of them share.

A field is honoured, ignored because it has no effect on the tokens, or refused: a known field that cannot be honoured.
Unknown fields are left to `UnknownFields`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

from pydantic import AfterValidator, Field, create_model, model_validator

from mlx_kv.generation.encoding import NOT_FOR_TEMPLATES
from mlx_kv.generation.grammar import Constraint
from mlx_kv.generation.sampling import derived_seed
from mlx_kv.generation.settings import LEAST_PENALTY, SamplingSettings
from mlx_kv.server.chat import Messages, Tool
from mlx_kv.server.errors import ApiError
from mlx_kv.server.fields import Body, FieldError, NonEmptyText, OneOrMore, UnknownFields, unsupported
from mlx_kv.server.structured_output import ConstraintField, ConstraintFields, ToolChoice
from mlx_kv.settings import settings_of

MAX_STOPS = 16
MAX_TOKENS = 1 << 24
MAX_BIASES, MAX_BIAS = 1024, 100.0
MAX_TOP_LOGPROBS = 20
Prompt = str | list[int]
Effort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]
StopList = Annotated[
    list[NonEmptyText],
    Field(max_length=MAX_STOPS, fail_fast=True, description=f"at most {MAX_STOPS} texts that are not empty"),
]
TokenLimit = Annotated[int | None, Field(ge=1, le=MAX_TOKENS)]


# Cache settings that requests could choose before 0.4, and the options for them.
CACHE_OPTIONS = {"bits": "--kv-bits", "budget": "--kv-budget", "score": "--kv-score"}


class CacheRequest(Body):
    """The field `cache`.

    Attributes:
        keep: whether the keys and values of prompt and answer are cached for other requests.
    """

    keep: bool = True

    @model_validator(mode="before")
    @classmethod
    def _only_known(cls, value: Any) -> Any:
        for name in sorted(value.keys() - cls.model_fields.keys()) if isinstance(value, dict) else ():
            if value[name] is not None and (option := CACHE_OPTIONS.get(name)):
                problem = f"is no longer a setting of requests: start a server with {option}"
                raise FieldError(problem, f".{name}", "unsupported_parameter")
            if value[name] is not None:
                raise FieldError("is unknown: leave it out", f".{name[:80]}", "unknown_parameter")
        return value


AS_SERVED = CacheRequest()


@dataclass
class CompletionRequest:
    """A validated request. The model of its body makes it, and nothing changes it afterwards.

    Attributes:
        prompts: texts or token ids, each of which gets answers; none for a chat.
        messages, tools, template: of a chat; template are arguments for the chat template.
        hints: arguments for the chat template, where the model has one.
        roles: prefixes of messages by role, for a model without a chat template; empty is mlx-lm's.
        continues: whether the answer continues the last message, which is the assistant's.
        one_call: whether an answer has at most one tool call.
        echo: whether an answer begins with its prompt.
        max_tokens: None is the server's.
        n: answers to each prompt.
        top_logprobs: how many likeliest tokens are reported with each token; None reports no log-probabilities at all.
        stop_strings: strings at which the answer ends.
        slot: where the request is shown; None is any.
        constraint: structured output; None is none.
        constraint_field: the field that has it.
        cache: how its keys and values are stored.
    """

    model: str | None = None
    prompts: Sequence[Prompt] = ()
    messages: Messages = field(default_factory=list)
    tools: Sequence[Any] = ()
    template: dict[str, Any] = field(default_factory=dict)
    hints: dict[str, Any] = field(default_factory=dict)
    roles: dict[str, str] = field(default_factory=dict)
    one_call: bool = False
    continues: bool = False
    echo: bool = False
    max_tokens: int | None = None
    sampling: SamplingSettings = field(default_factory=SamplingSettings)
    n: int = 1
    top_logprobs: int | None = None
    stop_strings: tuple[str, ...] = ()
    slot: int | None = None
    constraint: Constraint | None = None
    constraint_field: str = ""
    stream: bool = False
    include_usage: bool = False
    cache: CacheRequest = AS_SERVED

    @property
    def chat(self) -> bool:
        return not self.prompts

    @property
    def forces_call(self) -> bool:
        """Whether the answer has to be a tool call."""
        return self.constraint is not None and self.constraint.kind == "calls"

    @property
    def may_call(self) -> bool:
        """Whether an answer may be a tool call or follow the constraint."""
        return bool(self.tools) and not self.forces_call

    @property
    def answers(self) -> int:
        """The number of answers."""
        return max(1, len(self.prompts)) * self.n

    def sampling_of(self, index: int) -> SamplingSettings:
        """The settings of one of the answers to a prompt; each has a seed derived from the request's."""
        seed = self.sampling.seed
        return self.sampling if seed is None or index == 0 else replace(self.sampling, seed=derived_seed(seed, index))


@dataclass(frozen=True)
class Limits:
    """Limits of requests, and the operator's settings for them.

    Attributes:
        body_bytes: maximum size of a body.
        body_seconds: time for a body to arrive.
        prompt_tokens: maximum length of a prompt; None is the context of the model, less one.
        queue: answers that wait for a row; further requests are refused.
        max_tokens: for requests that leave it out.
        slot_folder: where slots are saved; None saves none.
        strict: whether requests with unknown fields are refused.
        template: settings of the chat template, for requests that leave them out.
    """

    body_bytes: int = 4 * 2**20
    body_seconds: float = 60.0
    prompt_tokens: int | None = None
    queue: int = 64
    max_tokens: int = 512
    strict: bool = False
    slot_folder: Path | None = None
    template: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class RequestRules:
    """The server's settings for requests: sampling by default, unknown fields, and the number of slots."""

    sampling: SamplingSettings = field(default_factory=SamplingSettings)
    unknown: UnknownFields = field(default_factory=UnknownFields)
    slots: int = 16


def _penalty(value: float | None) -> float | None:
    if value is not None and 0 < value < LEAST_PENALTY:
        raise FieldError(f"is {value}: send 0, or at least {LEAST_PENALTY}")
    return value


def _biases(given: dict[str, Any] | None) -> tuple[tuple[int, float], ...] | None:
    """Pairs of a token id and its bias."""
    if given and len(given) > MAX_BIASES:
        raise FieldError(f"has {len(given):,} tokens: send at most {MAX_BIASES:,}")
    pairs = []
    for name, value in (given or {}).items():
        if not (name.isascii() and name.isdecimal() and len(name) < 10):
            raise FieldError(f"has the key {name[:80]!r}: send ids of tokens")
        if type(value) not in (int, float) or not -MAX_BIAS <= value <= MAX_BIAS:
            raise FieldError(f"is not a number from {-MAX_BIAS:g} to {MAX_BIAS:g}: send one", f"[{name}]")
        pairs.append((int(name), float(value)))
    return tuple(pairs) or None


# A field for each sampling setting, with its bounds in requests.
SAMPLING_FIELDS: dict[str, Any] = {
    name: (described.kind | None, Field(default=None, ge=described.served[0], le=described.served[1]))
    for name, described in settings_of(SamplingSettings).items()
    if described.served is not None
}
_number, _bounds = SAMPLING_FIELDS["repetition_penalty"]
SAMPLING_FIELDS["repetition_penalty"] = Annotated[_number, AfterValidator(_penalty)], _bounds
SAMPLING_FIELDS["logit_bias"] = Annotated[dict[str, Any] | None, AfterValidator(_biases)], None
if TYPE_CHECKING:
    SamplingFields = ConstraintFields
else:
    SamplingFields = create_model("SamplingFields", __base__=ConstraintFields, **SAMPLING_FIELDS)


class GenerationBody(SamplingFields):
    """The fields that all APIs share besides sampling: most are OpenAI's, mlx_lm.server's and llama-server's."""

    ignored: ClassVar[frozenset[str]] = frozenset(
        {
            *("metadata", "prompt_cache_key", "prompt_cache_retention", "safety_identifier", "service_tier", "store"),
            *("user", "verbosity"),
        }
    )
    model: str | None = None
    stream: bool = False
    stop: Annotated[StopList, OneOrMore] = Field(default_factory=list)
    id_slot: int | None = None
    cache: CacheRequest = AS_SERVED
    adapters: Annotated[Any, unsupported()] = None
    suffix: Annotated[Any, unsupported("")] = None
    top_logprobs: int | None = Field(None, ge=0, le=MAX_TOP_LOGPROBS)

    def request(self, rules: RequestRules, response_format: ConstraintField | None = None) -> CompletionRequest:
        """These fields, as a request without a prompt.

        Args:
            response_format: the constraint of a field that only some APIs have.
        """
        slot = self.id_slot
        if slot is not None and not -1 <= slot < rules.slots:
            wanted = f"send a whole number from 0 to {rules.slots - 1}, or -1 for any"
            raise ApiError(400, f"id_slot is not a slot of this server: {wanted}", "id_slot")
        changes = {name: value for name in SAMPLING_FIELDS if (value := getattr(self, name)) is not None}
        if changes.get("top_k") == -1:  # as some clients write "all"
            changes["top_k"] = 0
        if "seed" in changes:
            changes["seed"] %= 2**64
        constraint = self.constraint_field(response_format)
        return CompletionRequest(
            model=self.model,
            stream=self.stream,
            stop_strings=tuple(self.stop),
            slot=slot,
            cache=self.cache,
            sampling=replace(rules.sampling, **changes) if changes else rules.sampling,
            constraint=constraint.constraint,
            constraint_field=constraint.name,
        )

    def reported_logprobs(self, logprobs: bool) -> int | None:
        """How many likeliest tokens are reported with each token; None reports no log-probabilities.

        Args:
            logprobs: whether they are asked for, besides by `top_logprobs`.
        """
        if self.top_logprobs and not logprobs:
            raise ApiError(400, "top_logprobs is only for logprobs=true: send both, or none", "top_logprobs")
        return (self.top_logprobs or 0) if logprobs else None


def _template_settings(given: dict[str, Any]) -> dict[str, Any]:
    if taken := given.keys() & (NOT_FOR_TEMPLATES | {"tools"}):
        raise FieldError(f"cannot set {min(taken)}: leave it out")
    return given


class ChatFields(GenerationBody):
    """The fields that all APIs of chats share."""

    chat_template_kwargs: Annotated[dict[str, Any], AfterValidator(_template_settings)] = Field(default_factory=dict)
    continue_final_message: bool = False
    enable_thinking: bool | None = None

    def chat_request(
        self,
        rules: RequestRules,
        messages: Messages,
        tools: Sequence[Tool],
        tool_choice: ToolChoice,
        response_format: ConstraintField,
        effort: Effort | None,
    ) -> CompletionRequest:
        """A request with these fields.

        Args:
            tools, tool_choice, response_format, effort: as fields of OpenAI's chats.
        """
        request = self.request(rules, response_format)
        call = tool_choice.constraint(tools)
        if call is not None:
            # A response_format is the form of texts, and a call is none.
            if request.constraint_field not in ("", response_format.name):
                other = request.constraint_field
                raise ApiError(400, f"tool_choice and {other} both constrain the answer: send one", other)
            request.constraint, request.constraint_field = call, "tools"
        if self.continue_final_message and (messages[-1]["role"] != "assistant" or messages[-1].get("tool_calls")):
            needed = "a last message of the assistant without tool calls"
            raise ApiError(400, f"continue_final_message needs {needed}: send one", "continue_final_message")
        thinks = False if effort == "none" and self.enable_thinking is None else self.enable_thinking
        request.messages = messages
        request.tools = [] if tool_choice.kind == "none" else tools
        request.template = self.chat_template_kwargs
        if thinks is not None:
            request.hints["enable_thinking"] = thinks
        if effort not in (None, "none"):
            request.hints["reasoning_effort"] = effort
        request.continues = self.continue_final_message
        return request
