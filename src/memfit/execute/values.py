"""Which node of a joint graph shows which storage of ours."""

import dataclasses
import operator
from collections import Counter
from collections.abc import Iterator
from typing import Any

import torch
from torch import fx

from memfit.capture.nodes import tensors_of
from memfit.errors import ExecutionError
from memfit.ir import ACCUMULATE, Graph, Operation
from memfit.tensors import storage_key


@dataclasses.dataclass(frozen=True, slots=True)
class Result:
    """One tensor that an operation makes."""

    storage: int
    place: int  # 0 for the first tensor in its storage; others only where one operation makes several in one
    path: tuple[int, ...]  # how to pick it from what the operator returns


class Values:
    """Nodes by operation, storages by node. Views are derived from an operation's own results."""

    def __init__(self, joint: fx.Graph, graph: Graph) -> None:
        self._nodes: dict[str, fx.Node] = {node.name: node for node in joint.nodes}
        self._storages: dict[int, int] = {}  # torch's storage identity to ours
        self._results: dict[str, list[Result]] = {}
        self._shown: dict[fx.Node, Result] = {}
        self._first: dict[int, torch.Tensor] = {}  # by storage
        given = {storage_key(tensor) for node in joint.nodes if is_given(node) for tensor in tensors_of(node)}
        for operation in (*graph.operations, *graph.alternatives):
            if operation.target != ACCUMULATE:  # no node: autograd does that outside
                self._add(operation, given)

    def node(self, operation: Operation) -> fx.Node:
        return self._nodes[operation.name]

    def results(self, operation: Operation) -> list[Result]:
        return self._results[operation.name]

    def result(self, node: fx.Node) -> Result | None:
        """What a node is among an operation's own results; None for views and what is given."""
        return self._shown.get(node)

    def storage(self, node: fx.Node) -> int | None:
        """The storage a node shows; None if it is given or no tensor."""
        tensors = tensors_of(node)
        return self._storages.get(storage_key(tensors[0])) if tensors else None

    def is_view(self, node: fx.Node) -> bool:
        return node.op == "call_function" and node.name not in self._results

    def _add(self, operation: Operation, given: set[int]) -> None:
        node = self._nodes.get(operation.name)
        keys = [] if node is None else [storage_key(tensor) for tensor in tensors_of(node)]
        fresh = [key for key in dict.fromkeys(keys) if key not in given and key not in self._storages]
        if node is None or len(fresh) != len(operation.outputs):
            raise ExecutionError(
                f"the graph has an operation {operation.name!r} ({operation.target}) with {len(operation.outputs)} "
                "results, the traced model has not; it is the graph of another model, lower this one again"
            )
        self._storages.update(zip(fresh, operation.outputs, strict=True))
        places: Counter[int] = Counter()
        results = self._results[operation.name] = []
        for path, tensor in _leaves(node.meta["val"]):
            key = storage_key(tensor)
            if key in fresh:
                result = Result(self._storages[key], places[key], path)
                self._check_layout(operation, result, tensor)
                places[key] += 1
                results.append(result)
        self._show(node, {result.path: result for result in results}, ())

    def _show(self, node: fx.Node, results: dict[tuple[int, ...], Result], path: tuple[int, ...]) -> None:
        """Find the nodes that pick results out of what an operator returns."""
        if path in results:
            self._shown[node] = results[path]
            return
        for user in node.users:
            if user.target is operator.getitem:
                index: Any = user.args[1]
                self._show(user, results, (*path, index))

    def _check_layout(self, operation: Operation, result: Result, tensor: torch.Tensor) -> None:
        """What is made in another way must look the same to those that read it."""
        first = self._first.setdefault(result.storage, tensor)
        if result.place == 0 and _layout(first) != _layout(tensor):
            raise ExecutionError(
                f"{operation.name!r} makes {_layout(tensor)}, which the model's own operation makes as "
                f"{_layout(first)}; the two cannot stand for each other, plan without {operation.technique!r}"
            )


def is_given(node: fx.Node) -> bool:
    """Whether a node is an argument or a constant of the graph rather than a result."""
    return node.op in ("placeholder", "get_attr")


def _leaves(value: Any, path: tuple[int, ...] = ()) -> Iterator[tuple[tuple[int, ...], torch.Tensor]]:
    if isinstance(value, torch.Tensor):
        yield path, value
    elif isinstance(value, list | tuple):
        for index, item in enumerate(value):
            yield from _leaves(item, (*path, index))


def _layout(tensor: torch.Tensor) -> tuple[Any, ...]:
    return tuple(tensor.shape), tensor.stride(), tensor.dtype
