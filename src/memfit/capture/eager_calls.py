"""Call operators in a trace so that it keeps what the eager run does.

Note [Draws in the order of memory]
    A generator fills a dense tensor in the order of its memory. The functional form that a trace puts in the place of
    `bernoulli_` always makes a contiguous result, so on a transposed tensor it would draw other numbers: there the
    operator is called on a contiguous view. `rrelu` draws into a tensor of its own, in an order that a trace loses.

Note [Written in place]
    What is written over keeps its layout. The functional forms of many operators (`index_add`) make a contiguous
    result instead, which is copied into the layout of what they stand for.

Note [Ends of rows]
    Kernels compute many elements at once, and those at the end of a row one by one, with other roundings of functions
    like `sigmoid`. Parts of one tensor that are written over (gates of a GRU) have rows; the result of a functional
    form has none, it is one long row. Where rows are not whole multiples of what is computed at once, such a function
    is given rows with gaps between them.

Note [Formulas of subclasses]
    Some backward formulas do otherwise where tensors are of a subclass, as those of a trace are: `prod` looks for
    zeros, and divides where there are none, factorizations multiply in another order. The last bits are others then.

Note [Statistics apart]
    The batch norm of a GPU's library writes new running statistics into its arguments, and its schema does not say so:
    a graph that runs it to measure it, or again, would write them again. So it is given copies, and what it makes of
    those is written into the statistics as any other value, once.

Note [Casts inside]
    What `bilinear` runs calls other operators inside, which cast under autocast. A captured graph runs outside of it,
    where they would not.
"""

from typing import Any

import torch

from memfit.ops.calls import WRITES_STATISTICS

aten = torch.ops.aten

_AT_ONCE_BYTES = 128  # of elements that kernels compute together
_ROUNDED_BY_PLACE = {
    aten.sigmoid_.default: aten.sigmoid.default,
    aten.tanh_.default: aten.tanh.default,
    aten.exp_.default: aten.exp.default,
}


_OTHER_FORMULAS = {
    aten.cholesky_inverse.default: "cholesky_inverse",
    aten.linalg_cholesky_ex.default: "cholesky",
    aten._linalg_eigh.default: "eigh",
    aten.linalg_lu_factor_ex.default: "lu_factor",
    aten.linalg_qr.default: "qr",
    aten.prod.dim_int: "prod",
    aten.prod.default: "prod",
}


def refuse_other_formulas(operator: Any, args: Any) -> None:
    """Refuse what is differentiated with other bits in a trace, see Note [Formulas of subclasses]."""
    if operator in _OTHER_FORMULAS and torch.is_grad_enabled() and args[0].requires_grad:
        raise ValueError(
            f"the gradient of {_OTHER_FORMULAS[operator]} is computed otherwise in a trace, with other last bits; "
            "leave that part out of the module that is captured"
        )


_STATISTICS = slice(3, 5)  # among their arguments
_TRAINING = 5


def statistics_written(operator: Any, args: Any) -> list[torch.Tensor]:
    """Return the running statistics that a call writes, see Note [Statistics apart]."""
    if operator not in WRITES_STATISTICS or not args[_TRAINING]:
        return []
    return [each for each in args[_STATISTICS] if isinstance(each, torch.Tensor)]


def with_statistics_apart(operator: Any, args: Any, kwargs: Any) -> Any:
    """Call a batch norm of a library, see Note [Statistics apart]."""
    copies = [None if each is None else each.clone() for each in args[_STATISTICS]]
    result = operator(*args[: _STATISTICS.start], *copies, *args[_STATISTICS.stop :], **kwargs)
    for each, copy in zip(args[_STATISTICS], copies, strict=True):
        if each is not None:
            each.copy_(copy)
    return result


def refuse_casts_inside(operator: Any) -> None:
    """Refuse, under autocast, what a captured graph would compute in another precision, see Note [Casts inside]."""
    if operator is aten._trilinear.default:
        raise ValueError("bilinear under autocast casts inside, which a captured call would not; switch autocast off")


def drawn(operator: Any, args: Any, kwargs: Any) -> Any:
    """Fill a tensor, see Note [Draws in the order of memory]."""
    tensor, *rest = args
    if tensor.is_contiguous():
        return operator(*args, **kwargs)
    _refuse_rrelu(operator)
    view = tensor.permute(sorted(range(tensor.dim()), key=lambda axis: -tensor.stride(axis)))
    if operator is aten.normal_.default:
        if not view.is_contiguous():
            raise ValueError("normal_ on a slice draws other numbers in a trace; fill a whole tensor and slice it")
        return operator(*args, **kwargs)  # has its own way for dense tensors, which the trace keeps
    operator(view, *rest, **kwargs)
    return tensor


def made_from_draws(operator: Any, args: Any, kwargs: Any) -> Any:
    """Make a new tensor from draws."""
    if any(isinstance(each, torch.Tensor) and not each.is_contiguous() for each in args):
        _refuse_rrelu(operator)
    return operator(*args, **kwargs)


def _refuse_rrelu(operator: Any) -> None:
    if "rrelu" in operator._schema.name:
        raise ValueError("rrelu of a tensor that is not contiguous draws other numbers in a trace; call contiguous()")


def written(operator: Any, args: Any, kwargs: Any) -> Any:
    """Write over the first argument, see Note [Written in place] and Note [Ends of rows]."""
    tensor = args[0]
    if not isinstance(tensor, torch.Tensor) or torch.Tag.inplace_view in operator.tags:  # a list of them; `squeeze_`
        return operator(*args, **kwargs)
    if operator in _ROUNDED_BY_PLACE and _has_gaps(tensor):
        result = _in_rows(_ROUNDED_BY_PLACE[operator], tensor)
    elif torch.Tag.pointwise not in operator.tags and _is_turned(tensor) and _functional(operator) is not None:
        result = _functional(operator)(*args, **kwargs)
    else:
        return operator(*args, **kwargs)
    tensor.copy_(result)
    return tensor


def _has_gaps(tensor: torch.Tensor) -> bool:
    """Return whether rows lie apart, and have elements that are computed one by one."""
    if tensor.dim() != 2 or tensor.stride(1) != 1 or tensor.stride(0) <= tensor.shape[1] or tensor.shape[0] < 2:
        return False
    return bool(tensor.shape[1] * tensor.element_size() % _AT_ONCE_BYTES)


def _in_rows(function: Any, tensor: torch.Tensor) -> torch.Tensor:
    width = tensor.shape[1]
    rows = aten.constant_pad_nd.default(tensor, [0, 1])
    result: torch.Tensor = function(aten.slice.Tensor(rows, 1, 0, width))
    return result


def _is_turned(tensor: torch.Tensor) -> bool:
    """Return whether elements lie without gaps, but in another order."""
    strides = tensor.stride()
    order = sorted(range(tensor.dim()), key=lambda axis: -strides[axis])
    return not tensor.is_contiguous() and tensor.permute(order).is_contiguous()


def _functional(operator: Any) -> Any:
    """The form of an operator that makes a new tensor; None if there is none of that name."""
    _, _, name = operator._schema.name.partition("::")
    packet = getattr(aten, name.removesuffix("_"), None)
    return getattr(packet, operator._overloadname, None) if name.endswith("_") else None
