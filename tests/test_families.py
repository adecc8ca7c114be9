"""All of mlx-lm's model families, tiny and random: which there are, and what each can do with our caches."""

from __future__ import annotations

from families import CONFIGURATIONS, HELPERS, model_files


def test_every_model_file_of_mlx_lm_is_a_family_or_known_to_be_none() -> None:
    files = set(model_files())
    assert files - set(CONFIGURATIONS) - set(HELPERS) == set(), "new in mlx-lm: give each a tiny configuration"
    assert (set(CONFIGURATIONS) | set(HELPERS)) - files == set(), "no longer in mlx-lm"
    assert not set(CONFIGURATIONS) & set(HELPERS)
