"""Write the alternatives of lean operators into a captured graph, beside the model's own operators.

Note [Dead nodes]
    An alternative is a node that nobody of the model's own reads. A program names those it
    runs; whoever builds the graphs that run takes these and leaves the others out.
"""

import contextlib
import dataclasses
from collections.abc import Collection, Iterator
from typing import Any

import torch
from torch import fx
from torch.utils import _pytree as pytree

from memfit import _torch
from memfit.capture.fuse import fuse
from memfit.capture.late_gradients import compute_gradients_late
from memfit.capture.nodes import FORM_OF, INHERITED, REMAKES, TECHNIQUE, is_alternative, tensors_of
from memfit.capture.rewrite import rewrite
from memfit.capture.tie import tie
from memfit.capture.trace import Joint
from memfit.ops.lean import Alternative, LeanOperator, Site, first_piece_only, is_backward
from memfit.ops.registry import chosen
from memfit.tensors import storage_key


def extend(joint: Joint, techniques: Collection[str]) -> None:
    """Add every alternative that the lean operators of these techniques offer; some rewrite the graph first."""
    if "chunk" in techniques:
        rewrite(joint)
    if "lean" in techniques:
        tie(joint)
    if "inductor" in techniques:
        compute_gradients_late(joint)
        fuse(joint)
    graph = joint.graph_module.graph
    writer = _Writer(graph)
    operators = chosen(techniques)
    for site in _sites(graph):
        for operator in operators:
            for alternative in operator.alternatives(site):
                with contextlib.suppress(_LeftOut):
                    writer.add(operator, alternative)


def _sites(graph: fx.Graph) -> list[Site]:
    """The calls of a graph as it is now."""
    kept = {
        storage_key(value)
        for node in graph.nodes
        if is_backward(node)
        for source in node.all_input_nodes
        for value in tensors_of(source)
    }
    return list(_described(graph, kept))


def _described(graph: fx.Graph, kept: set[int]) -> Iterator[Site]:
    shown: set[int] = set()
    for node in graph.nodes:
        value = node.meta.get("val")
        key = storage_key(value) if isinstance(value, torch.Tensor) else None
        if node.op == "call_function" and not is_alternative(node):
            backward = is_backward(node)
            yield Site(
                node=node,
                is_backward=backward,
                makes_memory=key is not None and key not in shown,
                is_kept=not backward and key in kept,
            )
        if key is not None:
            shown.add(key)


class _LeftOut(Exception):
    """An alternative that does not do what it is for here."""


class _Writer:
    """Puts nodes where all they read exists, each call once."""

    def __init__(self, graph: fx.Graph) -> None:
        self._graph = graph
        self._places = {node: place for place, node in enumerate(graph.nodes)}
        self._last: dict[fx.Node, fx.Node] = {}  # what was put behind a node of the model's own
        self._written: dict[Any, fx.Node] = {}
        self._layouts: dict[Any, Any] = {}  # what calls that look alike make
        self._checked: set[Any] = set()  # kinds of calls that were seen to make what they are to make again

    def add(self, operator: LeanOperator, alternative: Alternative) -> fx.Node:
        args = tuple(self.add(operator, arg) if isinstance(arg, Alternative) else arg for arg in alternative.args)
        key = (alternative.function, alternative.of, alternative.form, repr(args))
        if key not in self._written:
            self._written[key] = self._write(operator, alternative, args)
        return self._written[key]

    def _write(self, operator: LeanOperator, alternative: Alternative, args: tuple[Any, ...]) -> fx.Node:
        of = alternative.of
        made = self._made(alternative, args)
        read = [arg for arg in pytree.tree_leaves(args) if isinstance(arg, fx.Node)]
        anchor = max((of, *read), key=self._places.__getitem__)
        if alternative.form and is_backward(anchor):
            raise _LeftOut(f"{of.name} is first seen in the backward pass, where a smaller form of it saves nothing")
        name = f"{of.name}_{alternative.form or alternative.function.__name__}"
        with self._graph.inserting_after(self._last.get(anchor, anchor)):
            node = self._graph.create_node("call_function", alternative.function, args, name=name)
        self._last[anchor] = node
        self._places[node] = self._places[anchor]
        node.meta = {key: of.meta[key] for key in INHERITED if key in of.meta}
        node.meta["val"] = made
        node.meta[TECHNIQUE] = operator.name
        node.meta |= {FORM_OF: (of, alternative.form)} if alternative.form else {REMAKES: of}
        return node

    def _made(self, alternative: Alternative, args: tuple[Any, ...]) -> Any:
        """Make the results of a call, without memory."""
        values = pytree.tree_map_only(fx.Node, lambda node: node.meta["val"], args)
        mode = _torch.detect_fake_mode(values)
        with torch.no_grad(), mode or contextlib.nullcontext(), first_piece_only():
            layouts = (
                self._layouts_of(alternative, values) if alternative.form else self._layouts_again(alternative, values)
            )
            return pytree.tree_map_only(_Layout, _Layout.empty, layouts)

    def _layouts_of(self, alternative: Alternative, values: Any) -> Any:
        """Lay out the results of another form: its function is run once for all calls that look alike."""
        key = (alternative.function, repr(pytree.tree_map_only(torch.Tensor, _layout, values)))
        if key not in self._layouts:
            made = alternative.function(*values)
            self._layouts[key] = pytree.tree_map_only(torch.Tensor, _layout, made)
        return self._layouts[key]

    def _layouts_again(self, alternative: Alternative, values: Any) -> Any:
        """Lay out the results of a call that remakes others: the same; that is checked once for an order of dimensions.

        Running every function without memory takes a second for models of many shapes.
        """
        key = (alternative.function, repr(pytree.tree_map_only(torch.Tensor, _order, values)))
        if key not in self._checked:
            _check_layout(alternative, alternative.function(*values))
            self._checked.add(key)
        return pytree.tree_map_only(torch.Tensor, _layout, alternative.of.meta["val"])


def _check_layout(alternative: Alternative, made: Any) -> None:
    expected = alternative.of.meta["val"]
    if [_layout(each) for each in _flat(made)] != [_layout(each) for each in _flat(expected)]:
        raise _LeftOut(f"{alternative.function.__name__} makes another layout than {alternative.of.name} has")


@dataclasses.dataclass(frozen=True, slots=True)
class _Layout:
    """A tensor without its content."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    device: torch.device

    def empty(self) -> torch.Tensor:
        return torch.empty_strided(self.shape, self.stride, dtype=self.dtype, device=self.device)


def _order(tensor: torch.Tensor) -> tuple[Any, ...]:
    """Return the part of a layout that decides in which order an operator lays out its results."""
    sizes = [min(size, 2) for size in tensor.shape]
    strides = sorted(set(tensor.stride()))
    steps = [strides.index(step) for step in tensor.stride()]
    return tensor.dtype, sizes, steps, tensor.is_contiguous(), tensor.device


def _flat(value: Any) -> list[torch.Tensor]:
    return [leaf for leaf in pytree.tree_leaves(value) if isinstance(leaf, torch.Tensor)]


def _layout(tensor: torch.Tensor) -> _Layout:
    return _Layout(tensor.dtype, tuple(tensor.shape), tensor.stride(), tensor.device)
