"""Tensors in trees of anything, and the identity of their memory."""

import dataclasses
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

_PIECE = 1 << 16  # elements


def tensors_in(tree: Any) -> list[torch.Tensor]:
    """The tensors among the leaves of nested containers, in order; those in records of dataclasses too."""
    if isinstance(tree, torch.Tensor):  # mostly; found sooner
        return [tree]
    found: list[torch.Tensor] = []
    _collect(tree, found)
    return found


_NO_TENSORS = frozenset(
    {type(None), bool, int, float, str, torch.dtype, torch.device, torch.layout, torch.memory_format}
)


def _collect(tree: Any, found: list[torch.Tensor]) -> None:
    """Append the tensors of a tree; plain containers, of which a trace makes a hundred thousand, without pytree."""
    kind = type(tree)
    if kind in _NO_TENSORS:
        return
    if kind is tuple or kind is list or kind is dict:
        for each in tree.values() if kind is dict else tree:
            if isinstance(each, torch.Tensor):
                found.append(each)
            else:
                _collect(each, found)
        return
    for leaf in pytree.tree_leaves(tree):
        if isinstance(leaf, torch.Tensor):
            found.append(leaf)
        elif dataclasses.is_dataclass(leaf) and not isinstance(leaf, type):
            found += tensors_in([getattr(leaf, field.name, None) for field in dataclasses.fields(leaf)])


def states_by_name(model: nn.Module) -> dict[str, torch.Tensor]:
    """All parameters and buffers, tied ones by each of their names."""
    return dict(model.named_parameters(remove_duplicate=False)) | dict(model.named_buffers(remove_duplicate=False))


def storage_key(tensor: torch.Tensor) -> int:
    """The identity of a tensor's storage; views share it with what they show."""
    key: int = tensor.untyped_storage()._cdata
    return key


def storage_bytes(tree: Any) -> int:
    """Bytes of all distinct storages of the tensors in a tree, of sharded ones what is in this process."""
    parts = [part for tensor in tensors_in(tree) for part in parts_of(tensor)]
    return sum({storage_key(part): part.untyped_storage().nbytes() for part in parts}.values())


def parts_of(tensor: torch.Tensor) -> list[torch.Tensor]:
    """The tensors that one is made of, in this process: codes and scales of a quantized one, a share; mostly itself."""
    names = getattr(tensor, "__tensor_flatten__", None)
    if names is None:
        return [tensor]
    held = [getattr(tensor, name) for name in names()[0]]
    return [part for each in held if isinstance(each, torch.Tensor) for part in parts_of(each)]


def local_part(tensor: torch.Tensor) -> torch.Tensor:
    """The part of a tensor that is in this process: all of it, unless it is a `DTensor`."""
    local: torch.Tensor = getattr(tensor, "_local_tensor", tensor)  # `to_local()` runs operators, which may be watched
    return local


def same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two tensors hold the same numbers bit for bit: NaN equals NaN, 0.0 does not equal -0.0."""
    if (one.dtype, one.shape) != (other.dtype, other.shape):
        return False
    if one.stride() == other.stride() and _is_dense(one):
        one, other = (each.as_strided((each.numel(),), (1,)) for each in (one, other))  # nothing is copied
    return torch.equal(*(each.contiguous().reshape(-1).view(torch.uint8) for each in (one, other)))


def is_all_zero(tensor: torch.Tensor) -> bool:
    """Return whether a tensor holds nothing but zeros; looked at piece by piece, for torch makes a mask of each."""
    flat = tensor.as_strided((tensor.numel(),), (1,)) if _is_dense(tensor) else tensor.reshape(-1)
    return not any(piece.any() for piece in flat.split(_PIECE))


def _is_dense(tensor: torch.Tensor) -> bool:
    """Return whether a tensor's elements fill a stretch of memory without gaps."""
    span = 1 + sum((size - 1) * step for size, step in zip(tensor.shape, tensor.stride(), strict=True))
    return tensor.numel() > 0 and span == tensor.numel()
