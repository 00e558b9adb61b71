"""Values that are the same in every step are known; all others fail the capture with a place and a reason."""

import copy
from typing import Any

import pytest
import torch
from capturing import assert_computes_what_eager_computes, captured
from torch import nn
from torch.utils.checkpoint import checkpoint

import memfit
from memfit.errors import CaptureError


class Asking(nn.Module):
    """Goes left or right by the answer to a question about a tensor."""

    def __init__(self, question: Any) -> None:
        super().__init__()
        self.left, self.right = nn.Linear(4, 4), nn.Linear(4, 4)
        self.register_buffer("flag", torch.ones(()))
        self.question = question

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.question(self, x):
            return self.left(x)
        return self.right(x)


def zeros_then(change: Any) -> Any:
    def question(model: Asking, x: torch.Tensor) -> torch.Tensor:
        zeros = torch.zeros(4)
        change(zeros, x)
        return zeros.sum() > 0

    return question


KNOWN = {
    "a range": lambda m, x: torch.arange(4).sum() == 6,
    "a range that says no": lambda m, x: torch.arange(4).sum() == 7,
    "a literal": lambda m, x: torch.tensor(1.0) > 0,
    "an item": lambda m, x: torch.full((2,), 3).sum().item() == 6,
    "the shape of the batch": lambda m, x: torch.arange(x.shape[0]).max() == 1,
    "overwritten with the known": zeros_then(lambda zeros, x: zeros.add_(1)),
    "a part overwritten with the known": zeros_then(lambda zeros, x: zeros[1:].fill_(2)),
    "a draw below 0": lambda m, x: torch.rand([]) < 0.0,
    "draws from 0 on": lambda m, x: (torch.rand_like(x) >= 0).all(),
    "draws below 1": lambda m, x: (torch.rand(x.shape).view(-1) < 1).any(),
    "a draw over 1": lambda m, x: torch.rand(()) > 1.5,
    "ones like the batch": lambda m, x: (torch.ones(x.shape).cumsum(0) == 2).any(),
}


@pytest.mark.parametrize("question", KNOWN.values(), ids=KNOWN)
def test_a_question_about_a_known_value_is_answered(question: Any) -> None:
    assert_computes_what_eager_computes(Asking(question), torch.randn(2, 4))


UNKNOWN = {
    "the batch and a parameter": lambda m, x: (x.sum() * m.left.weight.sum()) > 0,
    "a parameter": lambda m, x: m.left.weight.sum() > 0,
    "a buffer": lambda m, x: m.flag > 0,
    "a draw above 0": lambda m, x: torch.rand(()) > 0,
    "a draw that was changed": lambda m, x: torch.rand(()).sub_(0.5) < 0.0,
    "a draw that may be rounded to 1": lambda m, x: torch.rand((), dtype=torch.bfloat16) < 1,
    "a draw from a normal distribution": lambda m, x: torch.randn(()) < 0.0,
    "a random number": lambda m, x: torch.rand(()) > 0.5,
    "randomly overwritten": zeros_then(lambda zeros, x: zeros.bernoulli_(0.5)),
    "overwritten with the batch": zeros_then(lambda zeros, x: zeros.copy_(x[0])),
    "a view overwritten with the batch": zeros_then(lambda zeros, x: zeros[1:].add_(x[0, 1:])),
    "one element overwritten with the batch": zeros_then(lambda zeros, x: zeros.__setitem__(0, x[0, 0])),
    "overwritten by way of .data": zeros_then(lambda zeros, x: zeros.data.copy_(x[0])),
    "written to as out=": zeros_then(lambda zeros, x: torch.add(x[0], 1, out=zeros)),
    "overwritten in a list": zeros_then(lambda zeros, x: torch._foreach_add_([zeros], [x[0]])),
}


@pytest.mark.parametrize("question", UNKNOWN.values(), ids=UNKNOWN)
def test_a_question_about_any_other_value_fails_the_capture(question: Any) -> None:
    with pytest.raises(CaptureError, match="depends on the batch or on the weights"):
        captured(Asking(question), torch.randn(2, 4))


class LeavesOutAtRandom(nn.Module):
    """A layer as transformers has them: `layerdrop` is 0 by default, and a number is drawn all the same."""

    def __init__(self, layerdrop: float) -> None:
        super().__init__()
        self.layerdrop = layerdrop
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            dropout_probability = torch.rand([])
            if dropout_probability < self.layerdrop:
                continue
            x = nn.functional.dropout(layer(x), 0.5)
        return x


def test_layers_that_are_never_left_out_are_captured_and_draw_what_eager_draws() -> None:
    assert_computes_what_eager_computes(LeavesOutAtRandom(0.0), torch.randn(2, 4))
    model, x = LeavesOutAtRandom(0.0), torch.randn(2, 4)
    states = []
    for step in (model, memfit.fit(copy.deepcopy(model), x, remember=False)):
        torch.manual_seed(3)
        step(x).sum().backward()
        states.append(torch.get_rng_state())
    assert torch.equal(*states)


def test_layers_that_may_be_left_out_are_not_captured() -> None:
    with pytest.raises(CaptureError, match="depends on the batch or on the weights"):
        captured(LeavesOutAtRandom(0.1), torch.randn(2, 4))


def bucket(distance: torch.Tensor, size: int) -> torch.Tensor:
    middle = size // 2
    is_near = (distance < middle) & (distance > -middle)
    return torch.where(is_near, torch.tensor(middle - 1).type_as(distance), torch.abs(distance))


@pytest.mark.filterwarnings("ignore:.*torch.jit.script.*is deprecated")
def test_a_function_that_torch_jit_script_compiled_runs_in_a_trace() -> None:
    compiled = torch.jit.script(bucket)

    class Bucketed(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x) * compiled(torch.arange(4) - x.shape[0], 6)

    assert_computes_what_eager_computes(Bucketed(4, 4), torch.randn(2, 4))
    assert isinstance(compiled, torch.jit.ScriptFunction)
    assert compiled(torch.arange(4), 6).tolist() == [2, 2, 2, 3]


def test_a_known_value_may_be_asked_as_a_list() -> None:
    model = Asking(lambda m, x: torch.arange(2).tolist() == [0, 1])
    assert_computes_what_eager_computes(model, torch.randn(2, 4))


def test_a_known_value_that_is_too_big_is_not_computed() -> None:
    with pytest.raises(CaptureError):
        captured(Asking(lambda m, x: torch.zeros(2**20 + 1).sum() == 0), torch.randn(2, 4))


class Checkpointed(nn.Module):
    """A layer in a checkpoint: eager runs it in the forward pass, and again in the backward pass."""

    def __init__(self, layer: nn.Module, *, keeps_state: bool = True) -> None:
        super().__init__()
        self.before, self.layer, self.keeps_state = nn.Linear(8, 8), layer, keeps_state

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return checkpoint(self.layer, self.before(x), use_reentrant=False, preserve_rng_state=self.keeps_state)


@pytest.mark.parametrize(
    ("norm", "batch"),
    [(nn.BatchNorm1d(8), torch.randn(4, 8)), (nn.InstanceNorm1d(4, track_running_stats=True), torch.randn(2, 4, 8))],
)
def test_a_checkpoint_that_writes_into_a_buffer_is_refused(norm: nn.Module, batch: torch.Tensor) -> None:
    """An instance norm writes into a view of it."""
    with pytest.raises(CaptureError, match="a checkpoint writes into a buffer"):
        captured(Checkpointed(norm), batch)
    memfit.estimate(Checkpointed(norm), batch)  # which runs nothing


class Inside(nn.Module):
    """A checkpoint that keeps the generator's state around one that does not."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = Checkpointed(nn.Dropout(), keeps_state=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return checkpoint(self.inner, x, use_reentrant=False)


@pytest.mark.parametrize("model", [Checkpointed(nn.Dropout(), keeps_state=False), Inside()])
def test_a_checkpoint_that_draws_other_numbers_in_the_backward_pass_is_refused(model: nn.Module) -> None:
    with pytest.raises(CaptureError, match="draws other numbers in its backward pass"):
        captured(model, torch.randn(4, 8))


def test_a_checkpoint_that_does_not_keep_the_generator_is_captured_where_nothing_draws() -> None:
    model = Checkpointed(nn.GELU(), keeps_state=False)
    assert_computes_what_eager_computes(model, torch.randn(4, 8))
