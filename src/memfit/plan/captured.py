"""The step a plan was made for: all it takes to walk it again, planned and unplanned, without the model.

Note [Columns]
    Written as columns rather than rows, and words that come again and again (modules, operators) once each: a step
    of GPT-2 takes a quarter of a megabyte this way. Lines of the user's code and signatures of operators are left
    out; neither is part of a graph's digest.
"""

import dataclasses
import json
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Self

from memfit.ir import (
    FORMAT_VERSION,
    GRAPH_FORMAT,
    Graph,
    Kind,
    LossMemory,
    Operation,
    OptimizerMemory,
    Phase,
    Program,
    Storage,
)
from memfit.plan.allocator.sizes import MIN_BLOCK_BYTES
from memfit.plan.identity import identity_program
from memfit.plan.problem import Costs, handed_out_together
from memfit.plan.reserved import ReservedMemory, reserved_memory

_KINDS = tuple(Kind)
_PHASES = tuple(Phase)


@dataclasses.dataclass(frozen=True, kw_only=True)
class CapturedStep:
    """What a step computes and what its operations take."""

    eager: Graph  # as the plain eager run computes it
    eager_workspace_bytes: tuple[int, ...]  # by operation, then by alternative
    rewritten: Graph | None  # as a plan runs it, if techniques changed the graph before planning
    workspace_bytes: tuple[int, ...]  # by operation of `graph`, then by alternative
    time_us: tuple[float, ...]
    in_place_us: tuple[float, ...]
    optimizer: OptimizerMemory
    granularity_bytes: int
    loss: LossMemory | None = None  # None: inside the model, or not counted

    @classmethod
    def of(
        cls,
        *,
        eager: Graph,
        eager_workspace_bytes: Sequence[int],
        graph: Graph,
        costs: Costs,
        optimizer: OptimizerMemory,
        granularity_bytes: int,
        loss: LossMemory | None = None,
    ) -> Self:
        """Keep what a walk needs of a step; `graph` is what the program of a plan is written for."""
        trimmed = _trimmed(eager)
        planned = _trimmed(graph)
        return cls(
            eager=trimmed,
            eager_workspace_bytes=tuple(eager_workspace_bytes),
            rewritten=None if handed_out_together(trimmed) == planned else planned,
            workspace_bytes=tuple(costs.workspace_bytes),
            time_us=tuple(round(each, 2) for each in costs.time_us),
            in_place_us=tuple(round(each, 2) for each in costs.in_place_us),
            optimizer=optimizer,
            granularity_bytes=granularity_bytes,
            loss=loss,
        )

    @property
    def graph(self) -> Graph:
        """What the program of a plan is written for."""
        return handed_out_together(self.eager) if self.rewritten is None else self.rewritten

    def unplanned_program(self) -> Program:
        """What the eager run does."""
        return identity_program(self.eager)

    def reserved(self, program: Program) -> ReservedMemory | None:
        """Simulate CUDA's caching allocator under a program for `graph`; None where the step is for another device."""
        if self.granularity_bytes != MIN_BLOCK_BYTES:
            return None
        return reserved_memory(
            self.graph, program, workspace_bytes=self.workspace_bytes, optimizer=self.optimizer, loss=self.loss
        )

    def to_data(self) -> dict[str, Any]:
        """As JSON can have it, see Note [Columns]."""
        return {
            "eager": _graph_to_columns(self.eager),
            "eager_workspace_bytes": list(self.eager_workspace_bytes),
            "rewritten": None if self.rewritten is None else _graph_to_columns(self.rewritten),
            "workspace_bytes": list(self.workspace_bytes),
            "time_us": [_finite(each) for each in self.time_us],
            "in_place_us": [_finite(each) for each in self.in_place_us],
            "optimizer": _optimizer_to_data(self.optimizer),
            "granularity_bytes": self.granularity_bytes,
        } | ({} if self.loss is None else {"loss": dataclasses.asdict(self.loss)})

    @classmethod
    def from_data(cls, data: Mapping[str, Any]) -> Self:
        """Read what `to_data` wrote; raises KeyError, TypeError, ValueError or InvalidFile for anything else."""
        step = cls(
            eager=_graph_from_columns(data["eager"]),
            eager_workspace_bytes=_bytes(data["eager_workspace_bytes"]),
            rewritten=None if data["rewritten"] is None else _graph_from_columns(data["rewritten"]),
            workspace_bytes=_bytes(data["workspace_bytes"]),
            time_us=_times(data["time_us"]),
            in_place_us=_times(data["in_place_us"]),
            optimizer=_optimizer(data["optimizer"]),
            granularity_bytes=_bytes([data["granularity_bytes"]])[0],
            loss=_loss(data["loss"]) if "loss" in data else None,
        )
        step._check_lengths()
        return step

    def _check_lengths(self) -> None:
        for noun, graph, columns in (
            ("eager", self.eager, (self.eager_workspace_bytes,)),
            ("planned", self.graph, (self.workspace_bytes, self.time_us, self.in_place_us)),
        ):
            count = len(graph.operations) + len(graph.alternatives)
            if any(len(column) != count for column in columns):
                raise ValueError(f"costs of the {noun} step are not of its {count} operations")
        if self.granularity_bytes < 1:
            raise ValueError(f"blocks of {self.granularity_bytes} bytes")


def _trimmed(graph: Graph) -> Graph:
    """Without what neither a walk nor a digest reads."""
    return dataclasses.replace(
        graph,
        storages=tuple(dataclasses.replace(each, source="") for each in graph.storages),
        operations=tuple(_trimmed_operation(each) for each in graph.operations),
        alternatives=tuple(_trimmed_operation(each) for each in graph.alternatives),
    )


def _trimmed_operation(operation: Operation) -> Operation:
    return dataclasses.replace(operation, signature="", flops=0, source="")


class _Words:
    """Words by number, in the order they are first asked for."""

    def __init__(self) -> None:
        self.numbers: dict[str, int] = {}

    def numbered(self, words: Iterable[str]) -> list[int]:
        return [self.numbers.setdefault(word, len(self.numbers)) for word in words]


def _graph_to_columns(graph: Graph) -> dict[str, Any]:
    words = _Words()
    return {
        "storages": _storages_to_columns(graph.storages, words),
        "operations": _operations_to_columns(graph.operations, words),
        "alternatives": _operations_to_columns(graph.alternatives, words),
        "resident": list(graph.resident),
        "tangents": list(graph.tangents),
        "held": list(graph.held),
        "written_back": list(graph.written_back),
        "trained": [list(pair) for pair in graph.trained],
        "words": list(words.numbers),
    }


def _storages_to_columns(storages: Sequence[Storage], words: _Words) -> dict[str, Any]:
    return {
        "name": [each.name for each in storages],
        "size_bytes": [each.size_bytes for each in storages],
        "kind": [_KINDS.index(each.kind) for each in storages],
        "shape": [list(each.shape) for each in storages],
        "dtype": words.numbered(each.dtype for each in storages),
        "module": words.numbered(each.module for each in storages),
    }


def _operations_to_columns(operations: Sequence[Operation], words: _Words) -> dict[str, Any]:
    return {
        "name": [each.name for each in operations],
        "phase": [_PHASES.index(each.phase) for each in operations],
        "inputs": [list(each.inputs) for each in operations],
        "outputs": [list(each.outputs) for each in operations],
        "overwrites": [each.overwrites for each in operations],
        "may_overwrite": [each.may_overwrite for each in operations],
        "random": [number for number, each in enumerate(operations) if each.random],
        "frame": [each.frame for each in operations],
        "checkpoint": {
            str(number): each.checkpoint for number, each in enumerate(operations) if each.checkpoint is not None
        },
        "target": words.numbered(each.target for each in operations),
        "technique": words.numbered(each.technique for each in operations),
        "module": words.numbered(each.module for each in operations),
    }


def _graph_from_columns(data: Mapping[str, Any]) -> Graph:
    """By way of the rows that `Graph.from_json` reads and checks."""
    words = data["words"]
    if not all(isinstance(word, str) for word in words):
        raise ValueError("words that are not text")
    content = {
        "format": GRAPH_FORMAT,
        "version": FORMAT_VERSION,
        "storages": _storage_rows(data["storages"], words),
        "operations": _operation_rows(data["operations"], words),
        "alternatives": _operation_rows(data["alternatives"], words),
        **{name: data[name] for name in ("resident", "tangents", "held", "written_back", "trained")},
    }
    return Graph.from_json(json.dumps(content))


def _storage_rows(columns: Mapping[str, Any], words: Sequence[str]) -> list[dict[str, Any]]:
    return [
        {
            "name": _text(name),
            "size_bytes": size_bytes,
            "kind": _at(_KINDS, kind),
            "shape": shape,
            "dtype": _at(words, dtype),
            "module": _at(words, module),
        }
        for name, size_bytes, kind, shape, dtype, module in zip(
            *(columns[each] for each in ("name", "size_bytes", "kind", "shape", "dtype", "module")), strict=True
        )
    ]


def _operation_rows(columns: Mapping[str, Any], words: Sequence[str]) -> list[dict[str, Any]]:
    plain = ("inputs", "outputs", "overwrites", "may_overwrite", "frame")
    numbered = ("target", "technique", "module")
    random = set(columns["random"])
    rows = []
    for number, name in enumerate(columns["name"]):
        row = {each: columns[each][number] for each in plain}
        row |= {each: _at(words, columns[each][number]) for each in numbered}
        row |= {"name": _text(name), "phase": _at(_PHASES, columns["phase"][number]), "random": number in random}
        rows.append(row | {"checkpoint": columns["checkpoint"].get(str(number))})
    return rows


def _at(table: Sequence[str], number: Any) -> str:
    if type(number) is not int or not 0 <= number < len(table):
        raise ValueError(f"entry {number!r} of {len(table)}")
    return table[number]


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise TypeError(f"a name is {value!r}")
    return value


def _bytes(values: Iterable[Any]) -> tuple[int, ...]:
    found = tuple(values)
    for value in found:
        if type(value) is not int or value < 0:
            raise ValueError(f"a size of {value!r}")
    return found


def _optimizer_to_data(optimizer: OptimizerMemory) -> dict[str, Any]:
    """Write sums alone: blocks are many, and what they lead to is in the plan."""
    data = dataclasses.asdict(optimizer)
    del data["blocks"]
    return data


def _optimizer(data: Mapping[str, Any]) -> OptimizerMemory:
    """Read an optimizer's memory; files of earlier versions have no changes."""
    changes = tuple(data.get("changes_bytes", ()))
    if any(type(change) is not int for change in changes):
        raise ValueError(f"changes of {changes!r} bytes")
    state_bytes, workspace_bytes = _bytes(data[name] for name in ("state_bytes", "workspace_bytes"))
    return OptimizerMemory(state_bytes=state_bytes, workspace_bytes=workspace_bytes, changes_bytes=changes)


def _loss(data: Mapping[str, Any]) -> LossMemory:
    sizes = {name: value for name, value in data.items() if name != "starts"}
    return LossMemory(**dict(zip(sizes, _bytes(sizes.values()), strict=True)), starts=starts_of(data))


def starts_of(data: Mapping[str, Any]) -> tuple[tuple[int, ...] | None, ...]:
    """Read how gradients of outputs come; files of earlier versions do not say."""
    return tuple(None if axes is None else _bytes(axes) for axes in data.get("starts", ()))


def _times(values: Iterable[Any]) -> tuple[float, ...]:
    """Times in microseconds; what may not be run takes for ever, which JSON has no number for."""
    times = tuple(math.inf if value is None else value for value in values)
    for value in times:
        if isinstance(value, bool) or not isinstance(value, int | float) or not value >= 0:
            raise ValueError(f"a time of {value!r}")
    return times


def _finite(time_us: float) -> float | None:
    return None if math.isinf(time_us) else time_us
