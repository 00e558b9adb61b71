"""Tiny graphs written by hand, and random ones that mean something."""

import dataclasses
from collections.abc import Sequence

from hypothesis import strategies as st

from memfit.ir import Graph, Kind, Operation, Phase, Storage


@dataclasses.dataclass(frozen=True)
class Step:
    """One operation, its storages by name."""

    name: str
    reads: str = ""
    makes: str = ""
    overwrites: str = ""
    phase: Phase = Phase.FORWARD
    frame: int | None = None
    checkpoint: int | None = None


def graph_of(
    storages: dict[str, tuple[int, Kind]],
    steps: Sequence[Step],
    *,
    resident: str = "",
    tangents: str = "",
    held: str = "",
    written_back: str = "",
) -> Graph:
    """A graph from names separated by blanks; `storages` gives the size and kind of each."""
    names = list(storages)

    def indices(text: str) -> tuple[int, ...]:
        return tuple(names.index(name) for name in text.split())

    return Graph(
        storages=tuple(
            Storage(name=name, size_bytes=size_bytes, kind=kind, dtype="uint8", shape=(size_bytes,))
            for name, (size_bytes, kind) in storages.items()
        ),
        operations=tuple(
            Operation(
                name=step.name,
                target=f"test.{step.name}",
                phase=step.phase,
                inputs=indices(step.reads),
                outputs=indices(step.makes),
                overwrites=names.index(step.overwrites) if step.overwrites else None,
                may_overwrite=names.index(step.overwrites) if step.overwrites else None,
                frame=step.frame,
                checkpoint=step.checkpoint,
                module=f"module.of.{step.name}",
            )
            for step in steps
        ),
        resident=indices(resident),
        tangents=indices(tangents),
        held=indices(held),
        written_back=indices(written_back),
    )


@st.composite
def graphs(draw: st.DrawFn) -> Graph:
    """A forward and a backward pass in which every value is made before it is read."""
    storages = [_storage(draw, "weight", Kind.PARAMETER), _storage(draw, "batch", Kind.BATCH)]
    operations: list[Operation] = []
    readable = [0, 1]
    forward_values: list[int] = []
    for phase, kind in ((Phase.FORWARD, Kind.ACTIVATION), (Phase.BACKWARD, Kind.TEMPORARY)):
        if phase is Phase.BACKWARD:
            storages.append(_storage(draw, "tangent", Kind.TEMPORARY))
            readable.append(len(storages) - 1)
            tangent = len(storages) - 1
            forward_values = [index for operation in operations for index in operation.outputs]
        for _ in range(draw(st.integers(min_value=1, max_value=5))):
            inputs = draw(st.lists(st.sampled_from(readable), unique=True, max_size=3))
            count = draw(st.integers(min_value=1, max_value=2))
            outputs = range(len(storages), len(storages) + count)
            storages += [_storage(draw, f"value{index}", kind) for index in outputs]
            name = f"operation{len(operations)}"
            frame = draw(st.none() | st.integers(0, 1)) if phase is Phase.BACKWARD else None
            operations.append(
                Operation(
                    name=name, target=name, phase=phase, inputs=tuple(inputs), outputs=tuple(outputs), frame=frame
                )
            )
            readable += outputs
    made = [index for operation in operations for index in operation.outputs]
    held = draw(st.lists(st.sampled_from(made), unique=True))
    read_in_backward = {
        index for operation in operations if operation.phase is Phase.BACKWARD for index in operation.inputs
    }
    buffer_values = [index for index in forward_values if index not in held and index not in read_in_backward]
    written_back = draw(st.lists(st.sampled_from(buffer_values), unique=True)) if buffer_values else []
    graph = Graph(
        storages=tuple(storages),
        operations=tuple(operations),
        resident=(0, 1),
        tangents=(tangent,),
        held=tuple(held),
        written_back=tuple(written_back),
    )
    return _with_overwriting(draw, graph)


def _storage(draw: st.DrawFn, name: str, kind: Kind) -> Storage:
    size_bytes = draw(st.integers(min_value=0, max_value=1000))
    return Storage(name=name, size_bytes=size_bytes, kind=kind, dtype="uint8", shape=(size_bytes,))


def _with_overwriting(draw: st.DrawFn, graph: Graph) -> Graph:
    """Let some operations take over an input that nothing reads afterwards."""
    kept = {*graph.resident, *graph.tangents, *graph.held, *graph.written_back}
    operations = list(graph.operations)
    for position, operation in enumerate(operations):
        later = {index for other in operations[position + 1 :] for index in other.inputs}
        dying = [index for index in operation.inputs if index not in kept and index not in later]
        if dying and draw(st.booleans()):
            operations[position] = dataclasses.replace(operation, overwrites=dying[0], may_overwrite=dying[0])
    return dataclasses.replace(graph, operations=tuple(operations))
