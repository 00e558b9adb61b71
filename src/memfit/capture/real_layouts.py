"""Lay out fake results as the operators of this machine lay out real ones.

Note [Real layouts]
    A trace runs on fake tensors, and torch describes what operators make of them in Python. For results of arguments
    that are not contiguous that is often not what the operator does: `elu_backward` follows its first argument, its
    description the second. A view that the trace takes for granted then fails in the step, and what counts on the
    order of elements computes something else. So an operator that is given such arguments is run once, by itself and
    on few rows, and the fake result is laid out as the real one. What cannot be run so is believed.
"""

import contextlib
import functools
import json
from collections.abc import Iterator
from typing import Any

import torch
from torch.utils import _pytree as pytree

from memfit import _torch
from memfit.capture.batch_norms import made_at_once
from memfit.measure import signature as signatures
from memfit.tensors import storage_key, tensors_in

_MOST_BYTES = 2**20  # of the arguments of a call that is run
_FEW_ROWS = 2
_Seen = tuple[torch.dtype, tuple[int, ...]]  # of a result: its dtype, and its axes from the widest stride on


@contextlib.contextmanager
def real_layouts() -> Iterator[None]:
    """Correct the results of fake tensors meanwhile, see Note [Real layouts]."""
    with _torch.fake_results_through(_corrected, made_at_once):
        yield


def _corrected(mode: _torch.FakeTensorMode, operator: Any, args: Any, kwargs: Any, result: Any) -> Any:
    given = [each for each in tensors_in((args, kwargs)) if isinstance(each, torch.Tensor)]
    if not _is_in_doubt(operator, given) or any(each.device.type != "cpu" for each in given):
        return result
    made = [each for each in pytree.tree_leaves(result) if isinstance(each, torch.Tensor)]
    if {storage_key(each) for each in made} & {storage_key(each) for each in given}:
        return result  # a view, which has no layout of its own
    try:
        signature = signatures.encode(operator, args, kwargs)
    except (TypeError, ValueError):
        return result
    seen = iter(_seen(signature))
    return pytree.tree_map_only(torch.Tensor, lambda each: _laid_out(mode, each, next(seen, None)), result)


def _is_in_doubt(operator: Any, given: list[torch.Tensor]) -> bool:
    """Return whether a result may be laid out otherwise than its description says."""
    if getattr(operator, "namespace", "") != "aten" or operator._schema.is_mutable or "mkldnn" in str(operator):
        return False  # what oneDNN made for itself cannot be made up
    if "norm" in operator._schema.name and any(each.dtype in (torch.bfloat16, torch.float16) for each in given):
        return True  # statistics of 16-bit values are kept in 32 bits or not, as the kernel likes
    if all(_is_in_order(each) for each in given):
        return False
    layouts = {(each.shape, each.stride()) for each in given}
    return len(layouts) > 1 or torch.Tag.pointwise not in operator.tags


def _is_in_order(tensor: torch.Tensor) -> bool:
    return tensor.layout is not torch.strided or tensor.dim() < 2 or tensor.is_contiguous()


@functools.lru_cache(maxsize=4096)
def _seen(signature: str) -> tuple[_Seen | None, ...]:
    """What a call of this signature makes; nothing if it is not known."""
    smaller = _on_few_rows(signature)
    if sum(signatures.argument_bytes(smaller)) > _MOST_BYTES:
        return ()
    generator = torch.default_generator.get_state()  # not by torch.set_rng_state, which a forward may not call
    try:
        with _torch.no_modes(), torch.no_grad(), torch.autocast("cpu", enabled=False):
            operator, args, kwargs = signatures.decode(smaller)
            made = operator(*args, **kwargs)
            return tuple((each.dtype, _axes(each)) for each in tensors_in(made))
    except Exception:  # an operator may reject made-up values
        return ()
    finally:
        torch.default_generator.set_state(generator)


def _axes(tensor: torch.Tensor) -> tuple[int, ...]:
    """Axes of more than one element, from the widest stride on; none if elements overlap."""
    strides = tensor.stride()
    wide = [axis for axis in range(tensor.dim()) if tensor.shape[axis] > 1]
    if any(strides[axis] == 0 for axis in wide):
        return ()
    return tuple(sorted(wide, key=lambda axis: -strides[axis]))


def _laid_out(mode: _torch.FakeTensorMode, fake: torch.Tensor, seen: _Seen | None) -> torch.Tensor:
    if seen is None or fake.layout is not torch.strided:
        return fake
    dtype, axes = seen
    own = _axes(fake)
    if len(own) < 2 or sorted(axes) != sorted(own) or fake.untyped_storage().nbytes() != fake.nbytes:
        axes = own
    if axes == own and dtype == fake.dtype:
        return fake
    strides, step = list(fake.stride()), 1
    for axis in reversed(axes):
        strides[axis], step = step, step * fake.shape[axis]
    with mode:
        return torch.empty_strided(fake.shape, strides, dtype=dtype, device=fake.device)


def _on_few_rows(signature: str) -> str:
    """The same call on two samples, if its arguments are big and look like batches; strides keep their order."""
    if sum(signatures.argument_bytes(signature)) <= _MOST_BYTES:
        return signature
    name, args, kwargs = json.loads(signature)
    contents = [arg["tensor"] for arg in args if isinstance(arg, dict) and "tensor" in arg]
    rows = next((shape[0] for _, shape, _, _ in contents if len(shape) > 1), 0)
    for content in contents:
        _, shape, stride, _ = content
        if len(shape) > 1 and shape[0] == rows > _FEW_ROWS:
            content[1] = [_FEW_ROWS, *shape[1:]]
            content[2] = _dense_strides(content[1], stride)
    return json.dumps([name, args, kwargs], separators=(",", ":"))


def _dense_strides(shape: list[int], stride: list[int]) -> list[int]:
    strides, step = list(stride), 1
    for axis in sorted(range(len(shape)), key=lambda each: stride[each]):
        if stride[axis]:
            strides[axis], step = step, step * shape[axis]
    return strides
