import pytest
import torch
from torch import nn

from memfit.measure.optimizer import optimizer_memory
from memfit.optimizer_twin import empty_twin


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


def test_the_memory_of_an_optimizer_with_fields_of_its_own_is_known(optimizer):
    parameters = optimizer.param_groups[0]["params"]
    assert optimizer_memory(optimizer, parameters).state_bytes == sum(each.nbytes for each in parameters)
