import contextlib
import time

import pytest
import torch
from torch import nn

from benchmarks import peers
from benchmarks.frontier_record import AOT_EAGER, CHECKPOINT
from benchmarks.measuring import Subject, peak_bytes, persistent_bytes
from benchmarks.models import Case
from benchmarks.peers import peer_points


def chain() -> nn.Module:
    return nn.Sequential(*(layer for _ in range(8) for layer in (nn.Linear(32, 32), nn.Tanh())))


def tiny() -> Subject:
    case = Case(
        name="tiny",
        batch_size=256,
        make_model=chain,
        make_batch=lambda size: torch.randn(size, 32),
        loss=lambda model, batch: model(batch).square().mean(),
        sample=lambda batch: (batch,),
    )
    return Subject.of(case)


def test_checkpoints_of_every_size_are_measured() -> None:
    subject = tiny()
    eager_bytes = peak_bytes(subject, subject.model)
    points = list(peer_points(CHECKPOINT, subject, quick=False, limit_s=60, pairs_s=0.0))
    assert [point.setting for point in points][:2] == ["8 segments of 1 block", "4 segments of 2 blocks"]
    assert all(point.time_ratio is not None and not point.reason for point in points)
    assert min(point.peak_bytes or 0 for point in points) < eager_bytes


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # torch's own, while it compiles
def test_compiled_budgets_are_measured() -> None:
    subject = tiny()
    first = next(peer_points(AOT_EAGER, subject, quick=True, limit_s=60, pairs_s=0.0))
    assert first.setting == "budget 1.0"
    assert first.reason == ""
    assert first.peak_bytes is not None
    assert first.peak_bytes > persistent_bytes(subject)


def test_a_setting_for_which_the_same_is_compiled_is_not_measured_again() -> None:
    known: dict[frozenset[str], str] = {}
    assert peers.same_graphs("budget 1.0", {"a", "b"}, known) is None
    assert peers.same_graphs("budget 0.9", {"a", "c"}, known) is None
    assert peers.same_graphs("budget 0.8", {"b", "a"}, known) == "budget 1.0"
    assert peers.same_graphs("budget 0.7", set(), known) is peers.same_graphs("budget 0.6", set(), known) is None
    point = peers._measured("peer", "budget 0.8", tiny(), chain, 60, 0.0, lambda: "budget 1.0")
    assert point.reason == "the same graphs as at budget 1.0"
    assert point.time_ratio is None


def test_both_estimators_are_asked_where_something_is_computed_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert peers._compile_settings(quick=False) == [(tenths / 10, "flops") for tenths in range(10, 0, -1)]
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    settings = peers._compile_settings(quick=False)
    assert settings[:3] == [(1.0, "flops"), (0.9, "flops"), (0.9, "profile")]
    assert len(settings) == peers.point_count(quick=False) == 19
    assert peers._compile_settings(quick=True) == [(1.0, "flops"), (0.5, "flops"), (0.2, "flops")]


def test_a_setting_that_takes_too_long_gives_its_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    def sleep(*_: object) -> int:
        with contextlib.suppress(Exception):  # as compilers do
            time.sleep(60)
        return 0

    monkeypatch.setattr("benchmarks.peers.peak_bytes", sleep)
    (point,) = peer_points(CHECKPOINT, tiny(), quick=True, limit_s=1, pairs_s=0.0)
    assert point.reason == "not done after 1 s"
    assert point.peak_bytes is None


def test_a_setting_that_fails_gives_its_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> int:
        raise RuntimeError("no memory\nfor that\nat line 3")

    monkeypatch.setattr("benchmarks.peers.peak_bytes", fail)
    (point,) = peer_points(CHECKPOINT, tiny(), quick=True, limit_s=60, pairs_s=0.0)
    assert point.reason == "RuntimeError: no memory for that"


def test_an_unknown_peer_is_named() -> None:
    with pytest.raises(ValueError, match="no peer is named 'abacus'"):
        peer_points("abacus", tiny(), quick=True, limit_s=60, pairs_s=0.0)
