"""Calls of a backward graph on values that are laid out otherwise than they were traced.

Note [Nothing is written over in another layout]
    Some kernels that write their result over what they read take for granted that both are laid out as torch would
    make the result, and write elsewhere where they are not. So what was traced to be written over is only where it
    is laid out as it was traced.
"""

import operator
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import fx
from torch.utils import _pytree as pytree

from memfit import _torch
from memfit.capture.nodes import tensors_of
from memfit.capture.real_layouts import real_layouts
from memfit.execute.codegen import OVERWRITES
from memfit.execute.handover import hand_over

Layout = tuple[int, ...]  # strides

_PASSING = (operator.getitem, hand_over)
_GIVEN_CONTIGUOUS = {  # by their formulas, which a trace does not show where that changes nothing
    torch.ops.aten.native_group_norm_backward.default,
    torch.ops.aten.cudnn_batch_norm_backward.default,
    torch.ops.aten.miopen_batch_norm_backward.default,
    torch.ops.aten._cdist_backward.default,
}
_VIEWS = (torch.ops.aten.view.default, torch.ops.aten._unsafe_view.default)


def followed(made: fx.Graph, node: fx.Node, values: Mapping[fx.Node, fx.Node]) -> fx.Node:
    """Copy a call on what may be laid out otherwise into a graph, and note how its result is laid out then."""
    given = {each: values[each] for each in node.all_input_nodes}
    if not _takes_any_layout(node.target):
        given = {each: _as_before(made, each, value) for each, value in given.items()}
    copied = made.node_copy(node, given.__getitem__)
    if copied.target in _VIEWS:
        copied.target = torch.ops.aten.reshape.default
    if node.meta.get(OVERWRITES) and _lies_as_before(node.args[0], copied.args[0]):
        return copied  # see Note [Nothing is written over in another layout]
    copied.meta[OVERWRITES] = False
    if isinstance(copied.target, torch._ops.OpOverload) or copied.target in _PASSING:
        args, kwargs = pytree.tree_map_only(fx.Node, lambda each: each.meta["val"], (copied.args, dict(copied.kwargs)))
        mode = _mode_of([each for read in node.all_input_nodes for each in tensors_of(read)])
        with torch.no_grad(), mode, real_layouts():
            copied.meta["val"] = copied.target(*args, **kwargs)
    return copied


def laid_out_as(value: torch.Tensor, layout: Layout) -> torch.Tensor:
    """Return a tensor without memory like another one in another layout."""
    with torch.no_grad(), _mode_of([value]):
        return value.new_empty_strided(value.shape, layout)


def layouts_of(node: fx.Node) -> tuple[Layout, ...]:
    """Return how all is laid out that a node makes."""
    return tuple([layout_of(each) for each in tensors_of(node)])


def layout_of(tensor: torch.Tensor) -> Layout:
    """Return strides, but those that say nothing."""
    return tuple(stride if size > 1 else 0 for size, stride in zip(tensor.shape, tensor.stride(), strict=True))


def laid_out(tensor: torch.Tensor, strides: Sequence[int]) -> torch.Tensor:
    """Copy a tensor into another layout."""
    return tensor.new_empty_strided(tensor.shape, tuple(strides)).copy_(tensor)


def _mode_of(tensors: list[torch.Tensor]) -> _torch.FakeTensorMode:
    mode = _torch.detect_fake_mode(tensors)
    assert mode is not None
    return mode


def _lies_as_before(before: Any, now: Any) -> bool:
    return not isinstance(before, fx.Node) or layouts_of(before) == layouts_of(now)


def _takes_any_layout(target: Any) -> bool:
    """Return whether eager would give an operator a gradient as it is."""
    if not isinstance(target, torch._ops.OpOverload):
        return target in _PASSING
    return target.namespace == "aten" and target not in _GIVEN_CONTIGUOUS


def _as_before(made: fx.Graph, before: fx.Node, now: fx.Node) -> fx.Node:
    """Return a value in the layout that a function was written for."""
    value = before.meta["val"]
    if not isinstance(value, torch.Tensor) or layout_of(now.meta["val"]) == layout_of(value):
        return now
    call = made.call_function(laid_out, (now, list(value.stride())))
    call.meta["val"] = value
    return call
