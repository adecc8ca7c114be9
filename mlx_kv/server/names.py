"""The names under which clients may ask for the model.

Decides which there are besides the one that the server was started with. Knows nothing about requests.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from mlx_kv.server.errors import ApiError

ANY = "*"
DEFAULT = "default_model"  # what clients of mlx_lm.server send


class ModelNames:
    """The model's name, and its others.

    Args:
        name: as the server was started with it: a directory or a name on the hub, the last part of which will do, too.
        aliases: names besides; "*" lets all names in.
    """

    def __init__(self, name: str, aliases: Sequence[str] = ()) -> None:
        self.name, self._any = name, ANY in aliases
        path = Path(name)
        there = [str(path.resolve()), path.resolve().name] if path.is_dir() else [name.rstrip("/").rpartition("/")[2]]
        others = [alias for alias in (*aliases, *reversed(there), DEFAULT) if alias and alias != ANY]
        self.all = tuple(dict.fromkeys((name, *others)))

    def __contains__(self, asked: object) -> bool:
        return self._any or asked in self.all

    def check(self, asked: str | None) -> None:
        """Raises ApiError, 404, for the name of another model."""
        if asked is not None and asked not in self:
            raise ApiError(
                404, f"there is no model {asked[:200]!r} here: use {self.name!r}", "model", "model_not_found"
            )
