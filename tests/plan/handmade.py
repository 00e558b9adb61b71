"""Tiny graphs written by hand, and random ones that mean something.

`graph_of` takes every operation as it is. `training` takes the layers of a model and adds their backward.
"""

import dataclasses
from collections.abc import Sequence

from hypothesis import strategies as st

from memfit.ir import Graph, Kind, Operation, Phase, Storage
from memfit.plan.problem import Costs, Problem, numbers

KIB = 1024


@dataclasses.dataclass(frozen=True)
class Step:
    """One operation, its storages by name."""

    name: str
    reads: str = ""
    makes: str = ""
    overwrites: str = ""  # in the eager run
    may_overwrite: str = ""  # in another run
    phase: Phase = Phase.FORWARD
    frame: int | None = None
    checkpoint: int | None = None
    time_us: float = 1.0
    in_place_us: float | None = None  # as `time_us` if not given
    workspace_bytes: int = 0


@dataclasses.dataclass(frozen=True)
class Layer:
    """A forward operation and what its backward reads besides the gradient of what it makes."""

    forward: Step
    saves: str = ""
    backward_overwrites: str = ""  # what its backward may write a gradient over
    backward_us: float = 1.0
    backward_workspace_bytes: int = 0
    lean_saves: str | None = None  # what another way of its backward reads
    lean_us: float = 1.0


@dataclasses.dataclass(frozen=True)
class Case:
    """A graph and what its operations take."""

    graph: Graph
    costs: Costs

    def problem(self) -> Problem:
        return Problem(self.graph, self.costs)

    def value(self, *names: str) -> int:
        """The set of the values of these names."""
        problem = self.problem()
        storages = [each.name for each in self.graph.storages]
        return sum(problem.bit[storages.index(name)] for name in names)


def graph_of(
    storages: dict[str, tuple[int, Kind]],
    steps: Sequence[Step],
    *,
    resident: str = "",
    tangents: str = "",
    held: str = "",
    written_back: str = "",
    alternatives: Sequence[Step] = (),
) -> Graph:
    """A graph from names separated by blanks; `storages` gives the size and kind of each."""
    names = list(storages)

    def indices(text: str) -> tuple[int, ...]:
        return tuple(names.index(name) for name in text.split())

    def operation(step: Step) -> Operation:
        may_overwrite = step.overwrites or step.may_overwrite
        return Operation(
            name=step.name,
            target=f"test.{step.name}",
            phase=step.phase,
            inputs=indices(step.reads),
            outputs=indices(step.makes),
            overwrites=names.index(step.overwrites) if step.overwrites else None,
            may_overwrite=names.index(may_overwrite) if may_overwrite else None,
            frame=step.frame,
            checkpoint=step.checkpoint,
            module=f"module.of.{step.name}",
        )

    return Graph(
        storages=tuple(
            Storage(name=name, size_bytes=size_bytes, kind=kind, dtype="uint8", shape=(size_bytes,))
            for name, (size_bytes, kind) in storages.items()
        ),
        operations=tuple(operation(step) for step in steps),
        resident=indices(resident),
        tangents=indices(tangents),
        held=indices(held),
        written_back=indices(written_back),
        alternatives=tuple(operation(step) for step in alternatives),
    )


def case_of(
    storages: dict[str, tuple[int, Kind]], steps: Sequence[Step], *, alternatives: Sequence[Step] = (), **names: str
) -> Case:
    every = (*steps, *alternatives)
    costs = Costs(
        time_us=[step.time_us for step in every],
        in_place_us=[step.time_us if step.in_place_us is None else step.in_place_us for step in every],
        workspace_bytes=[step.workspace_bytes for step in every],
    )
    return Case(graph_of(storages, steps, alternatives=alternatives, **names), costs)


def training(
    sizes: dict[str, int], layers: Sequence[Layer], *, alternatives: Sequence[Step] = (), written_back: str = ""
) -> Case:
    """A forward pass from the batch `x` to the output, the first thing the last layer makes, and its backward."""
    output = layers[-1].forward.makes.split()[0]
    backward = _Backward(sizes, output)
    for layer in reversed(layers):
        backward.add(layer)
    return case_of(
        {"x": (100 * KIB, Kind.BATCH)}
        | {name: (size, Kind.ACTIVATION) for name, size in sizes.items()}
        | backward.storages,
        [*(layer.forward for layer in layers), *backward.steps],
        resident="x",
        tangents="tangent",
        held=" ".join([output, *(name for name, (_, kind) in backward.storages.items() if kind is Kind.GRADIENT)]),
        written_back=written_back,
        alternatives=[*alternatives, *backward.alternatives],
    )


class _Backward:
    """The backward of layers, last layer first: each makes the gradients of what it reads, and of a weight."""

    def __init__(self, sizes: dict[str, int], output: str) -> None:
        self.storages = {"tangent": (sizes[output], Kind.TEMPORARY)}
        self.steps: list[Step] = []
        self.alternatives: list[Step] = []
        self._sizes = sizes
        self._gradients = {output: "tangent"}

    def add(self, layer: Layer) -> None:
        forward = layer.forward
        known = [self._gradients[name] for name in forward.makes.split() if name in self._gradients]
        inputs = [name for name in forward.reads.split() if name != "x"]
        made = [self._new(f"grad_{name}", name) for name in inputs]
        self.storages[f"weight_{forward.name}"] = (10 * KIB, Kind.GRADIENT)
        step = Step(
            f"back_{forward.name}",
            reads=" ".join((*known, layer.saves)),
            makes=" ".join((*made, f"weight_{forward.name}")),
            may_overwrite=layer.backward_overwrites,
            phase=Phase.BACKWARD,
            time_us=layer.backward_us,
            workspace_bytes=layer.backward_workspace_bytes,
        )
        self.steps.append(step)
        if layer.lean_saves is not None:
            reads = " ".join((*known, layer.lean_saves))
            lean = dataclasses.replace(step, name=f"lean_{forward.name}", reads=reads, may_overwrite="")
            self.alternatives.append(dataclasses.replace(lean, time_us=layer.lean_us))
        for name, gradient in zip(inputs, made, strict=True):
            self._gradients[name] = self._sum(name, gradient) if name in self._gradients else gradient

    def _sum(self, value: str, gradient: str) -> str:
        """The second gradient of a value is added to the first, in place."""
        first = self._gradients[value]
        total = self._new(f"sum_{value}", value)
        step = Step(total, reads=f"{first} {gradient}", makes=total, phase=Phase.BACKWARD)
        if first != "tangent":
            step = dataclasses.replace(step, overwrites=first)
        self.steps.append(step)
        return total

    def _new(self, prefix: str, value: str) -> str:
        name = f"{prefix}_{sum(each.startswith(prefix) for each in self.storages)}"
        self.storages[name] = (self._sizes[value], Kind.TEMPORARY)
        return name


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


@dataclasses.dataclass(frozen=True, kw_only=True)
class Features:
    """What a random model may have."""

    most_layers: int = 4
    several_outputs: bool = False
    workspaces: bool = False
    in_place: bool = False
    in_place_backward: bool = False  # over a value of the forward pass
    in_place_is_faster: bool = False
    alternatives: bool = False
    buffers: bool = False


@st.composite
def trainings(draw: st.DrawFn, features: Features) -> Case:
    """A small model and its backward. Sizes are such that no value is small, see Note [Small values]."""
    sizes: dict[str, int] = {}
    count = draw(st.integers(2, features.most_layers))
    layers = [_layer(draw, features, number, sizes, is_last=number == count - 1) for number in range(count)]
    output = layers[-1].forward.makes.split()[0]
    inner = [name for name in sizes if name != output]
    written_back = draw(st.lists(st.sampled_from(inner), max_size=1)) if features.buffers and inner else []
    alternatives: list[Step] = []
    if features.alternatives and inner:
        value = draw(st.sampled_from(inner))
        sizes[f"{value}_bits"] = 50 * KIB
        alternatives = [*_packing(draw, value), *_again(draw, [layer.forward for layer in layers[:-1]])]
        layers = [_with_lean(draw, layer, value) for layer in layers]
    layers = [_in_place_if_it_can(number, layers, written_back) for number in range(len(layers))]
    return training(sizes, layers, alternatives=alternatives, written_back=" ".join(written_back))


def _layer(draw: st.DrawFn, features: Features, number: int, sizes: dict[str, int], *, is_last: bool) -> Layer:
    """A layer that reads what earlier ones made; what it makes is added to `sizes`."""
    reads = draw(st.lists(st.sampled_from(["x", *sizes]), unique=True, min_size=1, max_size=2))
    makes = [f"v{number}", f"w{number}"][: draw(st.integers(1, 2)) if features.several_outputs and not is_last else 1]
    taken = draw(st.sampled_from(["", *(name for name in reads if name != "x")])) if features.in_place else ""
    sizes |= {name: 100 * KIB * draw(st.integers(1, 5)) for name in makes}
    if taken:
        sizes[makes[0]] = sizes[taken]
    saved = draw(st.lists(st.sampled_from([*reads, *makes]), unique=True, max_size=2))
    time_us = float(draw(st.integers(1, 20)))
    forward = Step(
        f"f{number}",
        reads=" ".join(reads),
        makes=" ".join(makes),
        may_overwrite=taken,
        time_us=time_us,
        in_place_us=time_us / draw(st.integers(1, 4)) if taken and features.in_place_is_faster else None,
        workspace_bytes=_workspace(draw, features),
    )
    over = [name for name in saved if name in reads and name != "x"]
    return Layer(
        forward,
        saves=" ".join(saved),
        backward_overwrites=draw(st.sampled_from(["", *over])) if features.in_place_backward else "",
        backward_workspace_bytes=_workspace(draw, features),
    )


def _workspace(draw: st.DrawFn, features: Features) -> int:
    return 100 * KIB * draw(st.integers(0, 2)) if features.workspaces else 0


def _in_place_if_it_can(number: int, layers: Sequence[Layer], written_back: Sequence[str]) -> Layer:
    """A layer that overwrites what it may, unless that is read afterwards."""
    layer = layers[number]
    read = [name for each in layers for name in each.saves.split()]
    read += [name for each in layers[number + 1 :] for name in each.forward.reads.split()]
    taken = layer.forward.may_overwrite
    if not taken or taken in (*read, *written_back):
        return layer
    return dataclasses.replace(layer, forward=dataclasses.replace(layer.forward, overwrites=taken))


def _packing(draw: st.DrawFn, value: str) -> list[Step]:
    """A smaller form of a value, and maybe the way back."""
    times_us = st.sampled_from([0.5, 4.0])
    pack = Step(f"pack_{value}", reads=value, makes=f"{value}_bits", time_us=draw(times_us))
    unpack = Step(f"unpack_{value}", reads=f"{value}_bits", makes=value, time_us=draw(times_us))
    return [pack, unpack][: draw(st.integers(1, 2))]


def _with_lean(draw: st.DrawFn, layer: Layer, value: str) -> Layer:
    """Maybe a backward that reads the smaller form."""
    saved = layer.saves.split()
    if value not in saved or not draw(st.booleans()):
        return layer
    lean_saves = " ".join(f"{name}_bits" if name == value else name for name in saved)
    return dataclasses.replace(layer, lean_saves=lean_saves, lean_us=draw(st.sampled_from([1.0, 3.0])))


def _again(draw: st.DrawFn, steps: Sequence[Step]) -> list[Step]:
    """A faster way to make the first output of some operation."""
    step = draw(st.sampled_from([None, *steps]))
    if step is None:
        return []
    return [Step(f"again_{step.name}", reads=step.reads, makes=step.makes.split()[0], time_us=step.time_us / 2)]


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


def names_of(problem: Problem, values: int) -> list[str]:
    """What the values of a set are called."""
    return [problem.graph.storages[problem.storages[number]].name for number in numbers(values)]
