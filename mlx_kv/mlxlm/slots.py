"""Whether a model's attention tells positions by the number of slots that a cache hands it, instead of offsets.

Found by asking the model: in the graph of a few tokens, and where that cannot be looked at, in its source.
"""

from __future__ import annotations

import ast
import inspect
import sys
from collections import Counter
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from mlx_kv.mlxlm.asking import asked_once
from mlx_kv.mlxlm.stand_ins import FAR, stand_ins

# Dead slots, when they are to make a difference: blocks of any size have more than one more then.
MORE_SLOTS = 4097
FETCHES = ("update_and_fetch", "keys_and_values")


@asked_once
def counts_slots(model: nn.Module) -> bool:
    """Whether attention makes anything of the number of slots that it is handed, but arrays of so many.

    Two graphs are compared, of the same tokens at the same positions before ever more dead slots: wherever a model
    places something by slots, the numbers in them differ.
    """
    try:
        fewer, more = (_numbers(model, extra) for extra in (0, MORE_SLOTS))
    except Exception:
        return _reads_shapes(model)
    return fewer != more


def _numbers(model: nn.Module, extra: int) -> Counter[str]:
    """The numbers in the graph of two tokens: single constants, and what ranges begin, end and step with."""
    found: Counter[str] = Counter()

    def look(part: dict[str, Any]) -> None:
        if part["type"] == "constants":
            found.update(repr(array.item()) for _, array in part["constants"] if array.size == 1)
        elif part.get("name") == "Arange":
            found[repr(part["arguments"])] += 1

    caches = stand_ins(model, FAR, extra=extra)
    with mx.stream(mx.cpu):  # there are no kernels that a graph cannot show
        mx.export_function(look, lambda tokens: model(tokens, cache=caches), mx.zeros((1, 2), mx.int32))
    return found


def _reads_shapes(model: nn.Module) -> bool:
    """Whether the model's source reads the shape of anything that a cache returned.

    For graphs that cannot be looked at: some primitives have no words for themselves. It is a coarser question: most
    who read a shape do nothing wrong.
    """
    files = {type(module).__module__ for module in model.modules()}  # type: ignore[no-untyped-call]
    for name in sorted(file for file in files if not file.startswith("mlx.")):
        try:
            tree = ast.parse(inspect.getsource(sys.modules[name]))
        except (OSError, KeyError, TypeError, SyntaxError):
            return True
        fetched = {
            part.id
            for node in ast.walk(tree)
            if isinstance(node, ast.Assign)
            and any(getattr(call, "attr", "") in FETCHES for call in ast.walk(node.value))
            for target in node.targets
            for part in ast.walk(target)
            if isinstance(part, ast.Name)
        }
        shapes = (node.value for node in ast.walk(tree) if isinstance(node, ast.Attribute) and node.attr == "shape")
        if any(isinstance(of, ast.Name) and of.id in fetched for of in shapes):
            return True
    return False
