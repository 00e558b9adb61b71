"""Backward passes in which some outputs of a captured call get no gradient.

Note [No gradient is not zero]
    Where a loss takes one output of two, autograd gives the other none, and parameters behind it alone keep None. Torch
    hands zeros to a captured backward pass instead, from which those parameters would get zeros, by which optimizers
    decay them. So it is noted which gradients have arrived, and for every set of them there is a backward graph of its
    own: what depends only on gradients that have not arrived is not computed; where it would be added to something,
    that stays as it is; other operators that read it get zeros, as in the eager run.
"""

import threading
from collections.abc import Callable
from typing import Any

import torch
from torch import fx

from memfit import _torch
from memfit.capture.trace import Joint
from memfit.errors import ExecutionError
from memfit.execute.sums import zeros_of

Boxed = Callable[[list[Any]], list[Any]]
Arrived = frozenset[int]  # outputs that got a gradient

_ABSENT = object()


class Arrivals:
    """Runs the backward graph of a call for the gradients that arrive, see Note [No gradient is not zero]."""

    def __init__(self, joint: Joint, first: int) -> None:
        """Autograd counts the outputs that may get gradients from `first` on."""
        self._outputs = joint.differentiated
        self._first = first
        self._all = frozenset(self._outputs)
        self._asks_for_none = joint.late.asks_for_none
        self._now = threading.local()

    def watch(self, output: torch.Tensor) -> None:
        """Note what arrives in the backward pass behind an output."""
        node = _torch.compiled_node(output)
        if node is not None:
            _torch.before_backward(node, self._note)

    def _note(self, gradients: tuple[torch.Tensor | None, ...]) -> None:
        # Called right before the backward pass itself, by the same thread.
        self._now.arrived = frozenset(each for each in self._outputs if gradients[self._first + each] is not None)

    def compiled(self, graph: fx.Graph, generate: Callable[[fx.Graph], Boxed]) -> Boxed:
        """A backward graph as a function."""
        functions = {self._all: generate(graph)}

        def run(arguments: list[Any]) -> list[Any]:
            arrived = self._now.__dict__.pop("arrived", self._all)
            if arrived not in functions:
                self._check_zeros()
                functions[arrived] = generate(_without(graph, self._all - arrived))
            return functions[arrived](arguments)

        run._boxed_call = True  # type: ignore[attr-defined]  # how AOTAutograd knows
        return run

    def _check_zeros(self) -> None:
        if self._asks_for_none:
            raise ExecutionError(
                "an output got no gradient in this backward pass, and an autograd.Function of the model asks for None "
                "where none arrives (set_materialize_grads(False)), which a captured call does not hand on; call "
                "memfit.remove(model), or let the loss take all outputs"
            )


def _without(graph: fx.Graph, missing: Arrived) -> fx.Graph:
    """A backward graph without the gradients of some outputs."""
    made = fx.Graph(graph.owning_module)
    values: dict[fx.Node, Any] = {}
    follow: set[fx.Node] = set()  # what depends on gradients that have arrived
    for node in graph.nodes:
        if node.op == "placeholder":
            copied = made.node_copy(node)
            output = output_of(node)
            values[node] = _ABSENT if output in missing else copied
            if output is not None and output not in missing:
                follow.add(node)
        elif node.op == "output":
            made.output(fx.map_arg(node.args[0], lambda each: None if values[each] is _ABSENT else values[each]))
        else:
            values[node] = _reduced(made, node, values, follow)
            if not follow.isdisjoint(node.all_input_nodes):
                follow.add(node)
    return made


def _reduced(made: fx.Graph, node: fx.Node, values: dict[fx.Node, Any], follow: set[fx.Node]) -> Any:
    """A call without what is missing, see Note [No gradient is not zero]."""
    read = node.all_input_nodes
    missing = [each for each in read if values[each] is _ABSENT]
    if missing and follow.isdisjoint(read):
        return _ABSENT
    if missing and node.target is torch.ops.aten.add.Tensor and len(read) == 2 and not node.kwargs:
        return next(values[each] for each in read if each not in missing)
    given = {each: _zeros(made, each) for each in missing}
    return made.node_copy(node, lambda each: given.get(each, values[each]))


def _zeros(made: fx.Graph, node: fx.Node) -> fx.Node:
    value = node.meta["val"]
    arguments = (list(value.shape), list(value.stride()), value.dtype, value.device)
    zeros = made.call_function(zeros_of, arguments)
    zeros.meta["val"] = value
    return zeros


def output_of(node: fx.Node) -> int | None:
    """Return the output whose gradient a placeholder of the backward pass is."""
    output = getattr(node.meta.get("desc"), "output", None)
    return getattr(output, "idx", None)
