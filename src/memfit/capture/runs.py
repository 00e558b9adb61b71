"""Find neighbouring operators of a captured graph that can become one stretch.

Note [Runs]
    A run is what stands between two operators that no kernel is fused with: convolutions, products, attention,
    draws of random numbers. It is found in the order of the eager run, in one phase, so whoever reads what a run
    makes comes after it, and nothing moves across a decision of the planner. Views belong to no run: those that
    members read are copied into the stretch, and stand outside for everyone else.

Note [Pools]
    Pools are part of runs where channels lie last. Elsewhere they would be faster in a stretch too, but what it holds
    is more than the pool by itself holds, whose places can be kept in bytes (`ops/max_pool.py`): the smallest budget of
    GoogLeNet, 0.22 of its activations, would be 0.43.
"""

import dataclasses
import operator
from collections.abc import Iterator
from typing import Any

import torch
from torch import fx

from memfit.capture.layout import lies_channels_last
from memfit.capture.nodes import is_operator, is_random, is_view, shows, tensors_of
from memfit.ops.lean import is_backward

_SMALLEST_RUN_BYTES = 2**18  # of all it reads and makes; below that a kernel is not worth its compilation

aten = torch.ops.aten


@dataclasses.dataclass(frozen=True, kw_only=True)
class Run:
    """Neighbouring operators, and what connects them with the rest of the graph."""

    members: tuple[fx.Node, ...]
    outputs: tuple[fx.Node, ...]  # members that somebody else reads

    @property
    def is_backward(self) -> bool:
        return is_backward(self.members[0])

    @property
    def last(self) -> fx.Node:
        return self.members[-1]


def find_runs(graph: fx.Graph) -> list[Run]:
    """All runs of at least two operators that move enough memory."""
    runs = [_run(members) for members in _member_lists(graph)]
    return [run for run in runs if run.outputs and _is_worth_it(run)]


def _member_lists(graph: fx.Graph) -> Iterator[list[fx.Node]]:
    members: list[fx.Node] = []
    inside: set[fx.Node] = set()
    for node in graph.nodes:
        if node.op != "call_function":
            continue
        if node.target is operator.getitem:
            if node.args[0] in inside:
                members.append(node)
                inside.add(node)
            continue
        if is_view(node):
            continue
        if not is_fusible(node) or (members and is_backward(members[0]) != is_backward(node)):
            yield members
            members, inside = [], set()
        if is_fusible(node):
            members.append(node)
            inside.add(node)
    yield members


def _run(members: list[fx.Node]) -> Run:
    inside = set(members)
    return Run(
        members=tuple(members),
        outputs=tuple(node for node in members if _makes_a_tensor(node) and _is_read_outside(node, inside)),
    )


def _makes_a_tensor(node: fx.Node) -> bool:
    return isinstance(node.meta.get("val"), torch.Tensor)


def _is_read_outside(node: fx.Node, inside: set[fx.Node]) -> bool:
    """Whether anybody but members reads a node, also through views."""
    return any(
        user not in inside and (user.op == "output" or not shows(user) or _is_read_outside(user, inside))
        for user in node.users
    )


def _is_worth_it(run: Run) -> bool:
    operators = [node for node in run.members if is_operator(node)]
    made_bytes = sum(tensor.untyped_storage().nbytes() for node in run.outputs for tensor in tensors_of(node))
    read = {source for node in operators for source in node.all_input_nodes} - set(run.members)
    read_bytes = sum(tensor.untyped_storage().nbytes() for node in read for tensor in tensors_of(node))
    return len(operators) > 1 and made_bytes + read_bytes >= _SMALLEST_RUN_BYTES


def is_fusible(node: fx.Node) -> bool:
    """Whether Inductor writes kernels of its own for an operator, that it fuses with others."""
    target: Any = node.target
    if not isinstance(target, torch._ops.OpOverload) or is_random(node) or not _all_strided(node):
        return False
    if target.overloadpacket is aten.clone and _turns_images(node):
        return False
    if target.overloadpacket in _POOLS:  # see Note [Pools]
        return any(lies_channels_last(tensor) for each in node.all_input_nodes for tensor in tensors_of(each))
    return target.overloadpacket in _FUSIBLE or torch.Tag.pointwise in target.tags


def _turns_images(node: fx.Node) -> bool:
    """Whether images or weights are copied into the other layout, which is slow alone and in a kernel with others."""
    (source,) = node.all_input_nodes
    return lies_channels_last(source.meta["val"]) != lies_channels_last(node.meta["val"])


def _all_strided(node: fx.Node) -> bool:
    tensors = [tensor for each in (node, *node.all_input_nodes) for tensor in tensors_of(each)]
    return len({tensor.device for tensor in tensors}) <= 1 and all(
        tensor.layout is torch.strided and not tensor.is_complex() for tensor in tensors
    )


_POOLS = {
    aten.max_pool2d_with_indices,
    aten.max_pool2d_with_indices_backward,
    aten.avg_pool2d,
    aten.avg_pool2d_backward,
}

_FUSIBLE = {
    aten.native_batch_norm,
    aten._native_batch_norm_legit,
    aten._native_batch_norm_legit_functional,
    aten._batch_norm_with_update_functional,
    aten.native_batch_norm_backward,
    aten.batch_norm_backward,
    aten.native_layer_norm,
    aten.native_layer_norm_backward,
    aten.native_group_norm,
    aten.native_group_norm_backward,
    aten._fused_rms_norm,
    aten._fused_rms_norm_backward,
    aten._softmax,
    aten._softmax_backward_data,
    aten._log_softmax,
    aten._log_softmax_backward_data,
    aten.nll_loss_forward,
    aten.nll_loss_backward,
    aten.mse_loss,
    aten.mse_loss_backward,
    aten.threshold_backward,
    aten.hardtanh_backward,
    aten.leaky_relu_backward,
    aten.gelu_backward,
    aten.silu_backward,
    aten.sigmoid_backward,
    aten.tanh_backward,
    aten.elu_backward,
    aten.softplus_backward,
    aten.hardsigmoid_backward,
    aten.hardswish_backward,
    aten.sum,
    aten.mean,
    aten.var_mean,
    aten.amax,
    aten.amin,
    aten.clone,
    aten._to_copy,
    aten.full,
    aten.full_like,
    aten.zeros,
    aten.zeros_like,
    aten.new_zeros,
    aten.ones_like,
    aten.scalar_tensor,
    aten.arange,
    aten.cat,
    aten.constant_pad_nd,
    aten.slice_backward,
    aten.select_backward,
    aten.masked_fill,
    aten.where,
}
