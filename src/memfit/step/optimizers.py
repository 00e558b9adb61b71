"""What is known about optimizers: whether they may be run on a part of the parameters.

Note [Safe in parts]
    An optimizer that updates every parameter by itself gives the same numbers when it is run on one parameter
    at a time. One that works element by element gives the same numbers on slices of a parameter too. Both are
    properties of a class that no test on one model can prove, so they are listed here.
"""

from collections.abc import Sequence
from typing import Any

from torch import nn, optim
from torch.optim import Optimizer

from memfit.errors import InvalidInput

ELEMENTWISE: tuple[type[Optimizer], ...] = (
    optim.SGD,
    optim.Adam,
    optim.AdamW,
    optim.NAdam,
    optim.RAdam,
    optim.Adamax,
    optim.Adadelta,
    optim.Adagrad,
    optim.RMSprop,
    optim.Rprop,
    optim.ASGD,
)
BY_PARAMETER: tuple[type[Optimizer], ...] = (*ELEMENTWISE, optim.Adafactor, optim.Muon, optim.SparseAdam)
LOW_BIT = {  # of torchao, which need not be installed
    f"torchao.optim.adam.{name}{kind}" for name in ("Adam", "AdamW") for kind in ("8bit", "4bit", "Fp8")
}


def is_elementwise(optimizer: Optimizer) -> bool:
    """Whether slices of a parameter may be updated one after the other, see Note [Safe in parts]."""
    return type(optimizer) in ELEMENTWISE


def is_low_bit(optimizer: Optimizer) -> bool:
    """Whether it is one of torchao's, which compile their step: what that allocates has to be seen."""
    return _qualified_name(optimizer) in LOW_BIT


def check_in_parts(optimizer: Optimizer, technique: str, allow: Sequence[str]) -> None:
    """Refuse to run an optimizer parameter by parameter if that may change what it does."""
    check_without_hooks(optimizer, technique)
    if type(optimizer) in BY_PARAMETER or is_low_bit(optimizer) or "unknown-optimizer" in allow:
        return
    raise InvalidInput(
        f"{technique} runs the optimizer once for every parameter, and {type(optimizer).__name__} is not known to give "
        'the same numbers that way; use an optimizer of torch.optim, update="after" without a tier, or vouch for it '
        'with allow=("unknown-optimizer",)'
    )


def check_without_hooks(optimizer: Optimizer, technique: str) -> None:
    """Refuse hooks on the step, also those that came later: there is no one step that they could be called at."""
    if optimizer._optimizer_step_pre_hooks or optimizer._optimizer_step_post_hooks:
        raise InvalidInput(
            f"{technique} runs the optimizer once for every parameter, and this {type(optimizer).__name__} has hooks "
            'on its step, which would run as often; remove them, or use update="after" without a tier'
        )


def check_movable(optimizer: Optimizer) -> None:
    """Refuse to move state that is not made of plain tensors."""
    if is_low_bit(optimizer):
        raise InvalidInput(
            f"{type(optimizer).__name__} keeps its state in quantized tensors, which cannot be moved to another tier; "
            "use it without state_tier, or an optimizer of torch.optim"
        )


def check_without_closure(optimizer: Any) -> None:
    """Refuse what is no optimizer, and what evaluates the loss by itself."""
    if not isinstance(optimizer, Optimizer):
        raise InvalidInput(
            f"an optimizer was expected, {type(optimizer).__name__} was given; make one, for example "
            "torch.optim.AdamW(model.parameters())"
        )
    if isinstance(optimizer, optim.LBFGS):
        raise InvalidInput(
            "LBFGS evaluates the loss several times in one update, which a training step does once; use another "
            "optimizer, or call it yourself"
        )


def parameters_of(optimizer: Optimizer) -> list[nn.Parameter]:
    """The parameters an optimizer trains, in its own order."""
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def _qualified_name(optimizer: Optimizer) -> str:
    return f"{type(optimizer).__module__}.{type(optimizer).__qualname__}"
