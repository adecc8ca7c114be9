"""What a worker loads, and the engine that it makes of it for a policy.

Decides with what an engine is made. Knows nothing about jobs, threads or how an engine is stepped.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import mlx.nn as nn

from mlx_kv.communicator import LOCAL, Communicator
from mlx_kv.generation.engine import Engine, make_engine
from mlx_kv.generation.settings import SamplingSettings
from mlx_kv.generation.speculation.settings import DraftSettings
from mlx_kv.generation.two_pass_prefill import Instructions
from mlx_kv.policy import CachePolicy


@dataclass(frozen=True)
class Models:
    """What the worker loads: a model, its tokenizer, and a draft model to speculate with.

    Attributes:
        sampling: how tokens are chosen where a request does not say.
        policy: of the caches, where it was chosen for this model; None is what the worker was told.
    """

    model: nn.Module
    tokenizer: Any
    draft: nn.Module | None = None
    sampling: SamplingSettings = field(default_factory=SamplingSettings)
    policy: CachePolicy | None = None


@dataclass(frozen=True)
class EngineSettings:
    """What the engines of a worker have in common.

    Attributes:
        max_batch_size, prefill_step_size: as in `make_engine`.
        drafting: what is drafted.
        keeps: whether what was read of prompts is kept for others.
        most_wait: as in `make_engine`.
    """

    max_batch_size: int = 8
    prefill_step_size: int | None = None
    drafting: DraftSettings = field(default_factory=DraftSettings)
    keeps: bool = True
    most_wait: float | None = None

    def engine(
        self, models: Models, policy: CachePolicy, instructions: Instructions, communicator: Communicator = LOCAL
    ) -> Engine:
        """An engine for a policy.

        Raises:
            ValueError: what the model or the policy refuses.
        """
        return make_engine(
            models.model,
            set(models.tokenizer.eos_token_ids),
            policy,
            self.max_batch_size,
            self.prefill_step_size,
            models.draft,
            **vars(self.drafting),
            return_caches=self.keeps or policy.budget is not None,  # also to see what was evicted last
            communicator=communicator,
            instructions=instructions,
            most_wait=self.most_wait,
        )
