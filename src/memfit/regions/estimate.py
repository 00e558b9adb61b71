"""The estimate of a step that cannot be traced whole: measured in a real step, whose saved tensors are in a file."""

from collections.abc import Iterable, Sequence

import torch
from torch import nn

from memfit.capture.sample import Sample
from memfit.describe import device_of
from memfit.errors import CaptureError, first_line
from memfit.estimate import Estimate, ParameterCount
from memfit.ir import Graph, Kind, Storage
from memfit.measure.optimizer import optimizer_name
from memfit.plan.simulate import Moment, Timeline
from memfit.recipe import Recipe
from memfit.regions.whole import EagerStep, measured_step
from memfit.tensors import storage_key, tensors_in


def measured_estimate(
    model: nn.Module, sample: Sample, recipe: Recipe, parameters: Sequence[ParameterCount], error: CaptureError
) -> Estimate:
    """Run a step inside what is free and tell what it would take in memory; `error` says why it was not traced."""
    step = measured_step(model, sample, recipe)
    batch = [sample.args, dict(sample.kwargs), None if recipe.loss is None else recipe.loss.batch]
    storages = [*_storages(dict(model.named_parameters()).items(), Kind.PARAMETER)]
    storages += _storages(dict(model.named_buffers()).items(), Kind.BUFFER)
    storages += _storages(((f"batch.{n}", each) for n, each in enumerate(tensors_in(batch))), Kind.BATCH)
    places = tuple(range(len(storages)))
    graph = Graph(storages=tuple(storages), operations=(), resident=places, tangents=(), held=())
    return Estimate(
        model=type(model).__name__,
        optimizer=None if recipe.optimizer is None else optimizer_name(recipe.optimizer),
        device=device_of(model),
        graph=graph,
        timeline=_timeline(graph, step),
        parameters=tuple(parameters),
        workspaces_measured=True,
        notes=(
            "measured in a step that was run here with its saved tensors in a file, because the model cannot be traced "
            f"whole: gradients and activations are told as one ({first_line(error)})",
        ),
    )


def _timeline(graph: Graph, step: EagerStep) -> Timeline:
    assert step.peak_bytes is not None
    by_kind = dict.fromkeys(Kind, 0)
    for storage in graph.storages:
        by_kind[storage.kind] += storage.size_bytes
    by_kind[Kind.OPTIMIZER] = step.optimizer.state_bytes
    resident_bytes = sum(by_kind.values())
    by_kind[Kind.ACTIVATION] = max(0, step.peak_bytes - resident_bytes)
    biggest_first = sorted(graph.resident, key=lambda each: -graph.storages[each].size_bytes)
    return Timeline(
        moments=(Moment(label="step", phase="step", module="", by_kind=by_kind),),
        peak_position=0,
        peak_storages=tuple(biggest_first),
        resident_bytes=resident_bytes,
    )


def _storages(named: Iterable[tuple[str, torch.Tensor]], kind: Kind) -> list[Storage]:
    found: dict[int, Storage] = {}
    for name, tensor in named:
        found.setdefault(
            storage_key(tensor),
            Storage(
                name=name,
                size_bytes=tensor.untyped_storage().nbytes(),
                kind=kind,
                dtype=str(tensor.dtype).removeprefix("torch."),
                shape=tuple(tensor.shape),
                module="" if kind is Kind.BATCH else name.rpartition(".")[0],
            ),
        )
    return list(found.values())
