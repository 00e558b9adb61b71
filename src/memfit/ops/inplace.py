"""Which operators have a form that overwrites their first argument, with the same numbers.

Three kinds: operators with a twin that ends in an underscore (`relu_`); operators that can be told where to
put their result and read every element, or every row, before they write it; and functions of lean operators
that come with such a form.
"""

from collections.abc import Callable
from typing import Any

import torch

from memfit import _torch
from memfit.ops.registry import in_place_function

aten = torch.ops.aten


def in_place_form(target: Any) -> Any | None:
    """The operator that does the same as `target` into its first argument, if there is one."""
    if not isinstance(target, torch._ops.OpOverload):
        return in_place_function(target)
    if target.namespace != "aten":
        return None
    return _INTO_FIRST.get(target) or _underscored(target)


def _underscored(target: Any) -> Any | None:
    packet = getattr(aten, target._opname + "_", None)
    if packet is None:
        return None
    # Mostly of the same name; bernoulli.p has bernoulli_.float, pow.Tensor_Scalar has pow_.Scalar.
    overloads = sorted(packet.overloads(), key=lambda name: name != target._overloadname)
    forms = (getattr(packet, overload) for overload in overloads)
    return next((form for form in forms if _same_arguments(target, form)), None)


def _same_arguments(target: Any, form: Any) -> bool:
    arguments, form_arguments = target._schema.arguments, form._schema.arguments
    return (
        len(arguments) == len(form_arguments)
        and all(str(one.type) == str(other.type) for one, other in zip(arguments, form_arguments, strict=True))
        and bool(form_arguments)
        and form_arguments[0].is_write
        and not any(argument.is_write for argument in form_arguments[1:])
    )


def _into_first(overload: Any, result_name: str) -> Callable[..., Any]:
    """Call an operator that is told where its result goes: into its first argument."""
    function = _torch.plain_function(overload)

    def call(first: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        return function(first, *args, **kwargs, **{result_name: first})

    return call


_INTO_FIRST = {
    # A softmax and its gradient go row by row: sums of a row are taken before the row is written.
    aten._softmax.default: _into_first(aten._softmax.out, "out"),
    aten._log_softmax.default: _into_first(aten._log_softmax.out, "out"),
    aten._softmax_backward_data.default: _into_first(aten._softmax_backward_data.out, "grad_input"),
    aten._log_softmax_backward_data.default: _into_first(aten._log_softmax_backward_data.out, "out"),
    # Gradients of activations go element by element.
    aten.threshold_backward.default: _into_first(aten.threshold_backward.grad_input, "grad_input"),
    aten.hardtanh_backward.default: _into_first(aten.hardtanh_backward.grad_input, "grad_input"),
    aten.leaky_relu_backward.default: _into_first(aten.leaky_relu_backward.grad_input, "grad_input"),
    aten.gelu_backward.default: _into_first(aten.gelu_backward.grad_input, "grad_input"),
    aten.silu_backward.default: _into_first(aten.silu_backward.grad_input, "grad_input"),
    aten.sigmoid_backward.default: _into_first(aten.sigmoid_backward.grad_input, "grad_input"),
    aten.tanh_backward.default: _into_first(aten.tanh_backward.grad_input, "grad_input"),
    aten.elu_backward.default: _into_first(aten.elu_backward.grad_input, "grad_input"),
    aten.softplus_backward.default: _into_first(aten.softplus_backward.grad_input, "grad_input"),
    aten.hardsigmoid_backward.default: _into_first(aten.hardsigmoid_backward.grad_input, "grad_input"),
    # `mul_.Scalar` rounds the number to 16 bits before it multiplies 16-bit values, `mul.Scalar` does not.
    aten.mul.Scalar: aten.mul_.Tensor,
}
