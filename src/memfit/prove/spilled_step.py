"""Bound an eager step whose saved tensors are in a file, as far as can be known before it runs.

Note [Variables of a forward]
    A forward may hold values in variables and lists beyond their last use, which no graph shows. So it is run once on
    tensors without memory, with autograd saving nothing, and what is alive at once is counted. Where it holds more than
    the walk over the graph has, the forward pass is predicted with that much more.
"""

import dataclasses
from collections.abc import Sequence

import torch
from torch import nn

from memfit import _torch
from memfit.accelerator import accelerators_of, generators_kept
from memfit.capture.sample import Sample
from memfit.capture.snapshot import Snapshot
from memfit.capture.spilled import SMALLEST_BYTES, dropped_activations
from memfit.ir import Graph
from memfit.measure.live import LiveBytes
from memfit.plan.spilled import SpilledPeak, spilled_peak
from memfit.tensors import states_by_name
from memfit.trees import map_tensors


def predicted_step(model: nn.Module, sample: Sample, graph: Graph, workspace_bytes: Sequence[int]) -> SpilledPeak:
    """Predict an eager step by its graph, and by what its forward holds, see Note [Variables of a forward]."""
    walked = spilled_peak(graph, workspace_bytes, smallest_bytes=SMALLEST_BYTES)
    values = spilled_peak(graph, (), smallest_bytes=SMALLEST_BYTES)
    resident_bytes = sum(graph.storages[each].size_bytes for each in graph.resident)
    more_bytes = resident_bytes + _forward_bytes(model, sample) - values.forward_bytes
    return dataclasses.replace(walked, forward_bytes=walked.forward_bytes + max(0, more_bytes))


def _forward_bytes(model: nn.Module, sample: Sample) -> int:
    """The most that values of a forward pass take at once if nothing is saved; 0 if it cannot be run without memory."""
    mode = _torch.FakeTensorMode(allow_non_fake_inputs=True)
    states = {name: _without_memory(mode, state) for name, state in states_by_name(model).items()}
    args, kwargs = map_tensors(lambda tensor: _without_memory(mode, tensor), (sample.args, dict(sample.kwargs)))
    live, snapshot = LiveBytes(), Snapshot(model)
    try:
        with (
            _torch.failures_unlogged(),
            generators_kept(accelerators_of(model.parameters())),
            mode,
            dropped_activations(()),
            live,
        ):
            torch.func.functional_call(model, states, args, kwargs, tie_weights=False)
    except Exception:  # it asks for values, or for real tensors; what it holds is counted while it really runs
        return 0
    finally:
        snapshot.restore()
    return live.peak_bytes


def _without_memory(mode: _torch.FakeTensorMode, tensor: torch.Tensor) -> torch.Tensor:
    fake: torch.Tensor = mode.from_tensor(tensor.detach())
    return fake.requires_grad_(tensor.requires_grad)
