"""Backward graphs that add the gradients of several uses in another way, see Note [One by one] in `uses.py`."""

import operator
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import fx

from memfit.capture.nodes import tensors_of
from memfit.capture.record import ANNOTATION
from memfit.execute.codegen import OVERWRITES
from memfit.execute.fan import APART, AS_TRACED, BEGUN
from memfit.execute.handover import hand_over
from memfit.ops.tied_embedding import add_embedding_gradient
from memfit.tensors import storage_key

Uses = tuple[tuple[int, ...], ...]  # by place: when each use was recorded

_ADD = torch.ops.aten.add.Tensor


class Resummed(NamedTuple):
    """A backward graph, and for each tensor the places among its results of all gradients but the first."""

    graph: fx.Graph
    others: list[range]


def resummed(graph: fx.Graph, groups: Sequence[tuple[tuple[int, ...], Uses]], modes: Sequence[str]) -> Resummed:
    """Copy a backward graph so that it adds the gradients of each group of results in its mode.

    A group are the places of the results that are gradients of one tensor, and its uses. Where a sum is `BEGUN`, what
    it begins with is given as another argument.
    """
    copy = fx.Graph(graph.owning_module)
    values: dict[fx.Node, Any] = {}
    results: list[Any] = list(copy.graph_copy(graph, values))  # type: ignore[arg-type]
    writer = _Writer(copy, results)
    others: list[range] = []
    for (places, uses), mode in zip(groups, modes, strict=True):
        first = len(results)
        writer.write(places, uses, mode)
        others.append(range(first, len(results)))
    output = copy.output(results)
    output.meta.update(graph.output_node().meta)
    writer.finish()
    return Resummed(copy, others)


class _Writer:
    def __init__(self, graph: fx.Graph, results: list[Any]) -> None:
        self._graph, self._results = graph, results
        self._begin = [node for node in graph.nodes if node.op == "placeholder"][-1]
        self._replaced: list[fx.Node] = []

    def write(self, places: Sequence[int], uses: Uses, mode: str) -> None:
        """Write the sum of a group; a begun one has an argument also where nothing is added to it."""
        count = sum(map(len, uses))
        if mode == AS_TRACED and (len(places) == 1 or count <= 2):  # a + b is b + a
            return
        gradients = self._taken_apart(places, uses)
        start = self._argument(gradients) if mode == BEGUN else None
        rest: list[fx.Node | None] = [None] * (len(places) - 1)
        first: fx.Node | None
        if mode == APART:
            alone = [self._whole(each) for each in gradients]
            first = alone[0] if alone else None
            self._results.extend(alone[1:])
        else:
            first = self._sum(start, gradients)
            first = self._handed_over(first, places) if mode == AS_TRACED else first
        for place, result in zip(places, [first, *rest], strict=True):
            self._results[place] = result

    def finish(self) -> None:
        """Erase what is not needed any more."""
        for node in reversed([*self._graph.nodes]):
            if node in self._replaced and not node.users:
                self._graph.erase_node(node)

    def _taken_apart(self, places: Sequence[int], uses: Uses) -> list[fx.Node]:
        """Return the gradients of all uses, in the order in which eager adds them."""
        most = sum(map(len, uses))
        found = [self._parts(self._results[place], most) for place in places]
        if len([parts for parts in found if parts]) == 1:
            return next(parts for parts in found if parts)
        if all(len(parts) == len(each) for parts, each in zip(found, uses, strict=True)):
            times = [-number for each in uses for number in sorted(each, reverse=True)]
        else:  # some uses got no gradient
            order = {node: place for place, node in enumerate(self._graph.nodes)}
            times = [order[part] for parts in found for part in parts]
        parts = [part for each in found for part in each]
        return [part for _, part in sorted(zip(times, parts, strict=True), key=operator.itemgetter(0))]

    def _parts(self, result: Any, most: int) -> list[fx.Node]:
        """Return what a gradient is the sum of, in the order in which it is added."""
        if result is None:
            return []
        node: fx.Node = result
        if node.target is hand_over:
            self._replaced.append(node)
            node = node.args[1]  # type: ignore[assignment]
        parts: list[fx.Node] = []
        while len(parts) < most - 1 and (node.target is add_embedding_gradient or _is_sum_of_uses(node)):
            self._replaced.append(node)
            total, last, *_ = node.args
            parts.append(node if node.target is add_embedding_gradient else last)  # type: ignore[arg-type]
            node = total  # type: ignore[assignment]
        return [node, *reversed(parts)]

    def _sum(self, start: fx.Node | None, gradients: Sequence[fx.Node]) -> fx.Node | None:
        """Add one by one, each as soon as it is there."""
        total, is_own = start, False
        for each in gradients:
            if total is None:
                total = self._whole(each)
                continue
            more = self._added(total, each)
            more.meta[OVERWRITES] = is_own
            total, is_own = more, True
        return total

    def _added(self, total: fx.Node, gradient: fx.Node) -> fx.Node:
        if gradient.target is add_embedding_gradient:
            return self._call(gradient.target, (total, *gradient.args[1:]), gradient)
        return self._call(_ADD, (total, self._lasting(gradient)), gradient)

    def _whole(self, gradient: fx.Node) -> fx.Node:
        """Return a gradient by itself."""
        if gradient.target is not add_embedding_gradient:
            return self._lasting(gradient)
        value = gradient.meta["val"]
        zeros = self._call(zeros_of, (list(value.shape), list(value.stride()), value.dtype, value.device), gradient)
        return self._added(zeros, gradient)

    def _call(self, function: Any, args: tuple[Any, ...], like: fx.Node) -> fx.Node:
        """Write a call behind the last of what it reads."""
        read = [each for each in args if isinstance(each, fx.Node)]
        last = max(read, key=self._place, default=self._begin)
        with self._graph.inserting_after(self._begin if last.op == "placeholder" else last):
            call = self._graph.call_function(function, args)
        call.meta["val"] = like.meta["val"]
        return call

    def _place(self, node: fx.Node) -> int:
        return next(place for place, each in enumerate(self._graph.nodes) if each is node)

    def _argument(self, gradients: Sequence[fx.Node]) -> fx.Node:
        with self._graph.inserting_after(self._begin):
            argument = self._graph.placeholder(f"begun_{len(self._results)}")
        self._begin = argument
        if gradients:
            argument.meta["val"] = gradients[0].meta["val"]
        return argument

    def _handed_over(self, total: fx.Node | None, places: Sequence[int]) -> fx.Node | None:
        """Let a whole sum be taken as soon as all of the gradients would be, see Note [Handing over]."""
        calls = [self._results[place] for place in places if self._results[place] is not None]
        if total is None or any(each.target is not hand_over for each in calls):
            return total
        call = self._call(hand_over, (places[0], total, total.target is _ADD, 1), total)
        last = max([*calls, call], key=self._place)
        if last is not call:
            last.append(call)
        return call

    def _lasting(self, part: fx.Node) -> fx.Node:
        """Return a gradient, or a copy if something else is written over it later."""
        keys = {storage_key(each) for each in tensors_of(part)}
        if not any(self._overwrites(node, keys) for node in self._graph.nodes):
            return part
        return self._call(torch.ops.aten.clone.default, (part,), part)

    def _overwrites(self, node: fx.Node, keys: set[int]) -> bool:
        if node.op != "call_function" or not node.meta.get(OVERWRITES) or node in self._replaced:
            return False
        first = node.args[0]
        return isinstance(first, fx.Node) and not keys.isdisjoint(storage_key(each) for each in tensors_of(first))


def zeros_of(shape: list[int], stride: list[int], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Stand for a gradient that is not there."""
    return torch.empty_strided(shape, stride, dtype=dtype, device=device).zero_()


def _is_sum_of_uses(node: fx.Node) -> bool:
    """Return whether autograd itself added two gradients, rather than a formula of an operator."""
    is_sum = node.target is _ADD and len(node.args) == 2 and not node.kwargs
    return is_sum and isinstance(node.args[1], fx.Node) and ANNOTATION not in (node.meta.get("custom") or {})
