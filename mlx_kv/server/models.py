"""The models of a worker: what it loads, the engines it makes of them, their names and fingerprint, idle unloading."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import mlx.nn as nn

from mlx_kv.communicator import LOCAL, Communicator
from mlx_kv.files.serialization import model_fingerprint
from mlx_kv.generation.engine import Engine, EngineSettings, make_engine
from mlx_kv.generation.prefill import Instructions
from mlx_kv.generation.settings import SamplingSettings
from mlx_kv.generation.speculation import DraftSettings
from mlx_kv.mlxlm.convert import make_prompt_cache
from mlx_kv.policy import CachePolicy
from mlx_kv.prefixes.reader import draft_mark
from mlx_kv.prefixes.store import PromptStore
from mlx_kv.server.json_http import ApiError

ANY = "*"
LATEST = ":latest"  # the tag that clients of Ollama add to names without one
DEFAULT = "default_model"  # the name that clients of mlx_lm.server send
log = logging.getLogger("mlx_kv.server")


@dataclass(frozen=True)
class Models:
    """A model, its tokenizer, and a draft model.

    Attributes:
        sampling: defaults for requests.
        policy: cache policy chosen for this model; None is that of the settings.
    """

    model: nn.Module
    tokenizer: Any
    draft: nn.Module | None = None
    sampling: SamplingSettings = field(default_factory=SamplingSettings)
    policy: CachePolicy | None = None


OpenStore = Callable[[Models], PromptStore]


@dataclass(frozen=True)
class WorkerSettings:
    """Settings of a worker.

    Attributes:
        policy: of the caches.
        max_batch_size, prefill_step_size: as in `EngineSettings`.
        max_wait: seconds that rows wait for their next token while prompts are read, as in `EngineSettings`.
        drafting: of speculative decoding.
        prompt_memory_bytes: of cached prefixes in memory; 0 keeps none.
        open_store: opens the prompt store; None is without one.
        memory_limit: bytes of weights, rows and cached prefixes; "device" is what the device has, None is no limit.
    """

    policy: CachePolicy = field(default_factory=CachePolicy)
    max_batch_size: int = 8
    prefill_step_size: int | None = None
    max_wait: float | None = None
    drafting: DraftSettings = field(default_factory=DraftSettings)
    prompt_memory_bytes: int = 2**30
    open_store: OpenStore | None = None
    memory_limit: int | Literal["device"] | None = None

    @property
    def keeps_prompts(self) -> bool:
        """Whether prefixes are cached for later requests."""
        return self.open_store is not None or self.prompt_memory_bytes > 0

    def engine(
        self, models: Models, policy: CachePolicy, instructions: Instructions, communicator: Communicator = LOCAL
    ) -> Engine:
        """An engine for a policy.

        Raises:
            ValueError: the model does not support the policy.
        """
        settings = EngineSettings(
            self.max_batch_size,
            self.prefill_step_size,
            self.drafting,
            models.draft,
            return_caches=self.keeps_prompts or policy.budget is not None,  # also to count the last evictions
            instructions=instructions,
            max_wait=self.max_wait,
        )
        return make_engine(models.model, set(models.tokenizer.eos_token_ids), policy, settings, communicator)

    def fingerprint(self, models: Models, policy: CachePolicy, engine: Engine) -> str:
        """Identifies the caches of a model, draft model, policy, and of how the engine makes room for drafts.

        Entries of a shared store are found under the same fingerprint only.
        """
        marks = [model_fingerprint(net) for net in (models.model, models.draft) if net is not None]
        marks.append(str(policy))
        if models.draft is not None:
            marks.append(f"draft tokens {self.drafting.draft_tokens}")
        elif engine.speculation is not None:
            marks += draft_mark(engine.make_caches(), make_prompt_cache(models.model, policy, strict=False))
        return " ".join(marks)


class ModelNames:
    """Names by which requests may refer to the model.

    Args:
        name: of the server's command line: a directory or a name on the hub, of which the last part is a name, too.
        aliases: more names; "*" allows any.
    """

    def __init__(self, name: str, aliases: Sequence[str] = ()) -> None:
        self.name, self._any = name, ANY in aliases
        path = Path(name)
        short = [str(path.resolve()), path.resolve().name] if path.is_dir() else [name.rstrip("/").rpartition("/")[2]]
        others = [alias for alias in (*aliases, *reversed(short), DEFAULT) if alias and alias != ANY]
        self.all = tuple(dict.fromkeys((name, *others)))

    def __contains__(self, name: object) -> bool:
        return self._any or (isinstance(name, str) and name.removesuffix(LATEST) in self.all)

    def check(self, name: str | None) -> None:
        """Raises ApiError, 404, for the name of another model."""
        if name is not None and name not in self:
            raise ApiError(404, f"there is no model {name[:200]!r} here: use {self.name!r}", "model", "model_not_found")


class IdleUnload:
    """Frees weights after some time without requests; the next request loads them again.

    Args:
        seconds: without a request; None keeps the weights.
        unload: frees them.
        lazy: whether weights are freed at the start, too.
        clock: returns seconds.
    """

    def __init__(
        self,
        seconds: float | None = None,
        unload: Callable[[Models], None] = lambda models: None,
        lazy: bool = False,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._seconds, self._unload, self._lazy, self._clock = seconds, unload, lazy, clock
        self._idle_since: float | None = None  # None while there are requests
        self._unloaded = True  # before the first request there is nothing to free, or it will be needed soon

    def begin(self, models: Models) -> None:
        """Called when the worker is ready for the first request."""
        if self._lazy:
            self._unload(models)

    def seconds_left(self) -> float | None:
        """Seconds until weights are freed; None while nothing is scheduled."""
        if self._seconds is None or self._unloaded or self._idle_since is None:
            return None
        return max(0.0, self._idle_since + self._seconds - self._clock())

    def update(self, idle: bool, models: Models) -> bool:
        """Frees weights if it is time; returns whether it did.

        Args:
            idle: whether there are no requests.
        """
        if not idle:
            self._idle_since, self._unloaded = None, False
            return False
        if self._idle_since is None:
            self._idle_since = self._clock()
        if self.seconds_left() != 0.0:
            return False
        self._unloaded = True
        try:
            self._unload(models)
        except Exception:
            log.exception("the weights could not be unloaded, and stay in memory")
            return False
        log.info("no requests for %g s: the weights are unloaded", self._seconds)
        return True
