"""Models that no step can be taken of, or hardly one: eager's result, or one sentence."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from budgeted import assert_untouched, state_of
from torch import nn
from torch.utils import _pytree as pytree

import memfit

pytestmark = [pytest.mark.usefixtures("one_thread"), pytest.mark.filterwarnings("ignore")]

OPTIONS: dict[str, Any] = {"time_limit": 0.1, "progress": False}


class Model(nn.Module):
    """Does with a layer what it is told to."""

    def __init__(self, does: Callable[[nn.Module, torch.Tensor], Any], layer: nn.Module | None = None) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4) if layer is None else layer
        self.does = does

    def forward(self, x: torch.Tensor) -> Any:
        return self.does(self.layer, x)


class Empty(nn.Module):
    """Adds up, and has a parameter of no size."""

    def __init__(self) -> None:
        super().__init__()
        self.nothing = nn.Parameter(torch.ones(0))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.sum() + self.nothing.sum()


def rows(count: int = 3, value: float = 1.0) -> torch.Tensor:
    return torch.randn(count, 4) * value


NOTHING = "requires a gradient"
REFUSED: dict[str, tuple[Model, torch.Tensor, str]] = {
    "no parameters": (Model(lambda _, x: x * 2, nn.Identity()), rows(), NOTHING),
    "all frozen": (Model(lambda f, x: f(x), nn.Linear(4, 4).requires_grad_(False)), rows(), NOTHING),
    "output that is the input": (Model(lambda _, x: x), rows(), NOTHING),
    "detached": (Model(lambda f, x: f(x).detach()), rows(), NOTHING),
    "nothing returned": (Model(lambda f, x: None), rows(), NOTHING),
    "no tensors": (Model(lambda f, x: {"a": "b", "c": 3.5}), rows(), NOTHING),
    "numbers": (Model(lambda f, x: float(f(x).mean())), rows(), NOTHING),
    "integers": (Model(lambda f, x: f(x).argmax(-1)), rows(), NOTHING),
    "sparse": (Model(lambda f, x: f(x).to_sparse()), rows(), "sparse"),
    "generator": (Model(lambda f, x: (each for each in [f(x)])), rows(), "generator"),
}
TRAINED: dict[str, tuple[Model, torch.Tensor]] = {
    "input that gets a gradient": (Model(lambda _, x: x * 2, nn.Identity()), rows().requires_grad_()),
    "output that is an input with a gradient": (Model(lambda _, x: x), rows().requires_grad_()),
    "output that is an input beside another": (Model(lambda f, x: (x, f(x))), rows()),
    "output that is a parameter": (Model(lambda f, x: f.weight), rows()),
    "parameters that are not used": (Model(lambda _, x: torch.ones(2, requires_grad=True) * x.sum()), rows()),
    "NaN from the start": (Model(lambda f, x: f(x).mean()), rows(value=float("nan"))),
    "infinite": (Model(lambda f, x: (f(x) * 1e30 * 1e30).mean()), rows()),
    "no rows": (Model(lambda f, x: f(x)), rows(0)),
    "mean of no rows": (Model(lambda f, x: f(x).mean()), rows(0)),
    "norm of no rows": (Model(lambda f, x: f(x), nn.BatchNorm1d(4)), rows(0)),
    "integers beside a loss": (Model(lambda f, x: (f(x).mean(), f(x).argmax(-1))), rows()),
    "parameters of no size": (Model(lambda f, x: f(x).sum(), Empty()), rows()),
}


def step(model: nn.Module, x: torch.Tensor) -> list[torch.Tensor | None]:
    """What a step returns, and its gradients; not finite numbers as zero, so that they can be compared."""
    torch.manual_seed(0)
    x.grad = None
    returned = [each for each in pytree.tree_leaves(model(x)) if isinstance(each, torch.Tensor)]
    sum(each.sum() for each in returned if each.requires_grad).backward()
    found = [*returned, x.grad, *(each.grad for each in model.parameters())]
    return [None if each is None else each.detach().clone() for each in found]


@pytest.mark.parametrize("name", REFUSED)
def test_one_sentence_and_the_model_as_it_was(name: str) -> None:
    model, x, why = REFUSED[name]
    before = state_of(model)
    for verb in (memfit.plan, memfit.fit):
        with pytest.raises(memfit.MemfitError, match=why) as raised:
            verb(model, x, budget="smallest", **OPTIONS)
        assert not isinstance(raised.value, memfit.InternalError)
        assert_untouched(model, before)


@pytest.mark.parametrize("name", TRAINED)
def test_results_of_the_eager_step(name: str) -> None:
    model, x = TRAINED[name]
    expected = step(model, x)
    model.zero_grad()
    memfit.plan(model, x, budget="smallest", **OPTIONS)
    found = step(memfit.fit(model, x, "smallest", remember=False, **OPTIONS), x)
    memfit.remove(model)
    assert len(found) == len(expected)
    for one, other in zip(found, expected, strict=True):
        assert (one is None) == (other is None)
        assert one is None or torch.equal(one.nan_to_num(7), other.nan_to_num(7))


def test_an_error_of_the_models_own_is_told_as_it_is() -> None:
    model = Model(lambda f, x: f(x), nn.Linear(5, 4))
    with pytest.raises((RuntimeError, memfit.CaptureError), match="shape") as raised:
        memfit.fit(model, rows(), "smallest", **OPTIONS)
    assert not isinstance(raised.value, memfit.InternalError)
