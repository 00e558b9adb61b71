"""What users call: capture, then simulate, then execute."""

import dataclasses
import functools
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import psutil
import torch
from torch import nn

from memfit.capture.lower import lower
from memfit.capture.sample import Sample
from memfit.capture.trace import Joint, traced
from memfit.errors import CaptureError, InvalidModel
from memfit.estimate import Estimate, ParameterCount
from memfit.execute.attach import attach, remove, removed
from memfit.execute.compiled import CompiledCall
from memfit.ir import Graph, Operation, OptimizerMemory, without_prefix
from memfit.measure.cost import OperatorCost
from memfit.measure.cuda import with_byte_masks
from memfit.measure.devices import CUDA_GRANULARITY_BYTES, Device, find_device
from memfit.measure.optimizer import OptimizerLike, check_optimizer, optimizer_memory, optimizer_name
from memfit.measure.probe import Progress, measured_costs
from memfit.plan.identity import identity_program
from memfit.plan.simulate import simulate

Loss = Callable[[nn.Module, Any], torch.Tensor]


def estimate(
    model: nn.Module,
    sample: Any,
    *,
    optimizer: OptimizerLike | None = None,
    loss: Loss | None = None,
    device: str | None = None,
    measure: bool | None = None,
    backward_from: str = "auto",
    progress: Progress | None = None,
) -> Estimate:
    """Predict the peak memory of one training step; the model is not run.

    `sample` is what the model's forward takes: a tensor, a tuple, a dict or a `Sample`. With
    `loss(model, sample)` the step computes that loss; without, gradients start at the model's
    own loss if it returns one, else at its outputs. `optimizer` is a name in `torch.optim`, an
    instance or a factory; without, forward and backward are estimated. `device` names a device
    that need not be here ("A100-40GB"). `measure=False` leaves out what operators allocate
    inside, which otherwise each distinct operator is run once for; by default that is done
    where the step could run on this machine.
    """
    if not isinstance(model, nn.Module):
        raise InvalidModel(f"a torch.nn.Module was expected, a {type(model).__name__} was given")
    target = None if device is None else find_device(device)
    check_optimizer(optimizer)
    with removed(model):
        graph = _captured_graph(model, sample, loss, backward_from)
    if _is_for_cuda(model, target) and not _is_for_cuda(model, None):
        graph = with_byte_masks(graph)
    needs = _optimizer_memory(optimizer, model, graph, target)
    if measure is None:
        measure = target is None and _could_run_here(graph, needs)
    costs = _costs(graph, _device_of(model), progress) if measure else {}
    graph = _with_real_sizes(graph, costs)
    timeline = simulate(
        graph,
        identity_program(graph),
        workspace_bytes=[_workspace_bytes(graph, operation, costs) for operation in graph.operations],
        optimizer=needs,
        granularity_bytes=_granularity_bytes(model, target),
    )
    return Estimate(
        model=type(model).__name__,
        optimizer=None if optimizer is None else optimizer_name(optimizer),
        device=_device_of(model) if target is None else target.name,
        graph=graph,
        timeline=timeline,
        parameters=_parameter_counts(model),
        workspaces_measured=all(each.signature in costs for each in graph.operations if each.signature),
        notes=tuple(_notes(graph, costs, target)),
    )


def fit(model: nn.Module, sample: Any, *, backward_from: str = "auto") -> nn.Module:
    """Run the model through its captured forward and backward graphs; `remove` undoes it.

    The same module is returned: same class, same `state_dict` keys, same numbers bit for bit.
    Calls of another shape, dtype or mode than `sample` are captured when they first come.
    """
    if not isinstance(model, nn.Module):
        raise InvalidModel(f"a torch.nn.Module was expected, a {type(model).__name__} was given")
    if not model.training:
        raise InvalidModel(
            f"this {type(model).__name__} is in eval mode, in which its own forward runs; call model.train() first"
        )
    example = Sample.of(sample)
    planned = attach(model, functools.partial(_compiled_call, backward_from))
    try:
        planned.capture(example.args, dict(example.kwargs))
    except BaseException:
        remove(model)
        raise
    return model


def _compiled_call(backward_from: str, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> CompiledCall:
    with traced(model, Sample(args, kwargs), backward_from=backward_from, with_hooks=False) as joint:
        _check_equal_to_eager(type(model).__name__, joint)
        return CompiledCall(joint, lower(joint))


def _check_equal_to_eager(name: str, joint: Joint) -> None:
    """Refuse what would not compute what the eager run computes, or warn where that is not certain."""
    if joint.cast_anew:
        raise CaptureError(
            f"{name} uses {', '.join(joint.cast_anew)} more than once under autocast, which casts a parameter once "
            "and keeps the cast, while the captured graph would cast it at every use and round differently; use "
            "torch.autocast(..., cache_enabled=False), under which both do the same"
        )
    if joint.changed_attributes:
        warnings.warn(
            f"the forward of {name} changes {', '.join(joint.changed_attributes)}, which the captured call does not "
            "do again; keep what must change in buffers, and draw random numbers with torch",
            stacklevel=2,
        )
    if joint.avoided_values:
        warnings.warn(
            f"the forward of {name} looks at values of the batch; it was captured the way its library offers for "
            "traces, which may round differently from the eager run",
            stacklevel=2,
        )


class _WithLoss(nn.Module):
    """A model and its loss as one module, so that the loss is part of the step."""

    def __init__(self, model: nn.Module, loss: Loss) -> None:
        super().__init__()
        self.model = model
        self._loss = loss
        self.training = model.training

    def forward(self, batch: Any) -> torch.Tensor:
        return self._loss(self.model, batch)


def _captured_graph(model: nn.Module, sample: Any, loss: Loss | None, backward_from: str) -> Graph:
    subject = model if loss is None else _WithLoss(model, loss)
    example = Sample.of(sample) if loss is None else Sample((sample,))
    with traced(subject, example, backward_from=backward_from) as joint:
        graph = lower(joint)
    return graph if loss is None else without_prefix(graph, "model")


def _optimizer_memory(
    optimizer: OptimizerLike | None, model: nn.Module, graph: Graph, target: Device | None
) -> OptimizerMemory:
    if optimizer is None:
        return OptimizerMemory()
    trained = {graph.storages[parameter].name for parameter, _ in graph.trained}
    return optimizer_memory(
        optimizer,
        list(model.parameters()),
        for_cuda=_is_for_cuda(model, target),
        without_gradient=[parameter for name, parameter in model.named_parameters() if name not in trained],
    )


def _is_for_cuda(model: nn.Module, target: Device | None) -> bool:
    return torch.device(_device_of(model)).type == "cuda" if target is None else target.is_cuda


def _costs(graph: Graph, device: str, progress: Progress | None) -> dict[str, OperatorCost]:
    signatures = (operation.signature for operation in graph.operations if operation.signature)
    return measured_costs(signatures, device=device, progress=progress)


def _with_real_sizes(graph: Graph, costs: Mapping[str, OperatorCost]) -> Graph:
    """Believe what operators were seen to make more than what the trace says they make."""
    storages = list(graph.storages)
    for operation in graph.operations:
        cost = costs.get(operation.signature)
        if cost is None or len(cost.output_bytes) != len(operation.outputs):
            continue
        for index, size_bytes in zip(operation.outputs, cost.output_bytes, strict=True):
            storages[index] = dataclasses.replace(storages[index], size_bytes=size_bytes)
    return dataclasses.replace(graph, storages=tuple(storages))


def _workspace_bytes(graph: Graph, operation: Operation, costs: Mapping[str, OperatorCost]) -> int:
    """What an operation allocates beyond the values in the graph; results nobody asked for included."""
    cost = costs.get(operation.signature)
    if cost is None:
        return 0
    wanted_bytes = sum(graph.storages[index].size_bytes for index in operation.outputs)
    return cost.workspace_bytes + max(0, sum(cost.output_bytes) - wanted_bytes)


def _could_run_here(graph: Graph, optimizer: OptimizerMemory) -> bool:
    """Whether this machine has the memory for the step itself, and so for its operators."""
    least_bytes = simulate(graph, identity_program(graph), optimizer=optimizer).peak_bytes
    return least_bytes < int(psutil.virtual_memory().available)


def _device_of(model: nn.Module) -> str:
    tensors = [*model.parameters(), *model.buffers()]
    return str(tensors[0].device) if tensors else "cpu"


def _granularity_bytes(model: nn.Module, target: Device | None) -> int:
    return CUDA_GRANULARITY_BYTES if _is_for_cuda(model, target) else 1


def _parameter_counts(model: nn.Module) -> tuple[ParameterCount, ...]:
    counts: Counter[tuple[str, bool]] = Counter()
    sizes: Counter[tuple[str, bool]] = Counter()
    for parameter in model.parameters():
        key = (str(parameter.dtype).removeprefix("torch."), parameter.requires_grad)
        counts[key] += parameter.numel()
        sizes[key] += parameter.numel() * parameter.element_size()
    return tuple(
        ParameterCount(dtype=dtype, trainable=trainable, count=counts[dtype, trainable], size_bytes=size)
        for (dtype, trainable), size in sizes.most_common()
    )


def _notes(graph: Graph, costs: Mapping[str, OperatorCost], target: Device | None) -> Iterator[str]:
    if target is not None:
        yield (
            f"traced as it runs here and counted for {target.name}: operators that choose another "
            "algorithm there (attention with dropout, recurrent layers) may keep less or more"
        )
    if not costs:
        yield "workspaces that operators allocate inside are not counted: they were not measured"
        return
    unknown = {each.target for each in graph.operations if each.signature and each.signature not in costs}
    if unknown:
        yield (
            f"{', '.join(sorted(unknown))} could not be run by itself, so what it allocates inside is not counted; "
            "check that the model itself runs on this sample"
        )
