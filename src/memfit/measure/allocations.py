"""What operations of a graph allocate: measured sizes and workspaces, and which of them allocate nothing beside."""

import dataclasses
from collections.abc import Mapping

from memfit.ir import Graph, Operation
from memfit.measure.cost import OperatorCost
from memfit.measure.probe import Progress, measured_costs


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
    """Believe what operators were seen to make more than what the trace says they make."""
    storages = list(graph.storages)
    for operation in graph.operations:
        cost = costs.get(operation.signature)
        if cost is not None and len(cost.output_bytes) == len(operation.outputs):
            for index, size_bytes in zip(operation.outputs, cost.output_bytes, strict=True):
                storages[index] = dataclasses.replace(storages[index], size_bytes=size_bytes)
        if operation.overwrites is not None:  # the result is in that storage, however big it is
            size_bytes = storages[operation.overwrites].size_bytes
            storages[operation.outputs[0]] = dataclasses.replace(storages[operation.outputs[0]], size_bytes=size_bytes)
    return dataclasses.replace(graph, storages=tuple(storages))


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
