import pytest
import torch
from captured_step import captured
from torch import nn
from twins import MODELS, assert_same

from memfit.execute import timed_step
from memfit.execute.timed_step import TimedStep


@pytest.mark.parametrize("other_forms", [False, True])
@pytest.mark.parametrize("name", MODELS)
def test_timed_steps_compute_what_the_eager_run_computes(name, other_forms, monkeypatch):
    make_model, make_batch = MODELS[name]
    model, batch = make_model(), make_batch()
    joint, *rest = captured(model, batch, ("lean",))
    step = TimedStep(joint.graph_module, *rest)
    seen = []
    run = timed_step._run
    monkeypatch.setattr(timed_step, "_run", lambda call, values, mark: seen.append(values) or run(call, values, mark))
    with step.running():
        torch.manual_seed(5)
        step.run(other_forms=other_forms)
    torch.manual_seed(5)
    output = model(batch)
    output.backward(timed_step._made_up(output.detach()))
    gradients = sums_by_parameter(joint, model, seen[0])
    assert len(gradients) == len(list(model.parameters()))
    assert_same([parameter.grad for parameter in gradients], list(gradients.values()))


def sums_by_parameter(joint, model, values):
    """A tied parameter has several gradients in the captured graph."""
    output = next(node for node in joint.graph_module.graph.nodes if node.op == "output")
    sums = {}
    for node, description in zip(output.args[0], output.meta["desc"], strict=True):
        if type(description).__name__ == "GradAOTOutput" and node is not None:
            parameter = model.get_parameter(description.grad_of.target.removeprefix("model."))
            sums[parameter] = sums[parameter] + values[node] if parameter in sums else values[node]
    return sums


def test_of_calls_that_look_alike_a_few_are_run_in_other_forms_in_a_slow_step():
    layers = [layer for _ in range(8) for layer in (nn.Linear(8, 8), nn.ReLU())]
    joint, graph, model, sample = captured(nn.Sequential(*layers), torch.randn(4, 8), ("lean",))
    step = TimedStep(joint.graph_module, graph, model, sample)
    with step.running():
        plain, other = step.run_both()
    relus = [each.name for each in graph.operations if each.target == "aten.relu.default"]
    assert len(relus) == 8
    assert all(name in plain for name in relus)
    assert sum(name in other for name in relus) == timed_step._SAMPLES


def test_what_a_sampled_alternative_reads_is_run_too():
    """The first gradients that are computed are those of the last ReLUs, whose bits look like those of the first."""
    layers = [layer for _ in range(5) for layer in (nn.Linear(32, 32), nn.ReLU())]
    joint, graph, model, sample = captured(nn.Sequential(*layers), torch.randn(64, 32), ("lean",))
    step = TimedStep(joint.graph_module, graph, model, sample)
    with step.running():
        _, other = step.run_both()
    assert {each.signature for each in graph.alternatives if each.name in other} == {
        each.signature for each in graph.alternatives
    }
