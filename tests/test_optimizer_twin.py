import random

import pytest
import torch
from torch import nn

from memfit.errors import InvalidInput
from memfit.measure.optimizer import optimizer_memory
from memfit.optimizer_twin import empty_twin, twin_over


class Doubling(torch.optim.SGD):
    """Keeps something beside its groups, which `copy.copy` loses."""

    def __init__(self, parameters, factor):
        super().__init__(parameters, lr=0.1, momentum=0.9)
        self.factor = factor

    def step(self, closure=None):
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.grad.mul_(self.factor)
        return super().step(closure)


@pytest.fixture
def optimizer():
    return Doubling(nn.Linear(4, 3).parameters(), 2.0)


def test_it_is_of_the_same_class_and_settings(optimizer):
    twin = empty_twin(optimizer)
    assert type(twin) is Doubling
    assert twin.factor == 2.0
    assert twin.param_groups == []
    assert not twin.state


def test_the_original_keeps_its_parameters_and_hooks(optimizer):
    calls = []
    optimizer.register_step_post_hook(lambda *_: calls.append("stepped"))
    torch.optim.lr_scheduler.StepLR(optimizer, 1)  # wraps the step of the one it knows
    twin = empty_twin(optimizer)
    parameter = nn.Parameter(torch.ones(2))
    parameter.grad = torch.ones(2)
    twin.add_param_group({"params": [parameter]})
    twin.step()
    assert not calls
    assert torch.allclose(parameter.detach(), torch.full((2,), 0.8))
    assert len(optimizer.param_groups[0]["params"]) == 2
    assert not optimizer.state


def test_a_step_of_the_twin_leaves_the_fields_of_the_original_as_they_are(optimizer):
    optimizer.seen, optimizer.draws = {"steps": 0}, random.Random(0)
    state = optimizer.draws.getstate()
    twin = empty_twin(optimizer)
    twin.seen["steps"] += 1
    twin.draws.random()
    assert optimizer.seen == {"steps": 0}
    assert optimizer.draws.getstate() == state


def test_a_twin_over_others_has_them_wherever_the_original_has_its_own(optimizer):
    optimizer.all, optimizer.first = (
        list(optimizer.param_groups[0]["params"]),
        {"weight": optimizer.param_groups[0]["params"][0]},
    )
    twin = twin_over(optimizer, lambda parameter: nn.Parameter(parameter.detach() + 1))
    others = twin.param_groups[0]["params"]
    assert all(other is not own for other, own in zip(others, optimizer.all, strict=True))
    assert all(one is other for one, other in zip(twin.all, others, strict=True))
    assert twin.first["weight"] is others[0]
    assert optimizer.first["weight"] is optimizer.all[0]


def test_one_that_wraps_another_is_refused(optimizer):
    optimizer.inner = torch.optim.SGD(nn.Linear(2, 2).parameters(), lr=0.1)
    with pytest.raises(InvalidInput, match="wraps another optimizer"):
        empty_twin(optimizer)


def test_the_memory_of_an_optimizer_with_fields_of_its_own_is_known(optimizer):
    parameters = optimizer.param_groups[0]["params"]
    assert optimizer_memory(optimizer, parameters).state_bytes == sum(each.nbytes for each in parameters)
