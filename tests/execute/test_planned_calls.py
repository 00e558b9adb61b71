"""A model that runs a program is still a model: everything around a call works as in eager."""

import copy

import pytest
import torch
from programs import forget_everything, keep_nothing, lazy_program, planned
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from twins import MODELS, ConvNet, assert_same, train_step

from memfit.ir import Compute


@pytest.fixture
def pair():
    """An eager model, a twin that runs a program, and a batch."""
    eager, batch = ConvNet(), torch.randn(4, 3, 8, 8)
    return eager, planned(eager, batch, forget_everything), batch


def gradients(model):
    return [parameter.grad for parameter in model.parameters()]


def test_a_retained_graph_can_be_differentiated_again(pair):
    ends = []
    for model in pair[:2]:
        torch.manual_seed(0)
        loss = model(pair[2]).square().mean()
        loss.backward(retain_graph=True)
        torch.rand(5)
        loss.backward()
        ends.append([*gradients(model), *model.buffers(), torch.get_rng_state()])
    assert_same(*ends)


def test_overwriting_what_crossed_spares_a_retained_graph():
    eager = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))
    batch = torch.randn(3, 4)

    def planner(graph):
        """Keep what the first linear layer makes; its activation is computed again, over it."""
        tanh = next(place for place, operation in enumerate(graph.operations) if operation.name == "tanh")
        program = lazy_program(graph, {graph.operations[tanh].may_overwrite})
        assert Compute(tanh, False) in program.forward
        assert Compute(tanh, True) in program.backward
        return program

    captured = planned(eager, batch, planner)
    ends = []
    for model in (eager, captured):
        loss = model(batch).square().mean()
        for retain in (True, True, False):
            loss.backward(retain_graph=retain)
        ends.append(gradients(model))
    assert_same(*ends)


def test_a_second_backward_without_a_retained_graph_is_refused(pair):
    loss = pair[1](pair[2]).sum()
    loss.backward()
    with pytest.raises(RuntimeError, match="second time"):
        loss.backward()


def test_several_calls_wait_for_their_backward(pair):
    ends = []
    for model in pair[:2]:
        torch.manual_seed(0)
        losses = [model(pair[2] * factor).square().mean() for factor in (1, 2)]
        for loss in losses:
            loss.backward()
        ends.append([*gradients(model), *model.buffers(), torch.get_rng_state()])
    assert_same(*ends)


def test_hooks_see_what_they_see_in_eager(pair):
    seen = []
    for model in pair[:2]:
        values = []
        model.register_forward_hook(lambda _, args, output, values=values: values.append(output.detach().clone()))
        model.conv1.weight.register_hook(values.append)
        model.conv1.weight.register_post_accumulate_grad_hook(
            lambda weight, values=values: values.append(weight.grad.clone())
        )
        train_step(model, pair[2])
        seen.append(values)
    assert len(seen[0]) == 3
    assert_same(*seen)


def test_a_deep_copy_runs_the_same_way(pair):
    eager, captured, batch = pair
    twin = copy.deepcopy(captured)
    assert_same(train_step(eager, batch), train_step(twin, batch))
    assert all(gradient is None for gradient in gradients(captured))


def test_evaluation_and_no_grad_run_the_own_forward(pair):
    eager, captured, batch = pair
    with torch.no_grad():
        torch.manual_seed(0)
        expected = eager(batch)
        torch.manual_seed(0)
        assert torch.equal(captured(batch), expected)
    assert torch.equal(captured.eval()(batch), eager.eval()(batch))


def test_distributed_data_parallel_wraps_a_planned_model(pair, tmp_path):
    eager, captured, batch = pair
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        wrapped = DistributedDataParallel(captured)
        for seed in (0, 1):
            assert_same(train_step(eager, batch, seed), train_step(wrapped, batch, seed))
    finally:
        torch.distributed.destroy_process_group()


def test_an_error_inside_a_planned_forward_leaves_the_model_as_it_was():
    make_model, make_batch = MODELS["tied language model"]
    eager, batch = make_model(), make_batch()
    captured = planned(eager, batch, keep_nothing)
    with pytest.raises(IndexError):
        captured(torch.full_like(batch, 99))
    assert_same(train_step(eager, batch), train_step(captured, batch))


def test_an_error_inside_a_planned_backward_leaves_the_generator_where_it_was(pair):
    _, captured, batch = pair
    loss = captured(batch).square().mean()
    before = torch.get_rng_state()

    def fail(gradient):
        raise ValueError("a hook of the user's")

    handle = captured.head.weight.register_hook(fail)
    with pytest.raises(ValueError, match="a hook of the user's"):
        loss.backward()
    handle.remove()
    assert torch.equal(torch.get_rng_state(), before)
