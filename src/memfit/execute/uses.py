"""Add gradients up in eager's order where a call uses something several times.

Note [One by one]
    Autograd adds the gradients of all uses of a tensor one by one, those of the latest uses first. A captured call adds
    those of its own uses and hands on the sum. That is the same, unless gradients of later uses came before: of a
    second call, or of a penalty on the weights in the loop. So what a call uses several times goes into it through a
    node of its own, a `Fan`, with one edge for each use. When the backward pass begins, the graph is walked from where
    the pass starts. Where nothing comes before, a call hands on its sum. Where that of another call comes right before,
    that call holds its sum back, and this one begins with it. Where something else comes before, the gradients of all
    uses are handed on one by one; they are in memory together then.

Note [Given by several names]
    A weight that is tied goes into a call once for each of its names, and autograd would add their gradients in the
    order of the names. Of three or more uses together the call itself makes the sum, in the order of uses.
"""

import dataclasses
import threading
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import fx

from memfit import _torch
from memfit._backward_pass import Edge, asked
from memfit.capture.trace import ROOT, Joint
from memfit.errors import ExecutionError
from memfit.execute.fan import APART, AS_TRACED, BEGUN, Slot, edge_of, is_fan
from memfit.execute.sums import Resummed, Uses, resummed

Boxed = Callable[[list[Any]], list[Any]]

_settled = threading.local()  # the pass whose uses are known


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Group:
    """A tensor that a call is given, maybe at several places."""

    place: int  # the first
    results: tuple[int, ...]  # of the backward pass: its gradients
    uses: Uses  # by result


class SeveralUses:
    """Knows what a call uses several times."""

    def __init__(self, joint: Joint) -> None:
        self._uses = {place: each for place, each in enumerate(joint.uses) if each}
        self._results = _results_by_place(joint)
        self._writes = joint.changes_parameters
        self._groups: list[_Group] | None = None  # of which tensors there are several, it is told from the first call
        self._now = threading.local()

    def slots(self, given: Sequence[Any]) -> dict[int, Slot]:
        """Return a slot for each tensor, by its identity, that goes in through a `Fan`."""
        if self._groups is None:
            self._groups = self._grouped(given)
        return {id(given[each.place]): Slot(sum(map(len, each.uses))) for each in self._groups}

    def _grouped(self, given: Sequence[Any]) -> list[_Group]:
        places: dict[int, list[int]] = defaultdict(list)
        for place in self._uses:
            if given[place].requires_grad:
                places[id(given[place])].append(place)
        groups = [self._group(each) for each in places.values()]
        return [each for each in groups if sum(map(len, each.uses)) > 1]

    def _group(self, places: Sequence[int]) -> _Group:
        """Describe one tensor; a part of the model that has two names is in the trace the same under both."""
        results = {self._results[place]: self._uses[place] for place in places if place in self._results}
        seen: set[tuple[int, ...]] = set()
        for result, each in results.items():
            results[result] = () if each in seen else each
            seen.add(each)
        return _Group(place=places[0], results=(*results,), uses=(*results.values(),))

    def watch(self, output: torch.Tensor, given: Sequence[Any], slots: Mapping[int, Slot]) -> None:
        """Decide before the backward pass behind an output how gradients are added."""
        node = _torch.compiled_node(output)
        if node is None or not slots:
            return
        if self._writes:
            self._refuse_later_uses(node, [each for each in given if id(each) in slots])
            return
        in_order = [*slots.values()]

        def begin(_gradients: Any) -> None:
            settle()
            now = _torch.backward_pass()
            for each in in_order:
                if each.known_in != now:  # it is not told where this pass has started
                    each.forget(now)
                    each.mode = APART
            self._now.slots = in_order

        _torch.before_backward(node, begin)

    def _refuse_later_uses(self, node: Any, tensors: Sequence[torch.Tensor]) -> None:
        """Refuse what would have to be added one by one, of a call that can be given no views."""
        recorded = _torch.sequence_number(node)
        edges = [torch.autograd.graph.get_gradient_edge(each) for each in tensors]

        def look(_gradients: Any) -> None:
            uses = _uses_in_this_pass()
            if any(recorded < number for edge in edges for number, _ in uses.get((edge.node, edge.output_nr), ())):
                raise ExecutionError(
                    "a parameter that the forward uses several times is used by the loop or by another call as well, "
                    "and the forward writes into parameters, so that gradients would be added in another order than in "
                    "eager; call backward for each of the losses, or fit the part without what is written into"
                )

        _torch.before_backward(node, look)

    def compiled(self, graph: fx.Graph, generate: Callable[[fx.Graph], Boxed]) -> Boxed:
        """A backward graph as a function that adds as the pass asks for."""
        functions: dict[tuple[str, ...], tuple[Boxed, Resummed]] = {}
        count = len(graph.output_node().args[0])  # type: ignore[arg-type]

        def run(arguments: list[Any]) -> list[Any]:
            slots: list[Slot] = self._now.__dict__.pop("slots", [])
            modes = tuple(each.mode if each.mode != BEGUN or each.start is not None else AS_TRACED for each in slots)
            if modes not in functions:
                groups = [(each.results, each.uses) for each in self._groups or ()]
                made = resummed(graph, groups, modes or (AS_TRACED,) * len(groups))
                functions[modes] = generate(made.graph), made
            function, made = functions[modes]
            for slot, mode in zip(slots, modes, strict=True):
                if mode == BEGUN:
                    arguments.append(slot.start)
                slot.start = None
            results = function(arguments)
            for slot, places in zip(slots, made.others, strict=False):
                slot.others = [results[place] for place in places]
            return results[:count]

        run._boxed_call = True  # type: ignore[attr-defined]  # how AOTAutograd knows
        return run


def _results_by_place(joint: Joint) -> dict[int, int]:
    """Return which result of the backward pass is the gradient of what a call is given at a place, if there is one."""
    placeholders = [node for node in joint.graph_module.graph.nodes if node.op == "placeholder"]
    named = {f"{ROOT}.{name}": place for place, name in enumerate(joint.state_names)}
    found: dict[int, int] = {}
    for result, node in enumerate(placeholders):
        description = node.meta["desc"]
        if hasattr(description, "target"):
            found[named[description.target]] = result
        elif type(description).__name__ == "PlainAOTInput":
            found[len(named) + description.idx] = result
    return found


def settle() -> None:
    """Decide for all calls of the backward pass that is running, once."""
    now = _torch.backward_pass()
    if getattr(_settled, "now", None) == now:
        return
    _settled.now = now
    for uses in _uses_in_this_pass().values():
        if any(slot is not None for _, slot in uses):
            _decide(sorted(uses, key=lambda use: -use[0]), now)


def _decide(uses: Sequence[tuple[int, Slot | None]], now: int) -> None:
    """Say of each use of one tensor, the latest first, how its gradients are added, see Note [One by one]."""
    before: Slot | None = None
    for place, (_, slot) in enumerate(uses):
        if slot is not None:
            slot.forget(now)
            if place and before is None:
                slot.mode = APART
            elif before is not None:
                slot.mode, before.follower = BEGUN, slot
        before = slot if slot is not None and slot.mode != APART else None


def _uses_in_this_pass() -> dict[Edge, list[tuple[int, Slot | None]]]:
    """Return when what was used, and by which `Fan`, in the part of the graph that the pass starts from."""
    uses: defaultdict[Edge, list[tuple[int, Slot | None]]] = defaultdict(list)
    waiting = [node for each in asked() for node, _ in each.starts]
    seen = {*waiting}
    while waiting:
        node = waiting.pop()
        number, slot = _torch.sequence_number(node), node.slot if is_fan(node) else None
        following = node.next_functions if slot is None else (edge_of(node),)
        for edge in following:
            if edge[0] is not None:
                uses[edge].append((number, slot))
                if edge[0] not in seen:
                    seen.add(edge[0])
                    waiting.append(edge[0])
    return uses
