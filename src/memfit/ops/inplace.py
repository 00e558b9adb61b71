"""Which operators have a form that overwrites their first argument, with the same numbers."""

from typing import Any

import torch


def in_place_form(target: Any) -> Any | None:
    """The operator that does the same as `target` into its first argument, if there is one."""
    if not isinstance(target, torch._ops.OpOverload) or target.namespace != "aten":
        return None
    packet = getattr(torch.ops.aten, target._opname + "_", None)
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
