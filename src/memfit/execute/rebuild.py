"""Write a joint graph again in the order of a program.

Note [Generations]
    A storage that is made again is the same storage with another memory: another generation. An
    operation reads the newest generation that is live, `Free` and overwriting end the newest. All
    generations hold the same numbers, so it does not matter which of two live ones is read.
    Views are derived from the generation's own tensor when they are first needed.

Note [What crosses]
    From the forward to the backward pass goes one tensor a storage, the one its operation made;
    views of it are derived again. Arguments of the call cross as they are, except those that the
    forward changes (the running statistics of a BatchNorm): what is computed again must see the
    old value, so a copy of it crosses if it is small. A big one would break the budget unseen and
    is refused. New values of buffers are taken from the first run alone, so a buffer moves once.

Note [Retained graphs]
    What crossed may be overwritten in the backward pass, unless the caller keeps the graph for
    another backward: then a copy is.
"""

import operator
from collections import Counter, defaultdict
from typing import Any

import torch
from torch import fx

from memfit import _torch
from memfit.accelerator import is_accelerator
from memfit.capture.nodes import tensors_of
from memfit.capture.trace import ROOT
from memfit.errors import ExecutionError
from memfit.execute.codegen import OVERWRITES
from memfit.execute.rng import generator_state, replaying
from memfit.execute.values import Values, is_given
from memfit.ir import ACCUMULATE, Compute, Graph, Instruction, Operation, Phase, Program
from memfit.ops.inplace import in_place_form
from memfit.ops.offload import bring_back
from memfit.tensors import storage_bytes
from memfit.transfers import arrived

_LARGEST_COPY_BYTES = 2**18  # of a changed argument, see Note [What crosses]
OPERATION = "memfit_operation"  # mark on calls that run an operation: its number, and whether in place
_TAGS = {Phase.FORWARD: "must_be_in_forward", Phase.BACKWARD: "must_be_in_backward"}


def rebuild(
    joint: fx.GraphModule, graph: Graph, program: Program, forward_outputs: int
) -> tuple[fx.GraphModule, list[fx.Node]]:
    """The joint graph in the program's order, and what crosses from the forward to the backward pass."""
    builder = ProgramBuilder(joint.graph, graph, program)
    output = joint.graph.output_node()
    outputs: Any = output.args[0]
    results = builder.run(program.forward, outputs[:forward_outputs])
    builder.turn_around()
    results += builder.run(program.backward, outputs[forward_outputs:])
    builder.graph.output(results).meta.update(output.meta)
    return _torch.graph_module(joint, builder.graph), list(builder.saved)


class _Generation:
    """One life of a storage, see Note [Generations]."""

    def __init__(self) -> None:
        self.results: dict[int, fx.Node] = {}  # by place
        self.views: dict[fx.Node, fx.Node] = {}
        self.crossed = False  # made in the forward pass, read in the backward pass
        self.is_coming = False  # on its way to an accelerator, see Note [A stream of its own] in `transfers.py`


class ProgramBuilder:
    """Writes the instructions of a program as nodes of a new graph."""

    def __init__(self, joint: fx.Graph, graph: Graph, program: Program) -> None:
        self.graph = fx.Graph()
        self.saved: dict[fx.Node, None] = {}
        self._ir = graph
        self._lasting = {*graph.resident, *graph.tangents, *graph.held}
        self._written_back = {*graph.written_back}  # copied when the forward pass ends
        self._values = Values(joint, graph)
        self._phase = Phase.FORWARD
        self._given = {node: self.graph.node_copy(node) for node in joint.nodes if is_given(node)}
        self._last_given = next(iter(reversed(self.graph.nodes)), None)
        self._given_views: dict[fx.Node, fx.Node] = {}
        self._changed = _changed_arguments(joint)
        self._copies: dict[fx.Node, fx.Node] = {}
        self._live: dict[int, list[_Generation]] = defaultdict(list)
        self._freed: dict[int, _Generation] = {}  # the last that was freed, for results of the pass
        self._ran: set[int] = set()
        self._drawn_again = _drawn_again(graph, program)
        self._states: dict[int, fx.Node] = {}
        self._running: Operation | None = None
        self._last_call: fx.Node | None = None

    def run(self, instructions: tuple[Instruction, ...], outputs: list[Any]) -> list[Any]:
        """Write one pass; its outputs in the rebuilt graph are returned."""
        for instruction in instructions:
            if not isinstance(instruction, Compute):
                self._free(instruction.storage)
            elif self._ir.operation(instruction.operation).target != ACCUMULATE:  # autograd does that outside
                self._compute(instruction)
        self._running = None
        return [self._fetch(node) if isinstance(node, fx.Node) else node for node in outputs]

    def turn_around(self) -> None:
        """From the forward to the backward pass."""
        self._phase = Phase.BACKWARD
        self._given_views.clear()
        self._freed.clear()
        for generations in self._live.values():
            for generation in generations:
                generation.views.clear()
                generation.crossed = True

    def _compute(self, instruction: Compute) -> None:
        index = instruction.operation
        operation = self._running = self._ir.operation(index)
        node = self._values.node(operation)
        target = node.target
        args: tuple[Any, ...] = fx.node.map_arg(node.args, self._fetch)
        kwargs = fx.node.map_arg(node.kwargs, self._fetch)
        if instruction.in_place:
            args = (self._overwritten(operation, node, args[0]), *args[1:])
        if operation.random:
            target, args = self._drawing(index, node, target, args, in_place=instruction.in_place)
        call = self._call(target, args, kwargs, node)
        call.meta[OVERWRITES] = instruction.in_place and target is node.target
        self._add_results(operation, call)
        if target is bring_back and is_accelerator(tensors_of(node)[0].device):
            for storage in operation.outputs:
                self._live[storage][-1].is_coming = True
        call.meta[OPERATION] = (index, instruction.in_place)
        self._last_call = call
        self._ran.add(index)

    def _overwritten(self, operation: Operation, node: fx.Node, argument: fx.Node) -> fx.Node:
        """End the life of what an operation writes over, see Note [Retained graphs]."""
        storage = operation.may_overwrite
        source: Any = node.args[0]
        if (
            storage is None
            or storage in self._lasting
            or (self._phase is Phase.FORWARD and storage in self._written_back)
            or self._values.storage(source) != storage
            or in_place_form(node.target) is None
        ):
            raise ExecutionError(
                f"the program runs {operation.name!r} ({operation.target}) in place, which it cannot: its first "
                "argument is not a value that may be overwritten; plan this model again"
            )
        generation = self._live[storage].pop()
        self._freed.pop(storage, None)
        return self._call(owned, (argument,), {}, source) if generation.crossed else argument

    def _drawing(
        self, index: int, node: fx.Node, target: Any, args: tuple[Any, ...], *, in_place: bool
    ) -> tuple[Any, tuple[Any, ...]]:
        """See Note [Replayed draws] in `rng.py`."""
        device = tensors_of(node)[0].device
        if index in self._ran:
            state = self._crossing(self._states[index])
            return replaying(in_place_form(target) if in_place else target, device), (state, *args)
        if index in self._drawn_again:
            if node.kwargs.get("generator") is not None:
                raise ExecutionError(
                    f"the program runs {node.name!r} again, which draws from a generator of the model's own; keep its "
                    "result, or use the default generator"
                )
            self._states[index] = self._call(generator_state, (device,), {}, node, _like_state(device, node))
        return target, args

    def _add_results(self, operation: Operation, call: fx.Node) -> None:
        made = {storage: _Generation() for storage in operation.outputs}
        for result in self._values.results(operation):
            node, value = call, call.meta["val"]
            for index in result.path:
                value = value[index]
                node = self._call(operator.getitem, (node, index), {}, call, value)
            made[result.storage].results[result.place] = node
        for storage, generation in made.items():
            self._live[storage].append(generation)

    def _free(self, storage: int) -> None:
        if self._live[storage]:
            self._freed[storage] = self._live[storage].pop()

    def _fetch(self, node: fx.Node) -> fx.Node:
        """A node of the traced graph as it is in the rebuilt one now."""
        if is_given(node):
            return self._fetch_given(node)
        result = self._values.result(node)
        if result is not None:
            return self._fetch_result(result.storage, result.place, node)
        if node.target is torch.ops.aten.detach.default:  # below autograd there is nothing to detach from
            return self._fetch(node.all_input_nodes[0])
        if not self._values.is_view(node):
            raise ExecutionError(f"{node.name!r} returns one of its inputs beside new values, which cannot be planned")
        return self._fetch_view(node)

    def _fetch_given(self, node: fx.Node) -> fx.Node:
        given = self._given[node]
        if self._phase is Phase.BACKWARD and node in self._changed:
            given = self._copies.get(node) or self._copy(node)
        return self._crossing(given) if node.op == "placeholder" else given

    def _copy(self, node: fx.Node) -> fx.Node:
        """The value an argument has before the forward changes it, see Note [What crosses]."""
        if storage_bytes(node.meta["val"]) > _LARGEST_COPY_BYTES:
            if self._running is None or self._running.phase is Phase.BACKWARD:
                return self._given[node]  # autograd says what is wrong with that, as in the eager run
            name = getattr(node.meta["desc"], "target", node.name).removeprefix(ROOT + ".")
            raise ExecutionError(
                f"the program runs {self._running.name!r} again in the backward pass, which reads {name!r}; the "
                "forward pass has changed that by then. Keep the result, or change so big a buffer outside the model"
            )
        with self.graph.inserting_after(self._last_given):
            copy = self.graph.call_function(torch.ops.aten.clone.default, (self._given[node],))
        copy.meta.update(val=node.meta["val"], partitioner_tag=_TAGS[Phase.FORWARD])
        self._copies[node] = copy
        return copy

    def _generations(self, storage: int) -> list[_Generation]:
        """What can be read of a storage, oldest first. Results of a pass can be read when it has ended."""
        ended = self._running is None and storage in self._freed
        return self._live[storage] or ([self._freed[storage]] if ended else [])

    def _fetch_result(self, storage: int, place: int, node: fx.Node) -> fx.Node:
        for generation in reversed(self._generations(storage)):
            if place in generation.results:
                made = self._arrived(generation, place, node) if generation.is_coming else generation.results[place]
                return self._crossing(made) if generation.crossed else made
        reader = "the caller" if self._running is None else repr(self._running.name)
        raise ExecutionError(
            f"the program lets {reader} read {node.name!r} ({self._ir.storages[storage].name}), which is not in memory "
            f"there (in the {self._phase} pass); plan this model again"
        )

    def _arrived(self, generation: _Generation, place: int, node: fx.Node) -> fx.Node:
        """Let the first reader wait for a copy that was started before."""
        generation.is_coming = False
        made = generation.results[place] = self._call(arrived, (generation.results[place],), {}, node)
        return made

    def _fetch_view(self, node: fx.Node) -> fx.Node:
        storage = self._values.storage(node)
        live = [] if storage is None else self._generations(storage)
        views = live[-1].views if live else self._given_views
        if node not in views:
            args, kwargs = fx.node.map_arg((node.args, node.kwargs), self._fetch)
            views[node] = self._call(node.target, args, kwargs, node)
        return views[node]

    def _crossing(self, node: fx.Node) -> fx.Node:
        is_tangent = node.op == "placeholder" and node.name.startswith("tangents")
        if self._phase is Phase.BACKWARD and not is_tangent:
            self.saved[node] = None
        return node

    def _call(self, target: Any, args: Any, kwargs: Any, origin: fx.Node, value: Any = None) -> fx.Node:
        """Add a call that goes by the marks of a traced one."""
        call = self.graph.create_node("call_function", target, tuple(args), dict(kwargs), name=origin.name)
        call.meta.update(origin.meta)
        call.meta.update({"partitioner_tag": _TAGS[self._phase], OVERWRITES: False})
        if value is not None:
            call.meta["val"] = value
        return call


def _like_state(device: torch.device, node: fx.Node) -> torch.Tensor:
    """What stands for a generator's state in the graph of a node."""
    mode = _torch.detect_fake_mode(tensors_of(node))
    assert mode is not None
    return mode.from_tensor(generator_state(device))


def owned(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor that may be overwritten, see Note [Retained graphs]."""
    return tensor.clone() if _torch.keeps_graph() else tensor


def _changed_arguments(joint: fx.Graph) -> set[fx.Node]:
    """Arguments that the forward pass gives a new value."""
    changed = {getattr(description, "mutated_input", None) for description in joint.output_node().meta["desc"]}
    return {node for node in joint.nodes if node.op == "placeholder" and node.meta.get("desc") in changed - {None}}


def _drawn_again(graph: Graph, program: Program) -> set[int]:
    """Random operations that are run more than once. First runs must draw in the eager run's order."""
    runs = [each.operation for each in (*program.forward, *program.backward) if isinstance(each, Compute)]
    draws = Counter(index for index in runs if graph.operation(index).random)
    in_forward = {each.operation for each in program.forward if isinstance(each, Compute)}
    eager = [index for index, operation in enumerate(graph.operations) if operation.random]
    late = [index for index in eager if graph.operation(index).phase is Phase.FORWARD and index not in in_forward]
    if list(draws) != eager or late:
        raise ExecutionError(
            "the program draws random numbers in another order than the eager run, which would be other numbers; "
            "every random operation must run in its place once before it runs again"
        )
    return {index for index, count in draws.items() if count > 1}
