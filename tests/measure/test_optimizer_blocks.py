"""Optimizers block by block: what the first step leaves is the state, and later steps replace or keep it."""

import pytest
import torch
from torch import nn

from memfit.ir import Graph, Kind, OptimizerBlocks, OptimizerMemory, Program, Storage
from memfit.measure.optimizer import optimizer_memory
from memfit.plan.allocator.requests import Allocate, run_requests
from memfit.plan.step_requests import step_requests

SIZES = ((64, 32), (128,))


def parameters():
    return [nn.Parameter(torch.zeros(size)) for size in SIZES]


def sums(events):
    return sum(size_bytes for _, size_bytes in events)


class Replacing(torch.optim.Optimizer):
    """Keeps an average that is a new tensor at every step."""

    def __init__(self, parameters):
        super().__init__(parameters, {})

    def step(self, closure=None):
        for parameter in self.param_groups[0]["params"]:
            state = self.state[parameter]
            state["average"] = 0.9 * state.get("average", torch.zeros_like(parameter)) + parameter.grad


@pytest.mark.parametrize("optimizer", ["adamw", "sgd", "rmsprop", Replacing])
@pytest.mark.parametrize("for_cuda", [False, True])
def test_the_first_step_makes_the_state_and_later_ones_keep_it(optimizer, for_cuda):
    memory = optimizer_memory(optimizer, parameters(), for_cuda=for_cuda)
    assert memory.blocks is not None
    assert sums(memory.blocks.first_step) == memory.state_bytes > 0
    assert sums(memory.blocks.later_step) == 0


def test_blocks_rise_as_high_as_the_sums_say():
    memory = optimizer_memory("adamw", parameters(), for_cuda=True)
    level = highest = 0
    for _, size_bytes in memory.blocks.later_step:
        level += size_bytes
        highest = max(highest, level)
    assert highest == memory.workspace_bytes


@pytest.mark.slow
def test_state_that_grows_over_steps_has_sums_alone():
    assert optimizer_memory("lbfgs", parameters()).blocks is None


def test_state_that_is_replaced_is_released_where_the_optimizer_lets_it_go():
    blocks = OptimizerBlocks(first_step=((0, 1024),), later_step=((5, 1024), (3, -1024)))
    memory = OptimizerMemory(state_bytes=1024, workspace_bytes=1024, blocks=blocks)
    storage = Storage(name="weight", size_bytes=512, kind=Kind.PARAMETER, shape=(128,), dtype="float32")
    graph = Graph(storages=(storage,), operations=(), resident=(0,), tangents=(), held=())
    requests = step_requests(graph, Program(graph_digest="", forward=(), backward=()), optimizer=memory, steps=4)
    assert [each.size_bytes for each in requests if isinstance(each, Allocate)] == [512, 1024, 1024, 1024, 1024]
    assert run_requests(requests).peak_allocated_bytes == 512 + 2 * 1024
