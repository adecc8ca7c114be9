"""Drafters by name. Other packages add classes that inherit from `Drafter`."""

from __future__ import annotations

from collections.abc import Callable

from mlx_kv.generation.speculation.drafters.model import ModelDrafter
from mlx_kv.generation.speculation.drafters.ngram import NgramDrafter
from mlx_kv.generation.speculation.drafters.protocol import Drafter as Drafter
from mlx_kv.generation.speculation.drafters.protocol import DrafterContext as DrafterContext
from mlx_kv.generation.speculation.drafters.suffix import SuffixDrafter
from mlx_kv.open_set import OpenSet
from mlx_kv.settings import shown

Factory = Callable[[DrafterContext], Drafter]

# Suffixes beat n-grams nearly everywhere: as many tokens are right, of a third of the drafts.
OURS: dict[str, Factory] = {
    "auto": SuffixDrafter,
    "model": ModelDrafter,
    "ngram": NgramDrafter,
    "suffix": SuffixDrafter,
}

DRAFTERS: OpenSet[Factory] = OpenSet("drafter", "one", OURS)


def drafter_names() -> list[str]:
    """The names that `drafter=` takes."""
    return DRAFTERS.names()


def register_drafter(name: str, factory: Factory) -> None:
    """Registers a drafter under a name, for `drafter=`.

    Args:
        name: replaces a drafter of the same name.
        factory: makes a new `Drafter` of a `DrafterContext`; a class will do.

    Raises:
        ValueError: a factory that cannot be called, or a name that is no text.
    """
    if not isinstance(name, str):
        raise ValueError(f"the name of a drafter is {name!r}: give a text")
    if not callable(factory):
        raise ValueError(f"the drafter {name} is {factory!r}: give a function DrafterContext -> Drafter")
    DRAFTERS.registered[name] = factory


def find_drafter(drafter: str | Factory | Drafter | None, context: DrafterContext) -> Drafter:
    """A drafter for one model: of a name, of a factory, or the one that is given; of None, the draft model.

    Raises:
        ValueError: no drafter has this name, or what the drafter itself refuses.
        TypeError: something else than these, or a factory that makes something else than a drafter.
    """
    if drafter is None:
        if context.draft_model is None:
            raise ValueError("got neither a draft_model nor a drafter: give one of them")
        drafter = "model"
    if isinstance(drafter, str):
        return DRAFTERS.find(drafter)(context)
    found = drafter(context) if callable(drafter) else drafter
    if not all(hasattr(found, name) for name in Drafter.__abstractmethods__):
        what = f"drafter is {shown(found)}" if found is drafter else f"the factory of drafter= has made {shown(found)}"
        raise TypeError(f"{what}: give a name of drafter_names(), a Drafter, or what makes one of a DrafterContext")
    if found is drafter and context.draft_model is not None:
        raise ValueError("got a drafter, which is made already, and a draft_model that it cannot use: give one of them")
    return found
