"""What tells the caches of a server's rows from those of other servers: nothing else may be found in a shared store.

Decides which of its settings count. Knows nothing about stores or requests.
"""

from __future__ import annotations

import mlx.nn as nn

from mlx_kv.files.fingerprint import model_fingerprint
from mlx_kv.generation.engine import Engine
from mlx_kv.generation.speculation.settings import DraftSettings
from mlx_kv.mlxlm.convert import make_prompt_cache
from mlx_kv.policy import CachePolicy
from mlx_kv.prefixes.prefix_cache import draft_mark


def serving_fingerprint(
    model: nn.Module, draft: nn.Module | None, policy: CachePolicy, drafting: DraftSettings, engine: Engine
) -> str:
    """Of a model, a draft model, a policy, and how the engine makes room for drafts."""
    marks = [model_fingerprint(net) for net in (model, draft) if net is not None]
    marks.append(str(policy))
    if draft is not None:
        marks.append(f"draft tokens {drafting.draft_tokens}")
    elif engine.speculation is not None:
        marks += draft_mark(engine.make_caches(), make_prompt_cache(model, policy, strict=False))
    return " ".join(marks)
