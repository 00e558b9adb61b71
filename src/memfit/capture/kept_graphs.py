"""Graphs of primitive operators on disk, so that a later process need not decompose what an earlier one did.

A file begins with the hash of what follows: the nodes of a graph as JSON, with their names, which Inductor's cache goes
by. It is found by the hash of the graph that was decomposed and the versions of memfit and torch. What cannot be
written, or cannot be read again, is decomposed as before.
"""

import logging
import operator
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import fx

from memfit.errors import first_line
from memfit.files import cache_folder, hash_of, own_version, read_checked, write_checked

log = logging.getLogger(__name__)

_FORMAT = 1  # to be raised when graphs are decomposed or written otherwise
_SPACES = ("aten", "prims")  # of operators
_KINDS: dict[str, type] = {
    "dtype": torch.dtype,
    "layout": torch.layout,
    "memory_format": torch.memory_format,
}  # what arguments are beside numbers, words and devices; all are found in torch by name


def keep_graph(digest: str, graph: fx.Graph) -> None:
    """Keep what was made of the graph with this hash; what cannot be kept is not an error."""
    try:
        write_checked(_path(digest), _written(graph))
    except (TypeError, LookupError, OSError) as error:
        log.debug("a graph is not kept: %s", first_line(error))


def kept_graph(digest: str) -> fx.Graph | None:
    """What was made of the graph with this hash in an earlier process; to be called in a mode without memory."""
    lines = read_checked(_path(digest))
    if lines is None:
        return None
    try:
        return _read(lines)
    except (ValueError, TypeError, LookupError, AttributeError, RuntimeError) as error:
        log.warning("what was kept in %s cannot be read (%s) and is left out", _path(digest), first_line(error))
        return None


def _path(digest: str) -> Path:
    switches = [torch.are_deterministic_algorithms_enabled(), str(torch.get_default_dtype())]  # decompositions ask
    words = [_FORMAT, own_version(), torch.__version__, switches]
    return cache_folder() / "graphs" / hash_of(words)[:16] / f"{digest}.json"


def _written(graph: fx.Graph) -> list[Any]:
    numbers = {node: number for number, node in enumerate(graph.nodes)}

    def argument(value: Any) -> Any:
        if isinstance(value, fx.Node):
            return {"node": numbers[value]}
        if isinstance(value, list | tuple):
            return [argument(each) for each in value]
        if value is None or type(value) in (bool, int, float, str):
            return value
        if isinstance(value, torch.device):
            return {"device": str(value)}
        kind = next((name for name, kind in _KINDS.items() if isinstance(value, kind)), None)
        if kind is None:
            raise TypeError(f"arguments of type {type(value).__name__} are not kept")
        return {kind: str(value).removeprefix("torch.")}

    lines: list[Any] = []
    for node in graph.nodes:
        kwargs = {key: argument(value) for key, value in node.kwargs.items()}
        lines.append([node.op, node.name, _target_name(node), argument(node.args), kwargs, _value(node)])
    return lines


def _target_name(node: fx.Node) -> str:
    if node.op in ("placeholder", "output"):
        return str(node.target)
    if node.op == "call_function" and node.target is operator.getitem:
        return "getitem"
    if isinstance(node.target, torch._ops.OpOverload) and node.target.namespace in _SPACES:
        return str(node.target)
    raise TypeError(f"{node.op} of {node.target} is not kept")


def _value(node: fx.Node) -> Any:
    """What a node makes: one tensor, several, or nothing."""

    def layout(value: Any) -> list[Any]:
        if type(value).__name__ != "FakeTensor":
            raise TypeError(f"values of type {type(value).__name__} are not kept")
        return [str(value.dtype).removeprefix("torch."), list(value.shape), list(value.stride()), str(value.device)]

    if node.op == "output":
        return None
    made = node.meta["val"]
    return [layout(each) for each in made] if isinstance(made, list | tuple) else {"one": layout(made)}


def _read(lines: list[Any]) -> fx.Graph:
    graph = fx.Graph()
    nodes: list[fx.Node] = []
    for op, name, target, args, kwargs, value in lines:
        function: Any = _operator(target) if op == "call_function" else target
        read = {key: _argument(each, nodes) for key, each in kwargs.items()}
        node = graph.create_node(op, function, tuple(_argument(each, nodes) for each in args), read, name=name)
        if value is not None:
            node.meta["val"] = _empty(value["one"]) if isinstance(value, dict) else tuple(map(_empty, value))
        nodes.append(node)
    graph.lint()
    return graph


def _argument(value: Any, nodes: list[fx.Node]) -> Any:
    if isinstance(value, list):
        return [_argument(each, nodes) for each in value]
    if not isinstance(value, dict):
        return value
    ((kind, content),) = value.items()
    if kind == "node":
        return nodes[content]
    return torch.device(content) if kind == "device" else _named(kind, content)


def _named(kind: str, name: str) -> Any:
    found = getattr(torch, name)
    if not isinstance(found, _KINDS[kind]):
        raise ValueError(f"torch.{name} is not a {kind}")
    return found


def _operator(name: str) -> Callable[..., Any]:
    if name == "getitem":
        return operator.getitem
    space, packet, overload = name.split(".")
    if space not in _SPACES:
        raise ValueError(f"operators of {space} are not kept")
    function: Callable[..., Any] = getattr(getattr(getattr(torch.ops, space), packet), overload)
    return function


def _empty(layout: list[Any]) -> torch.Tensor:
    dtype, shape, stride, device = layout
    return torch.empty_strided(shape, stride, dtype=_named("dtype", dtype), device=device)
