"""A training step as the plain eager run does it, with all that its simulation needs."""

import dataclasses
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from memfit.capture.cuda.operators import operators_of
from memfit.capture.eager_step import eager_step
from memfit.capture.lower import lower
from memfit.capture.sample import Sample
from memfit.capture.trace import traced
from memfit.capture.with_loss import WithLoss
from memfit.describe import capability_elsewhere, device_of, granularity_bytes
from memfit.errors import InvalidInput, InvalidModel
from memfit.estimate import Estimate, ParameterCount, UpperEnd
from memfit.execute.attach import removed
from memfit.ir import Graph, OptimizerMemory, Program, without_prefix
from memfit.measure.allocations import operator_costs, with_real_sizes, workspace_bytes
from memfit.measure.cost import OperatorCost
from memfit.measure.cuda_libraries import ConvolutionSettings, LibraryBytes, library_bytes
from memfit.measure.devices import CUDA_GRANULARITY_BYTES, Device, find_device
from memfit.measure.optimizer import OptimizerLike, check_optimizer, optimizer_name
from memfit.measure.probe import Progress
from memfit.measure.process import can_be_measured, process_peak
from memfit.plan.identity import identity_program
from memfit.plan.loop import Loop
from memfit.plan.reserved import WORKSPACE_SHARES, ReservedMemory, highest_of, reserved_memory, shared
from memfit.plan.simulate import Timeline, simulate
from memfit.prepare import may_be_probed, step_optimizer_memory
from memfit.tensors import storage_bytes
from memfit.units import format_bytes

Loss = Callable[[nn.Module, Any], torch.Tensor]
_PLAIN_CONVOLUTIONS = ConvolutionSettings()
_PLAIN_LOOP = Loop()


@dataclasses.dataclass(frozen=True, kw_only=True)
class UnplannedStep:
    """What a step computes, in what order, and what each part of it takes."""

    graph: Graph
    program: Program
    workspace_bytes: tuple[int, ...]  # by operation
    optimizer_memory: OptimizerMemory
    granularity_bytes: int
    model: str  # class of the model
    optimizer: str | None
    device: str
    parameters: tuple[ParameterCount, ...]
    workspaces_measured: bool
    notes: tuple[str, ...]
    libraries: LibraryBytes | None = None  # None: measured with the operators, or no CUDA device
    convolutions: ConvolutionSettings = _PLAIN_CONVOLUTIONS
    capacity_bytes: int | None = None  # of the device that it is for, without its context
    loop: Loop = _PLAIN_LOOP
    outside_a_loop: tuple[Graph, Program] | None = None  # None: what loops cost is not told

    def estimate(self, *, process: bool = False) -> Estimate:
        """Walk it, and tell what it takes, with the peak of the process if that is asked for."""
        timeline = self._timeline(self.graph, self.program, self.optimizer_memory)
        reserved = self._reserved(self.workspace_bytes) if self._is_for_cuda else None
        return Estimate(
            model=self.model,
            optimizer=self.optimizer,
            device=self.device,
            graph=self.graph,
            timeline=timeline,
            parameters=self.parameters,
            workspaces_measured=self.workspaces_measured,
            notes=self.notes,
            process_peak_bytes=self._process_peak_bytes() if process else None,
            reserved=reserved,
            highest=None if reserved is None else self._highest(timeline, reserved),
            loop_costs=self._loop_costs(timeline.peak_bytes),
        )

    def _timeline(self, graph: Graph, program: Program, optimizer: OptimizerMemory) -> Timeline:
        return simulate(
            graph,
            program,
            workspace_bytes=self.workspace_bytes,
            optimizer=optimizer,
            granularity_bytes=self.granularity_bytes,
            library_bytes=sum(self._handles.values()),
        )

    def _loop_costs(self, peak_bytes: int) -> dict[str, int]:
        """Return by how much the peak would be higher if the loop kept more, or if the first step were the only one."""
        if self.outside_a_loop is None or not self.loop.backward:
            return {}
        others = {
            "gradients kept": dataclasses.replace(self.loop, gradients="kept"),
            "outputs kept": dataclasses.replace(self.loop, outputs="kept"),
        }
        found = {
            words: self._timeline(*other.around(*self.outside_a_loop), self.optimizer_memory).peak_bytes
            for words, other in others.items()
            if other != self.loop
        }
        if self.optimizer_memory.state_bytes:
            found["first step alone"] = self._first_peak_bytes()
        return {words: size_bytes - peak_bytes for words, size_bytes in found.items()}

    def _first_peak_bytes(self) -> int:
        """Return the peak of a step that begins without optimizer state, which its end makes."""
        passes = self._timeline(self.graph, self.program, OptimizerMemory()).peak_bytes
        last = self._timeline(self.graph, self.program, self.optimizer_memory).moments[-1]
        return max(passes, last.live_bytes)

    @property
    def _is_for_cuda(self) -> bool:
        return self.granularity_bytes == CUDA_GRANULARITY_BYTES

    @property
    def _handles(self) -> Mapping[int, int]:
        return {} if self.libraries is None else self.libraries.handles

    def _reserved(self, workspaces: Sequence[int], *, compares: bool = True) -> ReservedMemory:
        return reserved_memory(
            self.graph,
            self.program,
            workspace_bytes=workspaces,
            optimizer=self.optimizer_memory,
            handles=self._handles,
            capacity_bytes=self.capacity_bytes,
            compares=compares,
        )

    def _highest(self, lowest: Timeline, least: ReservedMemory) -> UpperEnd | None:
        """Return the most that the step takes with larger workspaces; None where these make no difference."""
        if self.libraries is None or self.libraries.highest == self.libraries.lowest:
            return None
        workspaces = self._within_capacity(self.libraries.highest, lowest)
        timeline = simulate(
            self.graph,
            self.program,
            workspace_bytes=workspaces,
            optimizer=self.optimizer_memory,
            granularity_bytes=self.granularity_bytes,
            library_bytes=sum(self._handles.values()),
        )
        found = [self._reserved(shared(workspaces, share), compares=False) for share in WORKSPACE_SHARES]
        return UpperEnd(
            peak_bytes=max(timeline.peak_bytes, lowest.peak_bytes),
            reserved=self._at_most_capacity(highest_of(found), least),
            reason=self.convolutions.reason,
        )

    def _at_most_capacity(self, most: ReservedMemory, least: ReservedMemory) -> ReservedMemory:
        """Bound an upper end by the device where the lower end fits: torch takes smaller algorithms before it fails."""
        if self.capacity_bytes is None or least.least_bytes > self.capacity_bytes:
            return most
        return dataclasses.replace(
            most,
            reserved_bytes=min(most.reserved_bytes, self.capacity_bytes),
            best_reserved_bytes=min(most.best_reserved_bytes, self.capacity_bytes),
            least_bytes=min(most.least_bytes, self.capacity_bytes),
        )

    def _within_capacity(self, workspaces: Sequence[int], lowest: Timeline) -> list[int]:
        """Leave workspaces what is free on the device: torch tries a smaller algorithm where one does not fit."""
        if self.capacity_bytes is None:
            return list(workspaces)
        live_bytes = {moment.label: moment.live_bytes for moment in lowest.moments}
        free_bytes = [max(0, self.capacity_bytes - live_bytes.get(each.name, 0)) for each in self.graph.operations]
        return [min(each) for each in zip(workspaces, free_bytes, strict=True)]

    def _process_peak_bytes(self) -> int:
        if self.device != "cpu" or not can_be_measured(self.device):
            raise InvalidInput(
                f"the peak of the process is told for a CPU that is here, on Linux; this step is for {self.device}"
            )
        return process_peak(
            self.graph,
            self.program,
            workspace_bytes=self.workspace_bytes,
            optimizer=self.optimizer_memory,
            planned=False,
        ).peak_bytes


def unplanned_step(
    model: nn.Module,
    sample: Any,
    *,
    optimizer: OptimizerLike | None,
    loss: Loss | None,
    device: str | None,
    measure: bool | None,
    backward_from: str,
    progress: Progress | None,
    loop: Loop | None = None,
) -> UnplannedStep:
    """Capture a step and measure its operators; see `memfit.estimate` for what is given."""
    target = None if device is None else find_device(device)
    check_optimizer(optimizer)
    given = Sample.of(sample) if loss is None else Sample((sample,))
    elsewhere = capability_elsewhere(model, target)
    loop = loop or Loop()
    if not loop.backward and optimizer is not None:
        raise InvalidInput("a forward pass alone has no optimizer step; leave out the optimizer, or loop=")
    with removed(model), operators_of(elsewhere):
        graph, program = _eager_step(model, sample, loss, backward_from, trains=loop.backward)
    needs = step_optimizer_memory(optimizer, model, graph, target)
    if measure is None:
        measure = target is None and may_be_probed(model, given, graph)
    costs = operator_costs(graph, device_of(model), progress) if measure else {}
    graph = with_real_sizes(graph, costs)
    capability = None if target is None else target.capability
    convolutions = ConvolutionSettings(
        searches=torch.backends.cudnn.benchmark, allows_tf32=torch.backends.cudnn.allow_tf32
    )
    libraries = None if capability is None or measure else library_bytes(graph, capability, convolutions)
    measured = tuple(workspace_bytes(graph, operation, costs) for operation in graph.operations)
    bare = graph, program
    graph, program = loop.around(graph, program)
    return UnplannedStep(
        graph=graph,
        program=program,
        workspace_bytes=measured if libraries is None else libraries.lowest,
        libraries=libraries,
        convolutions=convolutions,
        loop=loop,
        outside_a_loop=bare,
        capacity_bytes=None if target is None or capability is None else target.usable_bytes,
        optimizer_memory=needs,
        granularity_bytes=granularity_bytes(model, target),
        model=type(model).__name__,
        optimizer=None if optimizer is None else optimizer_name(optimizer),
        device=device_of(model) if target is None else target.name,
        parameters=parameter_counts(model),
        workspaces_measured=all(each.signature in costs for each in graph.operations if each.signature),
        notes=(
            *(_optimizer_notes(model, optimizer) if loop.backward else ()),
            *_compiled_notes(model),
            *_notes(graph, costs, target),
        ),
    )


def _eager_step(
    model: nn.Module, sample: Any, loss: Loss | None, backward_from: str, *, trains: bool
) -> tuple[Graph, Program]:
    """Return a step as eager runs it, from a trace where it cannot be run without values."""
    subject = model if loss is None else WithLoss(model, loss)
    example = Sample.of(sample) if loss is None else Sample((sample,))
    found = eager_step(subject, example, backward_from=backward_from, backward=trains)
    if found is None and not trains:
        raise InvalidModel(
            f"{type(model).__name__} asks for values in its forward pass, so that pass alone cannot be followed"
        )
    if found is None:
        with traced(subject, example, backward_from=backward_from, runs=False) as joint:
            graph = lower(joint)
        found = graph, identity_program(graph)
    graph, program = found
    return (graph if loss is None else without_prefix(graph, "model")), program


def parameter_counts(model: nn.Module) -> tuple[ParameterCount, ...]:
    """Count the parameters of each kind of a model."""
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


def _optimizer_notes(model: nn.Module, optimizer: OptimizerLike | None) -> Iterator[str]:
    if optimizer is None:
        trained_bytes = storage_bytes([each for each in model.parameters() if each.requires_grad])
        yield f"no optimizer is counted: adamw would keep {format_bytes(2 * trained_bytes)} more"


def _compiled_notes(model: nn.Module) -> Iterator[str]:
    if any(hasattr(each, "_orig_mod") for each in model.modules()):
        yield "counted as it runs without torch.compile, which fuses operators and keeps fewer values"


def _notes(graph: Graph, costs: Mapping[str, OperatorCost], target: Device | None) -> Iterator[str]:
    if target is not None:
        yield f"counted for {target.name} by its operators and its allocator's rules: nothing was run there"
    if not costs:
        if target is None or not target.is_cuda:
            yield "workspaces that operators allocate inside are not counted: they were not measured"
        else:
            yield "workspaces of operators and libraries there are known by rule or as a range: they were not measured"
        return
    bounded = {each.target for each in graph.operations if each.signature in costs and costs[each.signature].is_bound}
    if bounded:
        yield (
            f"{', '.join(sorted(bounded))} could not be run in the memory that is free, so what it allocates inside is "
            "bounded from above"
        )
    unknown = {each.target for each in graph.operations if each.signature and each.signature not in costs}
    if unknown:
        yield (
            f"{', '.join(sorted(unknown))} could not be run by itself, so what it allocates inside is not counted; "
            "check that the model itself runs on this sample"
        )
