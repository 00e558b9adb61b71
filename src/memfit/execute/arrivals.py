"""Backward passes for the gradients that arrive: of some outputs alone, or not as the loss that was told makes them.

Note [No gradient is not zero]
    Where a loss takes one output of two, autograd gives the other none, and parameters behind it alone keep None. Torch
    hands zeros to a captured backward pass instead, from which those parameters would get zeros, by which optimizers
    decay them. So it is noted which gradients have arrived, and for every set of them there is a backward graph of its
    own: what depends only on gradients that have not arrived is not computed; where it would be added to something,
    that stays as it is; other operators that read it get zeros, as in the eager run. What stays as it is has two names
    then, so nothing is written over it. A function that asks for None rather than zeros has run once, in the trace:
    what arrives is refused where that would reach other results of the function than there.

Note [Another loss]
    A backward pass that starts from one number, expanded (Note [Gradients of outputs] in
    `capture/gradient_layouts.py`), reads that number alone. Who trains by another loss than `fit` was told of hands
    over a gradient of other numbers. So it is noted what has arrived, and such a gradient is read whole, by a backward
    graph of its own.

Note [Not a sum of its own]
    Where nothing is added, what stands for the sum is the other summand itself: it may be one number expanded, or be
    read by others still. So nothing is written over either of the two. It may be laid out otherwise, too: so may what
    is computed from it.
"""

import threading
from collections.abc import Callable
from typing import Any

import torch
from torch import fx

from memfit import _torch
from memfit.capture.gradient_layouts import axes_of
from memfit.capture.nodes import tensors_of
from memfit.capture.trace import Joint
from memfit.errors import ExecutionError
from memfit.execute.codegen import OVERWRITES
from memfit.execute.layouts import followed, layouts_of
from memfit.execute.sums import zeros_of
from memfit.tensors import storage_key

Boxed = Callable[[list[Any]], list[Any]]  # empties the list it is given
Outputs = frozenset[int]  # by place

_ABSENT = object()


class Arrivals:
    """Runs the backward graph of a call for the gradients that arrive, see the Notes above."""

    def __init__(self, joint: Joint, first: int) -> None:
        """Autograd counts the outputs that may get gradients from `first` on."""
        self._outputs = joint.differentiated
        self._of_one_number = frozenset(each for each in self._outputs if _starts_from_one(joint, each))
        self._first = first
        self._tells_none_apart = joint.tells_none_apart
        self._now = threading.local()

    @classmethod
    def of(cls, joint: Joint, first: int) -> "Arrivals | None":
        """Return what looks at the gradients of a call; None if they can only arrive in one way."""
        arrivals = cls(joint, first)
        return arrivals if len(joint.differentiated) > 1 or arrivals._of_one_number else None

    def watch(self, output: torch.Tensor) -> None:
        """Note what arrives in the backward pass behind an output."""
        node = _torch.compiled_node(output)
        if node is not None:
            _torch.before_backward(node, self._note)

    def _note(self, gradients: tuple[torch.Tensor | None, ...]) -> None:
        # Called right before the backward pass itself, by the same thread.
        arrived = {each: gradients[self._first + each] for each in self._outputs}
        missing = frozenset(each for each, gradient in arrived.items() if gradient is None)
        whole = {
            each for each, gradient in arrived.items() if each in self._of_one_number and not _is_one_number(gradient)
        }
        self._now.seen = missing, frozenset(whole)

    def compiled(self, graph: fx.Graph, generate: Callable[[fx.Graph], Boxed]) -> Boxed:
        """A backward graph as a function."""
        nothing: Outputs = frozenset()
        functions = {(nothing, nothing): generate(graph)}

        def run(arguments: list[Any]) -> list[Any]:
            missing, whole = self._now.__dict__.pop("seen", (nothing, nothing))
            if (missing, whole) not in functions:
                if missing:
                    self._check_zeros()
                functions[missing, whole] = generate(_read_whole(_without(graph, missing), whole))
            return functions[missing, whole](arguments)

        run._boxed_call = True  # type: ignore[attr-defined]  # how AOTAutograd knows
        return run

    def _check_zeros(self) -> None:
        if self._tells_none_apart:
            raise ExecutionError(
                "an output got no gradient in this backward pass, and an autograd.Function of the model asks for None "
                "where none arrives (set_materialize_grads(False)), which a captured call does not hand on; call "
                "memfit.remove(model), or let the loss take all outputs"
            )


def _is_one_number(gradient: torch.Tensor | None) -> bool:
    """Return whether a gradient is one number, expanded, or none at all."""
    return gradient is None or axes_of(gradient) == ()


def _starts_from_one(joint: Joint, output: int) -> bool:
    return output < len(joint.starts) and joint.starts[output] == ()


def _read_whole(graph: fx.Graph, outputs: Outputs) -> fx.Graph:
    """Return a backward graph that reads all numbers of some gradients, see Note [Another loss]."""
    expanded = torch.ops.aten.expand.default
    for tangent in [node for node in graph.nodes if output_of(node) in outputs]:
        one = tangent
        while len(one.users) == 1 and (user := next(iter(one.users))).target is torch.ops.aten.select.int:
            one = user
        if one is tangent or any(user.target is not expanded for user in one.users):
            raise ExecutionError(_ANOTHER_LOSS)
        for user in list(one.users):
            user.replace_all_uses_with(tangent)
    for node in graph.nodes if outputs else ():
        if node.target is torch.ops.aten.view.default:  # of what is expanded there are more views
            node.target = torch.ops.aten.reshape.default
    graph.eliminate_dead_code(is_impure_node=lambda node: node.op in ("placeholder", "output") or not _is_one(node))
    return graph


def _is_one(node: fx.Node) -> bool:
    return node.target in (torch.ops.aten.select.int, torch.ops.aten.expand.default)


_ANOTHER_LOSS = (
    "the loss that was trained with is another than the one that fit was told of: that one is a sum of the model's "
    "output, whose gradient is one number; fit again with the loss that you train with, or without a loss"
)


def _without(graph: fx.Graph, missing: Outputs) -> fx.Graph:
    """A backward graph without the gradients of some outputs."""
    return _Reduction(graph, missing).made


class _Reduction:
    """Copies a backward graph without what depends only on what is missing, see Note [No gradient is not zero]."""

    def __init__(self, graph: fx.Graph, missing: Outputs) -> None:
        self.made = fx.Graph(graph.owning_module)
        self._values: dict[fx.Node, Any] = {}
        self._follow: set[fx.Node] = set()  # what depends on gradients that have arrived
        self._relaid: set[fx.Node] = set()  # what is laid out otherwise than it was traced
        self._lent: set[int] = set()  # memory of sums that are none, and of their summands; Note [Not a sum of its own]
        for node in graph.nodes:
            if node.op == "placeholder":
                self._take(node, missing)
            elif node.op == "output":
                self.made.output(fx.map_arg(node.args[0], self._result))
            else:
                self._values[node] = self._call(node)
                if not self._follow.isdisjoint(node.all_input_nodes):
                    self._follow.add(node)

    def _take(self, node: fx.Node, missing: Outputs) -> None:
        copied = self.made.node_copy(node)
        output = output_of(node)
        self._values[node] = _ABSENT if output in missing else copied
        if output is not None and output not in missing:
            self._follow.add(node)

    def _result(self, node: fx.Node) -> Any:
        return None if self._values[node] is _ABSENT else self._values[node]

    def _call(self, node: fx.Node) -> Any:
        """A call without what is missing."""
        read = node.all_input_nodes
        missing = [each for each in read if self._values[each] is _ABSENT]
        if missing and self._follow.isdisjoint(read):
            return _ABSENT
        if missing and node.target is torch.ops.aten.add.Tensor and len(read) == 2 and not node.kwargs:
            summand = next(each for each in read if each not in missing)
            self._lent |= _memory(node) | _memory(summand)
            self._look(node, self._values[summand])
            return self._values[summand]
        values = self._values | {each: _zeros(self.made, each) for each in missing}
        if self._relaid.isdisjoint(read):
            copied = self.made.node_copy(node, values.__getitem__)
        else:
            copied = followed(self.made, node, values)
            self._look(node, copied)
        first = node.args[0] if node.args else None
        if node.meta.get(OVERWRITES) and isinstance(first, fx.Node) and not self._lent.isdisjoint(_memory(first)):
            copied.meta[OVERWRITES] = False
        return copied

    def _look(self, node: fx.Node, now: fx.Node) -> None:
        """Note whether what stands for a value is laid out otherwise."""
        if layouts_of(node) != layouts_of(now):
            self._relaid.add(node)


def _memory(node: fx.Node) -> set[int]:
    return {storage_key(each) for each in tensors_of(node)}


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
