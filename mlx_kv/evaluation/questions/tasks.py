"""The tasks that put questions to a language model, by their names."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from mlx_kv.evaluation.questions import needles, works
from mlx_kv.evaluation.questions.case import Case, Room, Talk
from mlx_kv.evaluation.questions.texts import Texts

Task = Callable[[np.random.Generator, Talk, Texts, Room], Case]

QUESTIONS: dict[str, Task] = {
    "needle": needles.needle,
    "needles": needles.needles,
    "many_needles": needles.many_needles,
    "tracking": needles.tracking,
    "passages": works.passages,
    "code": works.code,
    "editing": works.editing,
    "chat": works.chat,
}


def case_of(task: str, talk: Talk, texts: Texts, room: Room, seed: int, row: int) -> Case:
    """One of a task's cases, always the same for a seed and a row.

    Raises:
        ValueError: a context that is too short for what is to be found.
    """
    return QUESTIONS[task](np.random.default_rng([seed, row]), talk, texts, room)
