"""Refuse a backward pass that would compute values again from parameters that have changed meanwhile.

Note [Behind autograd's back]
    Eager keeps what it computed. A captured backward pass computes some of it again, from parameters and buffers as
    they are then. Autograd knows of writes into them, but not of those through `.data`. So of each that is read again
    a few bytes, at the start and in the middle, are kept and compared before the backward pass. That takes a fraction
    of a microsecond each on a CPU; elsewhere it would wait for the device, and is not done. A write that leaves those
    bytes as they were is not seen.
"""

import ctypes
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from memfit import _torch
from memfit.capture.trace import Joint
from memfit.errors import ExecutionError
from memfit.ir import Compute, Graph, Kind, Phase, Program

_BYTES = 16  # of a place
_MOST_WHOLE_BYTES = 64  # of a tensor that is looked at whole
_address = torch.Tensor.data_ptr
_PLAIN = frozenset((torch.Tensor, nn.Parameter))


class Unchanged:
    """Compares what a backward pass reads again, see Note [Behind autograd's back]."""

    def __init__(self, named: Mapping[int, str]) -> None:
        """`named` are places among what a call is given, and what is there."""
        self._names, self._places = [*named.values()], [*named]
        self._known: tuple[list[int], list[Any], list[str]] = ([], [], [])  # addresses, bytes there, whose they are

    def watch(self, given: Sequence[Any], output: torch.Tensor) -> None:
        """Compare before the backward pass behind an output."""
        node = _torch.compiled_node(output)
        if node is None:
            return
        tensors = [given[place] for place in self._places]
        if not _PLAIN.issuperset(map(type, tensors)):  # without memory, or with more than one
            return
        before = self._content(tensors)

        def compare(_gradients: Any) -> None:
            if tensors and self._content(tensors) != before:
                self._refuse(before)
            if not _torch.keeps_graph():
                tensors.clear()  # the loss, and the graph with it, may be held for long

        _torch.before_backward(node, compare)

    def _content(self, tensors: Sequence[torch.Tensor]) -> bytes:
        addresses = [*map(_address, tensors)]
        known = self._known
        if addresses != known[0]:
            spans = [(each, name) for tensor, name in zip(tensors, self._names, strict=True) for each in _spans(tensor)]
            known = self._known = (addresses, [each for each, _ in spans], [name for _, name in spans])
        return b"".join(known[1])

    def _refuse(self, before: bytes) -> None:
        place = 0
        for content, name in zip(*self._known[1:], strict=True):
            if bytes(content) != before[place : place + len(content)]:
                raise ExecutionError(
                    f"{name} was written into between forward and backward (through .data, or under no_grad); a "
                    "captured call computes values again from it in its backward pass: write into it after "
                    "loss.backward()"
                )
            place += len(content)


def read_again(joint: Joint, graph: Graph, program: Program) -> Unchanged | None:
    """Watch what a program reads again in its backward pass of all that a call is given; None if that is nothing."""
    read = [graph.storages[each] for each in {*_read_again(graph, program)}]
    arguments = {each.name for each in read if each.kind is Kind.BATCH} - joint.changed_names
    states = {each.name for each in read if each.kind in (Kind.PARAMETER, Kind.BUFFER)} - joint.changed_names
    named = {place: name for place, name in enumerate(joint.state_names) if name in states}
    first = len(joint.state_names)
    named |= {place: f"argument {name}" for place, name in enumerate(joint.input_names, first) if name in arguments}
    return Unchanged(named) if named else None


def _read_again(graph: Graph, program: Program) -> Iterator[int]:
    """Yield what operations read in the backward pass that eager runs in the forward pass, or not at all."""
    for each in program.backward:
        if isinstance(each, Compute):
            operation = graph.operation(each.operation)
            if operation.phase is Phase.FORWARD or each.operation >= len(graph.operations):
                yield from operation.inputs


def _spans(tensor: torch.Tensor) -> Iterator[Any]:
    """Look at the bytes of a tensor that are compared."""
    if tensor.device.type != "cpu" or not tensor.numel():
        return
    start, whole_bytes = tensor.data_ptr(), tensor.nbytes
    if not tensor.is_contiguous():
        yield _bytes_at(start, tensor.element_size())
    elif whole_bytes <= _MOST_WHOLE_BYTES:
        yield _bytes_at(start, whole_bytes)
    else:
        yield from (_bytes_at(place, _BYTES) for place in (start, start + whole_bytes // 2))


def _bytes_at(address: int, count: int) -> memoryview:
    """Look at memory without holding it: addresses are compared before it is read."""
    return memoryview((ctypes.c_char * count).from_address(address)).cast("B")
