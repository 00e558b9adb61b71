"""Tensors in trees of anything, and the identity of their memory."""

from typing import Any

import torch
from torch.utils import _pytree as pytree


def tensors_in(tree: Any) -> list[torch.Tensor]:
    """The tensors among the leaves of nested containers, in order."""
    return [leaf for leaf in pytree.tree_leaves(tree) if isinstance(leaf, torch.Tensor)]


def storage_key(tensor: torch.Tensor) -> int:
    """The identity of a tensor's storage; views share it with what they show."""
    key: int = tensor.untyped_storage()._cdata
    return key


def storage_bytes(tree: Any) -> int:
    """Bytes of all distinct storages of the tensors in a tree."""
    return sum({storage_key(tensor): tensor.untyped_storage().nbytes() for tensor in tensors_in(tree)}.values())
