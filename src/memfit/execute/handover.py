"""Gradients that are taken out of a captured backward pass as soon as they exist.

Note [Handing over]
    A backward graph returns all its gradients together, so all of them are live when it ends. In every graph stands a
    `hand_over` for each parameter, at the first place where its gradient exists and nothing reads the parameter any
    more. As a rule it does nothing. While somebody takes gradients (`taking`) it gives them away and returns nothing
    in their place, so that a parameter can be updated, and its gradient dropped, in the middle of the pass.

Note [Only whole gradients]
    A gradient may be taken only where it is the whole of what the parameter gets. That is read from autograd's
    graph before the pass: every edge to the parameter must come from one captured call. A tied weight has two; if the
    captured graph makes a gradient for each, they are added as autograd adds them. Where there are more, or others,
    autograd does its own work.
"""

import contextlib
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import fx, nn

from memfit import _torch
from memfit.capture.nodes import tensors_of
from memfit.execute.fan import variable_behind
from memfit.tensors import storage_key

Take = Callable[[nn.Parameter, torch.Tensor], bool]  # whether it was taken
_MOST_EDGES = 2  # a + b is b + a to the bit, three numbers have an order


class _Taking:
    """What is taken from one captured call while its backward pass runs."""

    def __init__(self, take: Take, parameters: set[nn.Parameter]) -> None:
        self._take = take
        self._parameters = parameters
        self._first: dict[nn.Parameter, tuple[torch.Tensor, bool]] = {}

    def __call__(self, parameter: nn.Parameter, gradient: torch.Tensor, owned: bool, parts: int) -> torch.Tensor | None:
        if parameter not in self._parameters:
            return gradient
        if parts == _MOST_EDGES:
            if parameter not in self._first:
                self._first[parameter] = gradient, owned
                return None
            first, owned = self._first.pop(parameter)
            gradient = first.add_(gradient) if owned else first + gradient
        return None if self._take(parameter, gradient) else gradient


_TAKING: dict[Any, _Taking] = {}  # by the node of autograd that runs a captured backward pass


def hand_over(position: int, gradient: torch.Tensor, owned: bool, parts: int) -> torch.Tensor | None:
    """Give a gradient, one of `parts` of its parameter's, to whoever takes it, see Note [Handing over]."""
    if not _TAKING:
        return gradient
    node: Any = _torch.current_node()
    taking = _TAKING.get(node)
    if taking is None:
        return gradient
    parameter = variable_behind(node.next_functions[position][0])  # None: behind a view, for its hooks
    return gradient if parameter is None else taking(parameter, gradient, owned, parts)


hand_over.passes_while_empty = _TAKING, 1  # type: ignore[attr-defined]  # for generated code, see `codegen.py`


@contextlib.contextmanager
def taking(loss: torch.Tensor, parameters: Sequence[nn.Parameter], take: Take) -> Iterator[None]:
    """Give whole gradients of these parameters to `take` in the backward pass from `loss` that runs meanwhile."""
    sources = _sources(loss)
    calls: dict[Any, set[nn.Parameter]] = defaultdict(set)
    for parameter in parameters:
        nodes = sources.get(parameter, [])
        if len(set(nodes)) == 1 and len(nodes) <= _MOST_EDGES and not is_watched(parameter):
            calls[nodes[0]].add(parameter)
    _TAKING.update({node: _Taking(take, wanted) for node, wanted in calls.items()})
    try:
        yield
    finally:
        for node in calls:
            _TAKING.pop(node, None)


def insert_hand_overs(backward: fx.Graph, inputs: Sequence[fx.Node]) -> None:
    """Let a backward graph hand over the gradients of the parameters among its joint graph's inputs."""
    output = backward.output_node()
    results: list[Any] = list(output.args[0])  # type: ignore[arg-type]
    made = [node for node in results if isinstance(node, fx.Node)]
    for node in made:
        _bring_forward(node)
    places = {node: place for place, node in enumerate(backward.nodes)}
    nodes = list(places)
    last_reads = _last_reads(places)
    weights = {
        position: storage_key(tensors_of(inputs[position])[0])
        for position, gradient in enumerate(results)
        if isinstance(gradient, fx.Node) and _is_parameter(inputs[position])
    }
    parts = Counter(weights.values())
    shared = Counter(storage_key(each) for node in made for each in tensors_of(node))
    given = {
        key for position, key in weights.items() if results[position].op != "call_function"
    }  # not made by the pass
    for position, key in weights.items():
        if key in given:
            continue
        gradient = results[position]
        place = max(places[gradient], last_reads.get(key, 0))
        with backward.inserting_after(nodes[place]):
            call = backward.call_function(hand_over, (position, gradient, _is_alone(gradient, shared), parts[key]))
        call.meta["val"] = gradient.meta["val"]
        results[position] = call
    output.args = (results,)


def _bring_forward(gradient: fx.Node) -> None:
    """Let the views that turn an operation's result into a gradient stand right behind it."""
    sources = gradient.all_input_nodes
    if len(sources) == 1 and sources[0].op == "call_function" and _is_view(gradient, sources[0]):
        _bring_forward(sources[0])
        sources[0].append(gradient)


def _is_view(node: fx.Node, source: fx.Node) -> bool:
    mine, theirs = tensors_of(node), tensors_of(source)
    return len(mine) == len(theirs) == 1 and storage_key(mine[0]) == storage_key(theirs[0])


def _last_reads(places: dict[fx.Node, int]) -> dict[int, int]:
    """Where each storage is read for the last time, by any of its views."""
    last: dict[int, int] = {}
    for node, place in places.items():
        if node.op != "output":
            for source in node.all_input_nodes:
                last.update((storage_key(tensor), place) for tensor in tensors_of(source))
    return last


def _is_parameter(node: fx.Node) -> bool:
    return type(node.meta.get("desc")).__name__ == "ParamAOTInput"


def _is_alone(gradient: fx.Node, shared: Counter[int]) -> bool:
    """Whether no other result of the pass is in the same memory; `shared` counts the results of each storage."""
    (tensor,) = tensors_of(gradient)
    whole = tensor.is_contiguous() and tensor.nbytes == tensor.untyped_storage().nbytes()
    return whole and shared[storage_key(tensor)] == 1


def _sources(loss: torch.Tensor) -> dict[nn.Parameter, list[Any]]:
    """For every parameter the nodes of autograd that hand it a gradient, once for each edge."""
    sources: dict[nn.Parameter, list[Any]] = defaultdict(list)
    seen: set[Any] = set()
    waiting: list[Any] = [loss.grad_fn]
    while waiting:
        node = waiting.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        for following, _ in node.next_functions:
            variable = variable_behind(following)
            if variable is not None:
                sources[variable].append(node)
            else:
                waiting.append(following)
    return sources


def is_watched(parameter: nn.Parameter) -> bool:
    """Whether somebody else wants to see the gradient."""
    hooks: Any = parameter
    return bool(hooks._backward_hooks or hooks._post_accumulate_grad_hooks)
