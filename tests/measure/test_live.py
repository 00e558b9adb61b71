import torch

from memfit import _torch
from memfit.measure.cost import OperatorCost
from memfit.measure.live import AnsweredQuestions, LiveBytes


def test_live_bytes_rise_and_fall_with_storages() -> None:
    with _torch.FakeTensorMode(), LiveBytes() as live:
        a = torch.empty(100)
        b = a + 1
        assert live.live_bytes == 800
        view = b[10:]
        del b
        assert live.live_bytes == 800, "a view keeps the storage"
        del view
        assert (live.live_bytes, live.peak_bytes) == (400, 800)
        live.start_anew()
        assert live.peak_bytes == 400


def test_what_operators_allocate_inside_counts_towards_the_peak() -> None:
    with _torch.FakeTensorMode(), LiveBytes(notes_calls=True) as live:
        a = torch.empty(100)
        result = a.sum()
        (call,) = [call for call in live.calls if "sum" in call]
        live.costs = {call: OperatorCost(workspace_bytes=1000, output_bytes=(400,))}
        del result
        live.start_anew()
        result = a.sum()
        assert result.shape == ()
        assert (live.live_bytes, live.peak_bytes) == (800, 1800), "as much as the operator was seen to make"


def test_questions_about_values_are_answered() -> None:
    with _torch.FakeTensorMode(), AnsweredQuestions():
        assert float(torch.zeros(())) == 2
