"""Capture a model, and run what was captured beside the model itself."""

import copy
from typing import Any

import torch
from torch import fx, nn
from torch.utils import _pytree as pytree

from memfit.capture.lower import lower
from memfit.capture.outputs import take_apart
from memfit.capture.sample import Sample
from memfit.capture.trace import ROOT, Joint, traced
from memfit.ir import Graph, Kind, Phase
from memfit.ops.calls import faithful_call


def captured(model: nn.Module, sample: Any, *, backward_from: str = "auto") -> Graph:
    with traced(model, Sample.of(sample), backward_from=backward_from) as joint:
        return lower(joint)


def targets(graph: Graph, phase: Phase | None = None) -> list[str]:
    return [operation.target for operation in graph.operations if phase in (None, operation.phase)]


def names(graph: Graph, kind: Kind) -> list[str]:
    return [storage.name for storage in graph.storages if storage.kind is kind]


def assert_computes_what_eager_computes(model: nn.Module, sample: Any) -> None:
    """Outputs, gradients and buffers of the captured graph equal the plain run's, bit for bit."""
    call = Sample.of(sample)
    twin = copy.deepcopy(model)
    with traced(model, call) as joint:
        differentiated, template = joint.differentiated, joint.template
    torch.manual_seed(7)
    outputs, gradients, buffers = _run_captured(joint, model, call)
    rebuilt = template.rebuild(outputs, _given(model, call))
    torch.manual_seed(7)
    result = twin(*call.args, **call.kwargs)
    expected, _ = take_apart(result, _given(twin, call))
    started = [expected[index] for index in differentiated]
    torch.autograd.backward(started, [torch.ones_like(tensor) for tensor in started])
    assert pytree.tree_structure(rebuilt) == pytree.tree_structure(result)
    assert_equal(outputs, expected)
    trained = {name: weight.grad for name, weight in twin.named_parameters() if weight.grad is not None}
    assert gradients.keys() == trained.keys()
    assert_equal([gradients[name] for name in trained], list(trained.values()))
    assert_equal(list(buffers.values()), [twin.get_buffer(name) for name in buffers])


def _given(model: nn.Module, call: Sample) -> list[Any]:
    states = [*dict(model.named_parameters(remove_duplicate=False)).values(), *model.buffers()]
    return [*states, *pytree.tree_leaves((call.args, dict(call.kwargs)))]


def assert_equal(ones: list[torch.Tensor], others: list[torch.Tensor]) -> None:
    for one, other in zip(ones, others, strict=True):
        assert (one.dtype, one.shape) == (other.dtype, other.shape)
        assert torch.equal(one, other)


def _run_captured(
    joint: Joint, model: nn.Module, sample: Sample
) -> tuple[list[torch.Tensor], dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """Outputs, gradients by parameter and new buffer values, with ones for tangents."""
    graph = joint.graph_module.graph
    state = {
        **dict(model.named_parameters(remove_duplicate=False)),
        **dict(model.named_buffers(remove_duplicate=False)),
    }
    leaves = pytree.tree_leaves((sample.args, dict(sample.kwargs)))
    values = [_value(node, state, leaves) for node in graph.nodes if node.op == "placeholder"]
    with torch.no_grad(), torch.autocast("cpu", enabled=False):
        results = _Faithful(joint.graph_module).run(*values, enable_io_processing=False)
    outputs: list[torch.Tensor] = []
    gradients: dict[str, torch.Tensor] = {}
    buffers: dict[str, torch.Tensor] = {}
    first_names = {id(weight): name for name, weight in model.named_parameters()}
    for result, description in zip(results, next(iter(reversed(graph.nodes))).meta["desc"], strict=True):
        kind = type(description).__name__
        if kind == "PlainAOTOutput":
            outputs.append(result)
        elif kind == "GradAOTOutput" and result is not None and hasattr(description.grad_of, "target"):
            name = first_names[id(state[_path(description.grad_of)])]
            gradients[name] = gradients[name] + result if name in gradients else result
        elif kind == "InputMutationAOTOutput":
            buffers[_path(description.mutated_input)] = result
    return outputs, gradients, buffers


class _Faithful(fx.Interpreter):
    def call_function(self, target: Any, args: Any, kwargs: Any) -> Any:
        return faithful_call(target)(*args, **kwargs)


def _value(node: fx.Node, state: dict[str, torch.Tensor], leaves: list[Any]) -> Any:
    description = node.meta["desc"]
    if hasattr(description, "target"):
        return state[_path(description)].detach().clone()
    if type(description).__name__ == "TangentAOTInput":
        return torch.ones(node.meta["val"].shape, dtype=node.meta["val"].dtype)
    return leaves[description.idx]


def _path(description: Any) -> str:
    path: str = description.target
    return path.removeprefix(ROOT + ".")
