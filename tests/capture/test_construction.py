import copy

import pytest
import torch
from torch import nn

import memfit
from memfit import _torch


def constructed(make):
    with memfit.without_weights():
        return make()


@pytest.mark.parametrize(
    "make",
    [
        lambda: torch.linspace(0, 0.1, 5).tolist(),
        lambda: torch.diff(torch.tensor([1, 4, 9])).int().tolist(),
        lambda: [(torch.arange(4) * 2.5 + 1)[index].item() for index in range(4)],
        lambda: bool((torch.ones(3) > torch.zeros(3)).all()),
        lambda: torch.zeros(3).add_(2).sum().item(),
        lambda: [each.tolist() for each in torch.unique(torch.tensor([24, 56, 24]), return_counts=True)],
        lambda: len(torch.nonzero(torch.tensor([0, 3, 0, 1]))),
    ],
)
def test_numbers_made_of_constants_are_those_of_the_eager_run(make):
    assert constructed(make) == make()


def test_there_is_no_length_of_values_that_are_drawn():
    with pytest.raises(_torch.DynamicOutputShapeException):
        constructed(lambda: len(torch.unique(torch.randn(3))))


def overwritten():
    values = torch.zeros(3)
    values.normal_()
    return values[0].item()


@pytest.mark.parametrize(
    "make",
    [
        lambda: torch.randn(3)[0].item(),
        lambda: nn.Linear(2, 2).weight.sum().item(),
        lambda: bool((torch.rand(3) > 0.5).any()),
        overwritten,
    ],
)
def test_there_is_no_answer_about_values_that_are_drawn(make):
    with pytest.raises(_torch.DataDependentOutputException):
        constructed(make)


@pytest.mark.parametrize("bounds", [(-2.0, 2.0), (2.0, 2.5)])  # drawn in one way, and in the other
@pytest.mark.filterwarnings("ignore:mean is more than 2 std")
def test_weights_can_be_initialized_though_they_are_drawn_until_they_fit(bounds):
    weight = constructed(lambda: nn.init.trunc_normal_(torch.empty(64, 64), a=bounds[0], b=bounds[1]))
    assert isinstance(weight, _torch.FakeTensor)
    assert weight.shape == (64, 64)


def test_a_model_that_asks_has_the_structure_of_the_real_one():
    make = pytest.importorskip("torchvision").models.regnet_y_400mf
    without, real = constructed(make), make()
    assert str(without) == str(real)
    assert {key: value.shape for key, value in without.state_dict().items()} == {
        key: value.shape for key, value in real.state_dict().items()
    }


def test_a_constructor_may_copy_what_it_has_built():
    model = constructed(lambda: copy.deepcopy(nn.Sequential(nn.Conv2d(3, 4, 1), nn.BatchNorm2d(4))))
    assert isinstance(model[1].num_batches_tracked, _torch.FakeTensor)
    assert memfit.estimate(model, torch.empty(2, 3, 8, 8)).peak_bytes > 0
