"""What fails inside memfit reaches its caller as a sentence, with the model as it was."""

import json

import pytest
import torch
from budgeted import ConvNet, assert_untouched, images, state_of
from torch import nn

import memfit
from memfit.capture import alternatives
from memfit.errors import InternalError

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture
def broken(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(alternatives, "chosen", None)  # fails in memfit's own code


def test_an_assertion_inside_becomes_a_sentence_and_the_model_stays_as_it_was(broken: None) -> None:
    model, batch = ConvNet(), images(2)
    before = state_of(model)
    with pytest.raises(InternalError, match=r"planning a step of ConvNet failed inside memfit \(TypeError"):
        memfit.fit(model, batch, 0.8, time_limit=0.2, remember=False, progress=False)
    assert_untouched(model, before)


def test_plan_says_it_as_well(broken: None) -> None:
    with pytest.raises(InternalError, match="bug_report"):
        memfit.plan(ConvNet(), images(2), budget=0.8, time_limit=0.2, progress=False)


class Failing(nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        raise KeyError("a mistake of the model")


def test_a_loss_that_fails_is_told_as_it_is() -> None:
    def loss(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
        raise KeyError("a mistake of the loss")

    with pytest.raises(KeyError, match="a mistake of the loss"):
        memfit.fit(ConvNet(), images(2), 0.8, loss=loss, progress=False)


def test_a_report_has_graph_versions_and_options_but_no_numbers(tmp_path) -> None:
    model = ConvNet()
    error = InternalError("planning failed")
    path = memfit.bug_report(model, images(2), tmp_path / "bug.json", error=error, budget=0.8, allow=("lean",))
    report = json.loads(path.read_text(encoding="utf-8"))
    assert report["versions"]["torch"] == torch.__version__
    assert report["options"] == {"budget": 0.8, "allow": ["lean"]}
    assert report["error"][0]["message"] == "planning failed"
    assert "aten.convolution.default" in {each["target"] for each in report["graph"]["operations"]}
    assert "layers.0.0" in report["modules"]


def test_a_report_of_a_model_that_cannot_be_traced_says_so(tmp_path) -> None:
    report = json.loads(memfit.bug_report(Failing(2, 2), images(2), tmp_path / "bug.json").read_text(encoding="utf-8"))
    assert "a mistake of the model" in report["graph"]["not traced"]


def test_wrong_arguments_are_told_by_python() -> None:
    with pytest.raises(TypeError, match="unexpected keyword argument 'budgets'"):
        memfit.plan(ConvNet(), images(2), budgets=0.8)
    assert memfit.plan(ConvNet(), images(2), 1.0).budget_bytes
