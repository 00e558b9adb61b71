"""Which operators have a form that overwrites their first argument, with the same numbers."""

from typing import Any

import torch

# Operators whose in-place form has another overload name than the functional one.
_RENAMED = {"aten.bernoulli.p": ("bernoulli_", "float")}


def in_place_form(target: Any) -> Any | None:
    """The operator that does the same as `target` into its first argument, if there is one."""
    if not isinstance(target, torch._ops.OpOverload) or target.namespace != "aten":
        return None
    name, overload = _RENAMED.get(str(target), (target._opname + "_", target._overloadname))
    packet = getattr(torch.ops.aten, name, None)
    form = getattr(packet, overload, None) if packet is not None else None
    if form is None or not _same_arguments(target, form):
        return None
    return form


def _same_arguments(target: Any, form: Any) -> bool:
    arguments, form_arguments = target._schema.arguments, form._schema.arguments
    return (
        len(arguments) == len(form_arguments)
        and all(str(one.type) == str(other.type) for one, other in zip(arguments, form_arguments, strict=True))
        and bool(form_arguments)
        and form_arguments[0].is_write
        and not any(argument.is_write for argument in form_arguments[1:])
    )
