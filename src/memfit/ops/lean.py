"""What a lean operator is: another way to get a value, that keeps less in memory.

A file of this folder holds the functions of one lean operator, its declaration and a matcher that
finds in a captured graph where it can be used. `registry.py` lists them all.

Note [Lean functions]
    The functions run as they are in captured graphs, on real tensors, and once on tensors
    without memory to learn what they make. They are plain functions of tensors and constants.
    They work in pieces where they need scratch memory, because that counts as workspace; what they make is
    there before the first piece, so that on tensors without memory one piece is enough (`first_piece_only`).
    They must be safe on any values of their inputs: to be measured they are run on made-up ones.
"""

import contextlib
import dataclasses
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextvars import ContextVar
from typing import Any

import torch
from torch import fx

SMALLEST_BYTES = 4096  # of what is worth another form; everything smaller is kept as it is


@dataclasses.dataclass(frozen=True, kw_only=True)
class Site:
    """A node of a captured graph, as matchers see it."""

    node: fx.Node
    is_backward: bool
    makes_memory: bool  # it is the first to show its storage, not a view of another value
    is_kept: bool  # made in the forward pass, read in the backward pass


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Alternative:
    """A call that makes a smaller form of a node's value, or makes that value again."""

    function: Callable[..., Any]
    args: tuple[Any, ...]  # nodes, constants, and alternatives that make a smaller form
    of: fx.Node
    form: str = ""  # name of the smaller form: "bits"; empty: `of` itself is made again


@dataclasses.dataclass(frozen=True, kw_only=True)
class LeanOperator:
    """The declaration of a lean operator."""

    name: str
    technique: str  # what switches it on: "lean", "8-bit"
    keeps: str  # in a sentence, for the table of operators
    exact: bool  # bit for bit what the model's own operators make
    certain: bool = True  # False: exact for most shapes and processors, and used only where it was seen to be
    functions: tuple[Callable[..., Any], ...]
    alternatives: Callable[[Site], Iterable[Alternative]]
    in_place: Mapping[Callable[..., Any], Callable[..., Any]] = dataclasses.field(default_factory=dict)
    # by function: the form that puts its (first) result into its first argument


def is_backward(node: fx.Node) -> bool:
    """Return whether autograd made a node."""
    return bool(node.meta.get("autograd_backward")) or node.meta.get("partitioner_tag") == "is_backward"


def value_of(node: Any) -> torch.Tensor | None:
    """The tensor a node stands for, if it is one tensor."""
    value = node.meta.get("val") if isinstance(node, fx.Node) else None
    return value if isinstance(value, torch.Tensor) else None


def behind_detach(node: Any) -> Any:
    """The node whose value a chain of `detach` shows."""
    while isinstance(node, fx.Node) and node.target is torch.ops.aten.detach.default:
        node = node.args[0]
    return node


def behind_views(node: Any) -> Any:
    """The node whose elements a chain of reordering views shows."""
    while isinstance(node, fx.Node) and node.target in _REORDERING:
        node = node.args[0]
    return node


def seen_forward(node: Any) -> Any:
    """The node itself, or the one behind it if the backward pass made it as a view of a value of the forward pass."""
    behind = behind_views(node)
    return behind if isinstance(node, fx.Node) and is_backward(node) and not is_backward(behind) else node


_REORDERING = {
    torch.ops.aten.detach.default,
    torch.ops.aten.permute.default,
    torch.ops.aten.transpose.int,
    torch.ops.aten.t.default,
    torch.ops.aten.view.default,
}


def is_worth_it(value: torch.Tensor) -> bool:
    """Whether a value is big enough, and whole: dense, and all of its storage."""
    size_bytes = value.numel() * value.element_size()
    return size_bytes >= SMALLEST_BYTES and size_bytes == value.untyped_storage().nbytes() and is_dense(value)


def is_dense(tensor: torch.Tensor) -> bool:
    """Whether the elements lie in memory without gaps and overlaps, in some order."""
    expected = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size != 1:
            if stride != expected:
                return False
            expected *= size
    return True


def same_layout(*tensors: torch.Tensor) -> bool:
    """Whether elements of the same place in memory are elements of the same place in all tensors."""
    return len({(each.shape, each.stride(), each.dtype) for each in tensors}) == 1


def in_memory_order(tensor: torch.Tensor) -> torch.Tensor:
    """All elements of a dense tensor in the order they lie in memory, as a view."""
    return tensor.as_strided((tensor.numel(),), (1,))


def pieces(numel: int, length: int) -> Iterator[slice]:
    """Cut a number of elements into pieces of at most `length`."""
    end = min(numel, length) if _first_piece_only.get() else numel
    return (slice(start, min(start + length, numel)) for start in range(0, end, length))


_first_piece_only = ContextVar("first_piece_only", default=False)


@contextlib.contextmanager
def first_piece_only() -> Iterator[None]:
    """Go through one piece and no more: for tensors without memory, of which a big batch has thousands of pieces."""
    before = _first_piece_only.set(True)
    try:
        yield
    finally:
        _first_piece_only.reset(before)
