"""What users call: capture, then simulate, then execute."""

import dataclasses
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

import psutil
import torch
from torch import nn

from memfit.capture.lower import lower
from memfit.capture.sample import Sample
from memfit.capture.trace import traced
from memfit.errors import InvalidInput
from memfit.estimate import Estimate, ParameterCount
from memfit.ir import Graph, OptimizerMemory
from memfit.measure.cost import OperatorCost
from memfit.measure.devices import Device, find_device
from memfit.measure.optimizer import OptimizerLike, optimizer_memory
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
    target = None if device is None else find_device(device)
    graph = _captured_graph(model, sample, loss, backward_from)
    needs = OptimizerMemory() if optimizer is None else optimizer_memory(optimizer, list(model.parameters()))
    if measure is None:
        measure = target is None and _could_run_here(graph, needs)
    costs = _costs(graph, _device_of(model), progress) if measure else {}
    graph = _with_real_sizes(graph, costs)
    timeline = simulate(
        graph,
        identity_program(graph),
        workspace_bytes=[_workspace_bytes(costs, operation.signature) for operation in graph.operations],
        optimizer=needs,
        granularity_bytes=1 if target is None else target.granularity_bytes,
    )
    return Estimate(
        model=type(model).__name__,
        optimizer=_optimizer_name(optimizer),
        device=_device_of(model) if target is None else target.name,
        graph=graph,
        timeline=timeline,
        parameters=_parameter_counts(model),
        workspaces_measured=bool(costs),
        notes=tuple(_notes(target, bool(costs))),
    )
