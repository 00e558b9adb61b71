import pytest
from tiny_case import CASE
from torch import nn

from benchmarks import measuring
from benchmarks.measuring import Subject, interleaved, peak_bytes, persistent_bytes


def test_persistent_is_what_a_step_leaves() -> None:
    subject = Subject.of(CASE)
    parameters_bytes = sum(parameter.nbytes for parameter in subject.model.parameters())
    assert persistent_bytes(subject) == 2 * parameters_bytes + subject.batch.nbytes + 4
    assert subject.model[0].weight.grad is None


def test_the_peak_is_that_of_a_whole_step() -> None:
    subject = Subject.of(CASE)
    kept_bytes = 2 * subject.batch.nbytes  # as big as the batch: the output of tanh, and that of the model
    assert peak_bytes(subject, subject.model) >= persistent_bytes(subject) + kept_bytes - 4
    assert subject.model[0].weight.grad is None


def test_pairs_run_in_both_orders_after_a_warm_up_and_medians_count(monkeypatch: pytest.MonkeyPatch) -> None:
    subject, other = Subject.of(CASE), CASE.make_model()
    order: list[str] = []
    times = {"eager": [9.0, 1.0, 2.0, 4.0], "other": [9.0, 1.5, 2.2, 8.0]}  # the first is the warm-up

    def seconds(_: Subject, model: nn.Module) -> float:
        order.append("eager" if model is subject.model else "other")
        return times[order[-1]].pop(0)

    monkeypatch.setattr(measuring, "_seconds", seconds)
    times = interleaved(subject, other, pairs=3)
    assert (times.eager_s, times.ratio) == (2.0, 1.5)
    assert times.error == pytest.approx(1.25 * 1.48 * 0.4 / 3**0.5)  # deviations of 0.0, 0.4 and 0.5
    assert order == ["eager", "other", "other", "eager", "eager", "other", "other", "eager"]


def test_eager_against_itself_is_one_model_measured_twice() -> None:
    subject = Subject.of(CASE)
    assert interleaved(subject, subject.model, pairs=1).eager_s > 0


def test_pairs_go_on_while_there_is_time(monkeypatch: pytest.MonkeyPatch) -> None:
    subject = Subject.of(CASE)
    steps: list[nn.Module] = []
    monkeypatch.setattr(measuring, "_seconds", lambda _, model: steps.append(model) or 1.0)
    interleaved(subject, subject.model, pairs=2, seconds=0.05)
    assert len(steps) > 2 * (2 + 1)
