"""What a rank holds of a model that FSDP2 (`fully_shard`) divides, unit by unit.

Note [Shards]
    Every parameter is divided along its first dimension, filled up to equal shares. Between steps a rank has its
    shards, their gradients and their optimizer state. The parameters of a unit are whole only while it runs: they are
    gathered into one buffer and copied out of it. In the forward pass that buffer lives until the next unit is
    gathered; in the backward pass it is gone after the copy, but the next unit's is asked for already while one runs.
    A unit's gradients, when its backward pass ends, are copied into one buffer that is reduced and scattered, and
    which lives until the next unit does the same. The root, which has what belongs to no other unit, stays whole from
    the start of the forward to the end of the backward pass.
"""

import dataclasses
from collections import defaultdict
from collections.abc import Iterator, Sequence
from fnmatch import fnmatchcase
from math import prod

import torch
from torch import nn
from torch.optim import Optimizer

from memfit import _torch
from memfit.distributed.zero import over_groups
from memfit.errors import InvalidInput
from memfit.ir import Compute, Free, Graph, Instruction, Kind, Operation, OptimizerMemory, Phase, Storage
from memfit.measure.optimizer import OptimizerLike, optimizer_memory
from memfit.unplanned import UnplannedStep

ROOT = ""


def unit_names(model: nn.Module, patterns: Sequence[str] | None = None) -> list[str]:
    """The modules that are sharded by themselves: those of the patterns, or the blocks of the outermost lists."""
    named = [name for name, _ in model.named_modules() if name]
    if patterns is not None:
        found = [name for name in named if any(_is_outermost(name, pattern) for pattern in patterns)]
        if not found:
            raise InvalidInput(f"no module is named {' or '.join(patterns)}; modules are {', '.join(named[:8])}, ...")
        return found
    found = []
    for name, module in model.named_modules():
        is_inside = any(name == unit or name.startswith(f"{unit}.") for unit in found)
        if isinstance(module, nn.ModuleList | nn.Sequential) and not is_inside:
            found += [
                f"{name}.{child}".removeprefix(".")
                for child, part in module.named_children()
                if any(True for _ in part.parameters())
            ]
    return found


def _is_outermost(name: str, pattern: str) -> bool:
    """Whether a pattern names a module, and no module that it is inside of: a star stands for dots too."""
    parts = name.split(".")
    around = [".".join(parts[:length]) for length in range(1, len(parts))]
    return fnmatchcase(name, pattern) and not any(fnmatchcase(each, pattern) for each in around)


def shard_shape(parameter: torch.Tensor, world_size: int) -> tuple[int, ...]:
    """The shape of every rank's share of a parameter."""
    if not parameter.dim():
        raise InvalidInput("a parameter without dimensions cannot be divided over ranks; give it one of size 1")
    return (-(-parameter.shape[0] // world_size), *parameter.shape[1:])


def sharded_optimizer_memory(
    optimizer: OptimizerLike,
    parameters: Sequence[nn.Parameter],
    *,
    world_size: int,
    for_cuda: bool,
    without_gradient: Sequence[nn.Parameter],
) -> OptimizerMemory:
    """What the optimizer takes for the shards of one rank."""
    with _torch.FakeTensorMode():
        shards = {
            id(each): nn.Parameter(
                torch.empty(shard_shape(each, world_size), dtype=each.dtype, device=each.device),
                requires_grad=each.requires_grad,
            )
            for each in parameters
        }
    if isinstance(optimizer, Optimizer):
        groups = [[shards[id(each)] for each in group["params"]] for group in optimizer.param_groups]
        optimizer = over_groups(optimizer, groups)
    return optimizer_memory(
        optimizer,
        list(shards.values()),
        for_cuda=for_cuda,
        without_gradient=[shards[id(each)] for each in without_gradient],
    )


def with_shards(
    step: UnplannedStep, model: nn.Module, world_size: int, units: Sequence[str] | None = None
) -> UnplannedStep:
    """The step of a rank that has a share of every unit, see Note [Shards]."""
    writer = _Writer(step, model, world_size, unit_names(model, units))
    program = dataclasses.replace(step.program, forward=tuple(writer.forward()), backward=tuple(writer.backward()))
    missing = len(writer.operations)
    return dataclasses.replace(
        step,
        graph=writer.graph(),
        program=program,
        workspace_bytes=(*step.workspace_bytes, *[0] * missing),
    )


class _Unit:
    """The storages of one unit."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.parameters: list[int] = []  # whole
        self.gradients: list[int] = []  # whole
        self.gathered = self.reduced = self.shard_gradient = -1


class _Writer:
    """Writes what FSDP2 does between the instructions of a step."""

    def __init__(self, step: UnplannedStep, model: nn.Module, world_size: int, names: Sequence[str]) -> None:
        self._graph = step.graph
        self._program = step.program
        self._storages = list(step.graph.storages)
        self.operations: list[Operation] = []
        self._shards: list[int] = []
        self._names = sorted(names, key=len, reverse=True)
        self._units = {name: _Unit(name) for name in (*names, ROOT)}
        self._collect(model, world_size)
        self._spans = {
            Phase.FORWARD: self._ends(step.program.forward),
            Phase.BACKWARD: self._ends(step.program.backward),
        }
        self._order = [name for name in self._spans[Phase.FORWARD] if name != ROOT]  # as they run forward

    def graph(self) -> Graph:
        whole = {index for unit in self._units.values() for index in unit.parameters}
        return dataclasses.replace(
            self._graph,
            storages=tuple(self._storages),
            resident=(*(each for each in self._graph.resident if each not in whole), *self._shards),
            alternatives=(*self._graph.alternatives, *self.operations),
        )

    def forward(self) -> Iterator[Instruction]:
        root, spans = self._units[ROOT], self._spans[Phase.FORWARD]
        last: _Unit | None = None
        if root.parameters:
            yield from self._gather(root)
            yield from self._copy_out(root)
            last = root
        for place, instruction in enumerate(self._program.forward):
            for unit in self._at(spans, place, first=True):
                yield from self._gather(unit)
                yield from [Free(last.gathered)] if last else []
                yield from self._copy_out(unit)
                last = unit
            yield instruction
            for unit in self._at(spans, place, first=False):
                yield from map(Free, unit.parameters)
        yield from [Free(last.gathered)] if last else []

    def backward(self) -> Iterator[Instruction]:
        spans = self._spans[Phase.BACKWARD]
        asked: set[str] = set()
        reduced: list[_Unit] = []
        if self._units[ROOT].parameters:
            yield from self._ask_before(ROOT, asked)
        for place, instruction in enumerate(self._program.backward):
            for unit in self._at(spans, place, first=True):
                yield from () if unit.name in asked else self._gather(unit)
                asked.add(unit.name)
                yield from self._copy_out(unit)
                yield Free(unit.gathered)
                yield from self._ask_before(unit.name, asked)
            yield instruction
            for unit in self._at(spans, place, first=False):
                yield from self._reduce(unit, reduced)
        yield from self._reduce(self._units[ROOT], reduced)
        yield from (Free(unit.reduced) for unit in reduced)

    def _collect(self, model: nn.Module, world_size: int) -> None:
        shares = {
            name: prod(shard_shape(each, world_size)) * each.element_size()
            for name, each in model.named_parameters(remove_duplicate=False)
        }
        gradients = dict(self._graph.trained)
        bytes_of: dict[str, int] = defaultdict(int)
        trained_bytes: dict[str, int] = defaultdict(int)
        for index in self._graph.resident:
            storage = self._graph.storages[index]
            if storage.kind is not Kind.PARAMETER:
                continue
            unit = self._units[self._unit_of(storage.name)]
            share = shares[storage.name]
            unit.parameters.append(index)
            self._shards.append(self._storage(f"shard of {storage.name}", share, Kind.PARAMETER, storage.module))
            bytes_of[unit.name] += share
            if index in gradients:
                unit.gradients.append(gradients[index])
                trained_bytes[unit.name] += share
        for name, unit in self._units.items():
            unit.gathered = self._storage(f"gathered {name}", bytes_of[name] * world_size, Kind.TEMPORARY, name)
            unit.reduced = self._storage(f"to reduce {name}", trained_bytes[name] * world_size, Kind.TEMPORARY, name)
            unit.shard_gradient = self._storage(f"gradients of shards {name}", trained_bytes[name], Kind.GRADIENT, name)

    def _storage(self, name: str, size_bytes: int, kind: Kind, module: str) -> int:
        self._storages.append(
            Storage(name=name, size_bytes=size_bytes, kind=kind, dtype="uint8", shape=(size_bytes,), module=module)
        )
        return len(self._storages) - 1

    def _unit_of(self, path: str) -> str:
        return next((name for name in self._names if path == name or path.startswith(f"{name}.")), ROOT)

    def _ends(self, instructions: Sequence[Instruction]) -> dict[str, tuple[int, int]]:
        """Where each unit that has parameters runs first and last."""
        spans: dict[str, tuple[int, int]] = {}
        for place, each in enumerate(instructions):
            if isinstance(each, Compute):
                name = self._unit_of(self._graph.operation(each.operation).module)
                if self._units[name].parameters:
                    spans[name] = spans.get(name, (place, place))[0], place
        return spans

    def _at(self, spans: dict[str, tuple[int, int]], place: int, *, first: bool) -> list[_Unit]:
        return [self._units[name] for name, ends in spans.items() if name != ROOT and ends[0 if first else 1] == place]

    def _ask_before(self, name: str, asked: set[str]) -> Iterator[Instruction]:
        """Gather the unit that ran before this one in the forward pass."""
        place = len(self._order) if name == ROOT else self._order.index(name) if name in self._order else 0
        if place and self._order[place - 1] not in asked and self._order[place - 1] in self._spans[Phase.BACKWARD]:
            asked.add(self._order[place - 1])
            yield from self._gather(self._units[self._order[place - 1]])

    def _gather(self, unit: _Unit) -> Iterator[Instruction]:
        yield self._run(f"all-gather {unit.name}", outputs=(unit.gathered,))

    def _copy_out(self, unit: _Unit) -> Iterator[Instruction]:
        yield self._run(f"copy out {unit.name}", outputs=tuple(unit.parameters))

    def _reduce(self, unit: _Unit, reduced: list[_Unit]) -> Iterator[Instruction]:
        yield from map(Free, unit.parameters)
        if not unit.gradients:
            return
        yield from (Free(reduced.pop().reduced) for _ in list(reduced))
        yield self._run(f"reduce-scatter {unit.name}", outputs=(unit.reduced,))
        yield from map(Free, dict.fromkeys(unit.gradients))
        yield self._run(f"scattered {unit.name}", outputs=(unit.shard_gradient,))
        reduced.append(unit)

    def _run(self, name: str, outputs: tuple[int, ...]) -> Compute:
        number = len(self._graph.operations) + len(self._graph.alternatives) + len(self.operations)
        self.operations.append(
            Operation(name=name, target="memfit.collective", phase=Phase.FORWARD, inputs=(), outputs=outputs)
        )
        return Compute(number)
