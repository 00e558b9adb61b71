"""What eager takes and releases, and when, is seen without memory: in variables, in formulas, in writes in place."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

import memfit
from memfit.capture.eager_step import eager_step
from memfit.capture.sample import Sample
from memfit.measure.peak import measure_peak

ROWS, WIDTH = 512, 64


class Model(nn.Module):
    def __init__(self, function: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.inner, self.function = nn.Linear(WIDTH, WIDTH), function

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.function(self.inner(x))


def held_by_a_variable(x: torch.Tensor) -> torch.Tensor:
    first = x + 1
    second = first + 1
    return second + torch.cat([second, second]).sum()


def written_slices(x: torch.Tensor) -> torch.Tensor:
    x = x * 2
    x[:, ::2] *= 0.9
    x[0] = x[1].clone()
    return x.tanh()


def unrolled(x: torch.Tensor) -> torch.Tensor:
    written = torch.zeros_like(x)
    state = x[:, 0]
    for step in range(8):
        state = 0.7 * state + x[:, step]
        written[:, step] = state
    return written


class Labelled(torch.autograd.Function):
    """Puts a name of its own on the node that autograd makes of it, over what tells that node's name."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        positive = x > 0
        ctx.name = "labelled"
        ctx.save_for_backward(x, positive)
        ctx.mark_non_differentiable(positive)
        return x * 2, positive

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor, none: torch.Tensor) -> torch.Tensor:
        x, positive = ctx.saved_tensors
        return gradient * x + gradient * positive


def labelled(x: torch.Tensor) -> torch.Tensor:
    doubled, positive = Labelled.apply(x)
    return doubled * positive


FUNCTIONS = {
    "products so far": lambda x: (x.sigmoid() + 0.5).cumprod(-1) * x,
    "products": lambda x: x * (1 + 0.1 * x.tanh()).prod(-1, keepdim=True),
    "products without their axis": lambda x: x * torch.prod(1 + 0.1 * x.tanh(), dim=1)[:, None],
    "one product": lambda x: x * (1 + 0.001 * x.tanh()).prod(),
    "products along another axis": lambda x: torch.cumprod(x.sigmoid() + 0.5, dim=0) * x,
    "a name on a node": labelled,
    "held by a variable": held_by_a_variable,
    "released inside a formula": lambda x: x.logcumsumexp(1),
    "norm": lambda x: x.norm(3, dim=1),
    "sort": lambda x: x.sort(1).values * x,
    "distances": lambda x: torch.cdist(x, x[:8]),
    "gathered": lambda x: x.gather(1, torch.zeros(ROWS, 8, dtype=torch.long)) * x[:, :8],
    "slices that are written": written_slices,
    "parts that are written": unrolled,
    "a checkpoint": lambda x: checkpoint(lambda y: y.sin().exp().sin(), x, use_reentrant=False),
    "gradients that are added up": lambda x: x.exp() + x.sin() + x.cos(),
    "logits": lambda x: F.binary_cross_entropy_with_logits(x, torch.full_like(x, 0.3), pos_weight=x.detach().exp()),
    "attention by hand": lambda x: (x @ x.t()).div(8).softmax(-1) @ x,
}


def mean_square(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
    return model(batch).square().mean()


@pytest.mark.parametrize("function", FUNCTIONS.values(), ids=FUNCTIONS)
def test_the_estimate_is_the_measured_peak(function: Callable[[torch.Tensor], torch.Tensor]) -> None:
    model, batch = Model(function), torch.randn(ROWS, WIDTH)

    def step() -> None:
        model.zero_grad(set_to_none=True)
        mean_square(model, batch).backward()

    step()
    model.zero_grad(set_to_none=True)
    measured = measure_peak(step, resident=[model, batch]).peak_bytes
    assert memfit.estimate(model, batch, loss=mean_square, progress=False).peak_bytes == pytest.approx(
        measured, rel=0.01
    )


def test_nothing_is_left_behind() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4, momentum=None), nn.Dropout(0.5))
    before = {name: each.clone() for name, each in model.state_dict().items()}
    parameters, generator = list(model.parameters()), torch.get_rng_state()
    found = eager_step(model, Sample((torch.ones(8, 4),)))  # the norm asks for the number of batches it has seen
    assert found is not None
    assert all(map(torch.equal, before.values(), model.state_dict().values()))
    assert all(one is other for one, other in zip(parameters, model.parameters(), strict=True))
    assert all(each.grad is None for each in parameters)
    assert torch.equal(generator, torch.get_rng_state())


def test_a_name_that_a_function_puts_on_its_node_is_not_called() -> None:
    assert eager_step(Model(labelled), Sample.of(torch.randn(ROWS, WIDTH))) is not None


def test_a_forward_that_asks_for_values_is_left_to_others() -> None:
    assert eager_step(Model(lambda x: x if x.mean() > 0 else -x), Sample((torch.randn(4, WIDTH),))) is None


def test_what_a_step_makes_belongs_to_modules() -> None:
    graph, program = eager_step(Model(torch.tanh), Sample((torch.randn(4, WIDTH),))) or (None, None)
    assert graph is not None
    assert {each.module for each in graph.operations if each.target.startswith("aten.addmm")} == {"inner"}
    gradients = {graph.storages[parameter].name: graph.storages[index].module for parameter, index in graph.trained}
    assert gradients == {"inner.weight": "inner", "inner.bias": "inner"}
    assert program is not None
    assert program.backward
