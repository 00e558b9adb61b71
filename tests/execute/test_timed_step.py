import pytest
import torch
from captured_step import captured
from programs import keep_everything, keeping
from torch import nn
from twins import MODELS, assert_same

from memfit.execute import timed_step
from memfit.execute.partition import unplanned_program
from memfit.execute.timed_step import Limit, TimedStep
from memfit.ir import Compute
from memfit.measure.allocations import operator_costs, workspace_bytes
from memfit.measure.peak import measure_peak
from memfit.plan.problem import handed_out_together
from memfit.plan.simulate import simulate


def step_of(model, batch, techniques=("lean",), program=unplanned_program, **options):
    joint, graph, model, sample = captured(model, batch, techniques)
    graph = handed_out_together(graph)
    made = program(graph)
    return joint, graph, made, TimedStep(joint.graph_module, graph, made, model, sample, **options)


def forget_half(graph):
    return keeping(lambda storage: storage % 2 == 0)(graph)


@pytest.mark.parametrize("with_extras", [False, True])
@pytest.mark.parametrize("program", [unplanned_program, forget_half])
@pytest.mark.parametrize("name", MODELS)
def test_timed_steps_compute_what_the_eager_run_computes(name, program, with_extras, monkeypatch):
    make_model, make_batch = MODELS[name]
    model, batch = make_model(), make_batch()
    seen, results = [], []
    own_values = timed_step._Values
    monkeypatch.setattr(timed_step, "_Values", lambda inputs: seen.append(own_values(inputs)) or seen[-1])
    monkeypatch.setattr(timed_step, "_dying", lambda nodes: {node: [] for node in nodes})
    monkeypatch.setattr(timed_step, "_rebuilt", with_results(results))
    joint, _, _, step = step_of(model, batch, program=program)
    with step.running():
        torch.manual_seed(5)
        step.run(with_extras=with_extras)
    torch.manual_seed(5)
    output = model(batch)
    output.backward(timed_step._made_up(output.detach()))
    gradients = sums_by_parameter(joint, model, results[-1 if with_extras else 0], seen[0].made)
    assert len(gradients) == len(list(model.parameters()))
    assert_same([parameter.grad for parameter in gradients], list(gradients.values()))


def with_results(results):
    """Rebuilds as a timed step does, and notes which nodes are the results of the backward pass."""

    def rebuilt(builder, program):
        output = next(iter(builder._given)).graph.output_node()  # of the captured graph
        builder.run(program.forward, [])
        builder.turn_around()
        kinds = [type(each).__name__ for each in output.meta["desc"]]
        gradients = [each for each, kind in zip(output.args[0], kinds, strict=True) if each and kind == "GradAOTOutput"]
        made = builder.run(program.backward, gradients)
        results.append(dict(zip(gradients, made, strict=True)))
        builder.graph.output([])
        return builder.graph

    return rebuilt


def sums_by_parameter(joint, model, results, values):
    """A tied parameter has several gradients in the captured graph."""
    output = next(node for node in joint.graph_module.graph.nodes if node.op == "output")
    sums = {}
    for node, description in zip(output.args[0], output.meta["desc"], strict=True):
        if type(description).__name__ == "GradAOTOutput" and node is not None:
            parameter = model.get_parameter(description.grad_of.target.removeprefix("model."))
            gradient = values[results[node]]
            sums[parameter] = sums[parameter] + gradient if parameter in sums else gradient
    return sums


def test_every_run_of_an_operation_is_timed():
    _, graph, program, step = step_of(nn.Sequential(nn.Linear(8, 8), nn.ReLU()), torch.randn(4, 8), program=forget_half)
    with step.running():
        own, extra = step.run()
    runs = [each for each in (*program.forward, *program.backward) if isinstance(each, Compute)]
    signed = [(each.operation, each.in_place) for each in runs if graph.operation(each.operation).signature]
    assert sorted(form for form, times in own.items() for _ in times) == sorted(signed)
    assert extra == {}


def test_of_calls_that_look_alike_a_few_are_run_in_other_forms():
    layers = [layer for _ in range(8) for layer in (nn.Linear(8, 8), nn.ReLU())]
    _, graph, _, step = step_of(nn.Sequential(*layers), torch.randn(4, 8))
    with step.running():
        own, extra = step.run(with_extras=True)
    relus = [index for index, each in enumerate(graph.operations) if each.target == "aten.relu.default"]
    assert len(relus) == 8
    assert all((index, False) in own for index in relus)
    assert sum((index, True) in extra for index in relus) == timed_step._SAMPLES


def test_all_variants_are_run_with_what_they_read():
    """The first gradients that are computed are those of the last ReLUs, whose bits look like those of the first."""
    layers = [layer for _ in range(5) for layer in (nn.Linear(32, 32), nn.ReLU())]
    _, graph, _, step = step_of(nn.Sequential(*layers), torch.randn(64, 32))
    with step.running():
        _, extra = step.run(with_extras=True)
    assert {graph.operation(index).signature for index, _ in extra} >= {each.signature for each in graph.alternatives}


def test_exact_variants_are_compared_with_the_own_operator():
    _, graph, _, step = step_of(nn.Sequential(nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 32)), torch.randn(64, 32))
    with step.running():
        step.run(with_extras=True)
    remade = {number for number, each in numbered(graph) if each.outputs[0] in own_outputs(graph)}
    assert step.equal == remade
    assert step.unequal == set()


def test_a_variant_that_makes_other_bits_is_told(monkeypatch):
    monkeypatch.setattr(timed_step, "same_bits", lambda *_: False)
    _, _, _, step = step_of(nn.Sequential(nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 32)), torch.randn(64, 32))
    with step.running():
        step.run(with_extras=True)
    assert step.unequal
    assert step.equal == set()


def numbered(graph):
    return enumerate(graph.alternatives, start=len(graph.operations))


def own_outputs(graph):
    return {index for each in graph.operations for index in each.outputs}


@pytest.mark.parametrize("room", [0.0, 0.1, 1.0])
@pytest.mark.parametrize("program", [keep_everything, forget_half])
def test_no_extra_run_exceeds_the_limit(program, room):
    layers = [layer for _ in range(6) for layer in (nn.Linear(256, 256), nn.BatchNorm1d(256), nn.ReLU())]
    model, batch = nn.Sequential(*layers), torch.randn(512, 256)
    joint, graph, model, sample = captured(model, batch, ("lean",))
    graph = handed_out_together(graph)
    made = program(graph)
    costs = operator_costs(graph, "cpu", None)
    workspaces = [workspace_bytes(graph, each, costs) for each in (*graph.operations, *graph.alternatives)]
    peak_bytes = simulate(graph, made, workspace_bytes=workspaces).peak_bytes
    limit = Limit(limit_bytes=peak_bytes + int(room * batch.nbytes), workspace_bytes=workspaces)
    step = TimedStep(joint.graph_module, graph, made, model, sample, limit=limit)
    with step.running():
        step.run(with_extras=True)
        measured = measure_peak(lambda: step.run(with_extras=True), resident=[model, batch])
    assert measured.peak_bytes <= limit.limit_bytes


def test_gradients_are_dropped_as_soon_as_they_are_computed():
    layers = [layer for _ in range(6) for layer in (nn.Linear(512, 512), nn.ReLU())]
    model, batch = nn.Sequential(*layers), torch.randn(4, 512)
    model(batch).sum().backward()
    gradients = [parameter.grad for parameter in model.parameters()]
    joint, graph, model, sample = captured(model, batch, ())
    graph = handed_out_together(graph)
    step = TimedStep(joint.graph_module, graph, keep_everything(graph), model, sample)
    with step.running():
        measured = measure_peak(step.run, resident=[model, batch])
    assert measured.peak_bytes - measured.resident_bytes < 2 * 512 * 512 * 4
    assert all(parameter.grad is each for parameter, each in zip(model.parameters(), gradients, strict=True))
