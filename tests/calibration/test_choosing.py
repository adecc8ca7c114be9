"""The fewest bytes that a model bears are chosen, by measurements that are looked up where they were made before."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from tiny_models import make_model

from mlx_kv.calibration.storage import CANDIDATES, CodecLoss, by_size, choose_bits, subject_of
from mlx_kv.files.measurement_cache import MeasurementCache
from mlx_kv.files.serialization import model_fingerprint
from mlx_kv.policy import CachePolicy

TEXT = np.random.default_rng(1).integers(2, 90, size=90).tolist()
FOUR, EIGHT = (CachePolicy(bits=bits, group_size=32) for bits in ((4, 4), (8, 8)))
MIXED, TURNED = (CachePolicy(bits=(8, 4), group_size=32, codec=codec) for codec in (None, "rotated"))
LOSSES = {FOUR: 0.25, MIXED: 0.0625, TURNED: 0.03125, EIGHT: -1.0}  # sums of them are exact
ERROR = 0.015625


class Fake:
    """Losses that are made up, and who was asked for."""

    def __init__(self) -> None:
        self.asked: list[CachePolicy] = []

    def __call__(self, policy: CachePolicy) -> tuple[float, float]:
        self.asked.append(policy)
        return LOSSES[policy], ERROR


@pytest.mark.parametrize(
    ("max_loss", "chosen", "tried"),
    [
        (0.25 + ERROR, FOUR, [FOUR]),
        (0.25, MIXED, [FOUR, MIXED]),
        (0.0625 + ERROR, MIXED, [FOUR, MIXED]),
        (0.03125 + ERROR, TURNED, [FOUR, MIXED, TURNED]),
        (0.03125, EIGHT, [FOUR, MIXED, TURNED, EIGHT]),
        (ERROR, EIGHT, [FOUR, MIXED, TURNED, EIGHT]),
        (ERROR / 2, CachePolicy(), [FOUR, MIXED, TURNED, EIGHT]),
        (0.0, CachePolicy(), [FOUR, MIXED, TURNED, EIGHT]),
    ],
)
def test_the_smallest_that_is_borne_is_chosen(max_loss: float, chosen: CachePolicy, tried: list[CachePolicy]) -> None:
    fake = Fake()
    found = choose_bits(make_model("llama"), TEXT, max_loss, candidates=[EIGHT, MIXED, TURNED, FOUR], measure=fake)
    assert (found, fake.asked) == (chosen, tried)


def test_what_does_not_fit_or_saves_nothing_is_not_tried() -> None:
    wide = CachePolicy(bits=4, group_size=64)  # of a head dim of 32
    sizes = by_size(make_model("llama"), [wide, CachePolicy(codec="plain"), EIGHT])
    assert sizes == [(12 * (32 + 8), EIGHT)]
    assert {policy.group_size for _, policy in by_size(make_model("llama"), CANDIDATES)} == {32}
    both = by_size(make_model("llama", head_dim=64), CANDIDATES)
    assert [size for size, _ in both] == sorted(size for size, _ in both)
    assert len(both) == len(CANDIDATES)


def test_without_a_measurement_losses_are_measured() -> None:
    model, candidates = make_model("llama"), [EIGHT, FOUR, TURNED]
    measured = map(CodecLoss(model, TEXT).added, candidates)
    added = {each.policy: max(each.nats, 0) + each.error for each in measured}
    assert len(set(added.values())) == 3
    for max_loss in (0.0, *added.values()):
        borne = [policy for policy in (FOUR, TURNED, EIGHT) if added[policy] <= max_loss]
        assert choose_bits(model, TEXT, max_loss, candidates=candidates) == [*borne, CachePolicy()][0]


def test_what_is_no_loss_or_says_more_is_refused() -> None:
    for wrong in (-0.1, float("nan"), float("inf")):
        with pytest.raises(ValueError, match="give nats a token, 0 or more"):
            choose_bits(make_model("llama"), TEXT, wrong, measure=Fake())
    with pytest.raises(ValueError, match="a candidate sets budget, score"):
        choose_bits(make_model("llama"), TEXT, candidates=[CachePolicy(budget=90, score="tova")], measure=Fake())


def choose(path: Path | None, fake: Fake, seed: int = 0, text: list[int] = TEXT) -> CachePolicy:
    model = make_model("llama", seed)
    return choose_bits(
        model,
        text,
        0.05,
        candidates=LOSSES,
        measure=fake,
        remembered=MeasurementCache(path),
        fingerprint=model_fingerprint(model),
    )


def test_measurements_are_made_once_for_a_model_and_a_text(tmp_path: Path) -> None:
    path, fake = tmp_path / "made" / "numbers.json", Fake()
    for _ in range(2):
        assert choose(path, fake) == TURNED
    assert fake.asked == [FOUR, MIXED, TURNED]
    choose(path, fake, seed=1)
    choose(path, fake, text=TEXT[1:])
    assert len(fake.asked) == 9
    subjects = {
        subject_of(model_fingerprint(make_model("llama", seed)), text)
        for seed, text in ((0, TEXT), (1, TEXT), (0, TEXT[1:]))
    }
    assert set(json.loads(path.read_text())["measured"]) == subjects
    assert [file.name for file in path.parent.iterdir()] == ["numbers.json"]


def test_without_a_path_it_is_the_users_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    for told, folder in (("", tmp_path / ".cache"), ("not/absolute", tmp_path / ".cache"), ("/else", Path("/else"))):
        monkeypatch.setenv("XDG_CACHE_HOME", told)
        assert MeasurementCache().path == folder / "mlx-kv" / "measurements.json"
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "own"))
    choose(None, Fake())
    assert (tmp_path / "own" / "mlx-kv" / "measurements.json").is_file()


@pytest.mark.parametrize(
    "content",
    [
        "a diary",
        "[]",
        '{"format": "another", "measured": {}}',
        '{"format": "mlx-kv measurements 1", "measured": {"it": {"its": ["text"]}}}',
        '{"format": "mlx-kv measurements 1", "measured": {"it": {"its": 0.5}}}',
        '{"format": "mlx-kv measurements 1", "measured": {}, "more": 1}',
    ],
)
def test_a_file_that_is_not_ours_is_left_alone(content: str, tmp_path: Path) -> None:
    path, fake = tmp_path / "numbers.json", Fake()
    path.write_text(content)
    for _ in range(2):
        assert choose(path, fake) == TURNED
    assert len(fake.asked) == 6
    assert path.read_text() == content


def test_a_disk_that_takes_nothing_stops_nobody(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    assert choose(tmp_path / "file" / "numbers.json", Fake()) == TURNED
    assert not MeasurementCache(tmp_path / "numbers.json").remember("it", "its", [0.5, float("nan")])
    assert not (tmp_path / "numbers.json").exists()


def test_the_oldest_subjects_are_forgotten(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mlx_kv.files.measurement_cache.MAX_SUBJECTS", 2)
    remembered = MeasurementCache(tmp_path / "numbers.json")
    for subject in ("a", "b", "c"):
        assert remembered.remember(subject, "its", (1.5, 0.5))
    assert [remembered.numbers(subject, "its") for subject in ("a", "b", "c")] == [None, [1.5, 0.5], [1.5, 0.5]]
