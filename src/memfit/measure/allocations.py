"""What operations of a graph allocate: measured sizes and workspaces, and which of them allocate nothing beside."""

import dataclasses
from collections.abc import Mapping

from memfit.ir import Graph, Operation
from memfit.measure.cost import OperatorCost
from memfit.measure.probe import Progress, measured_costs

_COPY_STORAGES = {
    "aten.as_strided_scatter.default",
    "aten.copy.default",
    "aten.diagonal_scatter.default",
    "aten.select_scatter.default",
    "aten.slice_scatter.default",
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Quiet:
    """Operations that were seen to allocate nothing but their results.

    In a call of other sizes with the same operations they are not run to learn it again: what allocates nothing inside
    at one size does not at another. Those that do are run at every size.
    """

    structure: tuple[tuple[str, str], ...]  # names and targets of all operations and alternatives
    names: frozenset[str]

    @classmethod
    def of(cls, traced: Graph, costs: Mapping[str, OperatorCost]) -> "Quiet":
        return cls(
            structure=_structure(traced),
            names=frozenset(each.name for each in _all(traced) if _is_quiet(traced, each, costs.get(each.signature))),
        )

    def in_graph(self, graph: Graph) -> frozenset[str]:
        return self.names if _structure(graph) == self.structure else frozenset()


def operator_costs(
    graph: Graph,
    device: str,
    progress: Progress | None,
    quiet: frozenset[str] = frozenset(),
    *,
    room_bytes: int | None = None,
) -> dict[str, OperatorCost]:
    """Measure workspaces and real sizes of all operations but those that are known to be quiet.

    No probe takes more than `room_bytes`: what is too big for that has a bound of its workspace.
    """
    wanted = [each for each in _all(graph) if each.signature and each.name not in quiet]
    made_bytes = {each.signature: sum(graph.storages[index].size_bytes for index in each.outputs) for each in wanted}
    return measured_costs(made_bytes, device=device, progress=progress, room_bytes=room_bytes, made_bytes=made_bytes)


def with_real_sizes(graph: Graph, costs: Mapping[str, OperatorCost]) -> Graph:
    """Believe what operators were seen to make more than what the trace says they make.

    Some copy the whole storage that their first argument is a view of, which is not there when they are run alone. What
    takes over an input takes over all of its storage.
    """
    sizes_bytes = [each.size_bytes for each in graph.storages]
    for operation in graph.operations:
        for index, size_bytes in zip(operation.outputs, _made_bytes(operation, costs), strict=False):
            sizes_bytes[index] = size_bytes
        first = operation.outputs[0] if operation.outputs else -1
        if operation.target in _COPY_STORAGES and operation.inputs:
            sizes_bytes[first] = sizes_bytes[operation.inputs[0]]
        if operation.overwrites is not None:
            sizes_bytes[first] = max(sizes_bytes[first], sizes_bytes[operation.overwrites])
    storages = zip(graph.storages, sizes_bytes, strict=True)
    return dataclasses.replace(
        graph, storages=tuple(dataclasses.replace(each, size_bytes=size_bytes) for each, size_bytes in storages)
    )


def _made_bytes(operation: Operation, costs: Mapping[str, OperatorCost]) -> tuple[int, ...]:
    """Sizes of what an operation was seen to make; none where that is not known."""
    cost = costs.get(operation.signature)
    if cost is None or len(cost.output_bytes) != len(operation.outputs) or operation.target in _COPY_STORAGES:
        return ()
    return tuple(cost.output_bytes)


def workspace_bytes(graph: Graph, operation: Operation, costs: Mapping[str, OperatorCost]) -> int:
    """What an operation allocates beyond the values in the graph; results nobody asked for included."""
    cost = costs.get(operation.signature)
    if cost is None:
        return 0
    wanted_bytes = sum(graph.storages[index].size_bytes for index in operation.outputs)
    return cost.workspace_bytes + max(0, sum(cost.output_bytes) - wanted_bytes)


def _is_quiet(graph: Graph, operation: Operation, cost: OperatorCost | None) -> bool:
    sizes = tuple(graph.storages[index].size_bytes for index in operation.outputs)
    return cost is not None and not cost.workspace_bytes and tuple(cost.output_bytes) == sizes


def _structure(graph: Graph) -> tuple[tuple[str, str], ...]:
    return tuple((each.name, each.target) for each in _all(graph))


def _all(graph: Graph) -> tuple[Operation, ...]:
    return (*graph.operations, *graph.alternatives)
