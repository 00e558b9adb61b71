"""What is wished for: a budget, what plans may do, and everything else that decides one but model and sample."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

from memfit.errors import InvalidBudget, InvalidInput
from memfit.ir import LossMemory
from memfit.measure.devices import Device
from memfit.measure.optimizer import OptimizerLike
from memfit.measure.probe import Progress
from memfit.plan.select import Selection
from memfit.plan.solve import Report
from memfit.spelling import suggestion
from memfit.units import parse_bytes

Budget = int | float | str | None

AVAILABLE = "available"  # a budget: what is free here, of the device and the process
_LEAST_BYTES = 1024.0  # of a budget that is a float: below, a fraction was meant
DEVICE = "device"  # a budget: what the device that is planned for can reserve beside its context

EXACT = ("recompute", "lean")  # what plans may do unless told otherwise: the numbers stay the same bit for bit

TECHNIQUES = {
    "recompute": "compute values of the forward pass again",
    "lean": "operators that keep less and give the same bits",
    "chunk": "linear and cross-entropy in chunks: rounds differently, as closely",
    "offload": "kept activations in the next memory tier, host memory for a GPU, a file in TMPDIR for a CPU: exact",
    "inductor": "neighbouring operators compiled as one kernel, which values are made again inside: rounds differently",
    "channels-last": "images laid out as convolutions are fastest: rounds differently",
    "16-bit": "kept activations in 16 bits: lossy",
    "8-bit": "kept activations in 8 bits: lossy",
    "4-bit": "kept activations in 4 bits: lossy",
}


LOWERING = tuple(name for name in TECHNIQUES if name not in ("inductor", "channels-last"))  # those that lower a peak


@dataclasses.dataclass(frozen=True, kw_only=True)
class OutsideLoss:
    """A loss that the caller computes outside of the model, see Note [Loss outside] in `ir.py`."""

    function: Callable[[Any, Any], Any] | None  # of model and batch; None: what it takes is known
    batch: Any = None  # what it was given for
    memory: LossMemory | None = None  # of another batch, if that is all that is known

    @classmethod
    def known(cls, memory: LossMemory | None) -> "OutsideLoss | None":
        """A loss of which is known what it took; None if there is none."""
        return None if memory is None else cls(function=None, memory=memory)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Recipe:
    """Everything that decides a plan but the model and the sample."""

    budget: Budget = None
    optimizer: OptimizerLike | None = None
    allow: tuple[str, ...] = EXACT
    recompute: tuple[Selection, ...] = ()
    keep: tuple[Selection, ...] = ()
    backward_from: str = "auto"
    outputs: str = "all"
    device: Device | None = None  # None: where the model is
    loss: OutsideLoss | None = None  # None: inside the model, or not counted
    starts: tuple[tuple[int, ...] | None, ...] = ()  # how gradients of outputs come, if that is known without the loss
    seed: int = 0  # from which steps that are run to plan begin, see `regions/fullest.py`
    beside_bytes: int = 0  # live all along and not the model's: gradients of earlier batches, other models
    hook_bytes: int = 0  # of hooks, which do not run while a step is planned: at most, see `capture/hook_memory.py`
    time_limit_s: float = 6.0
    remember: bool = False  # take the plan of an earlier run, and keep this one's, see `remembered.py`
    report: Report | None = None
    progress: Progress | None = None
    counts_reserved: bool = False  # whether the budget is one of what CUDA's caching allocator reserves
    process_bytes: int | None = None  # with budget "available": what the process may take; None: what is free
    report_stage: Callable[[str], None] | None = None  # told what begins, in words

    @property
    def is_unplanned(self) -> bool:
        return self.budget is None and not self.recompute and not self.rewrites

    @property
    def external_bytes(self) -> int:
        """Return what is reserved over the whole step beside what is captured."""
        return self.beside_bytes + self.hook_bytes

    @property
    def is_for_process(self) -> bool:
        """Return whether the budget is one of the whole process, see `process_budget.py`."""
        return self.budget == AVAILABLE

    @property
    def compiles(self) -> bool:
        """Whether kernels may be compiled."""
        return "inductor" in self.allow

    @property
    def channels_last(self) -> bool:
        """Whether convolutions may read images with their channels last, see `capture/layout.py`."""
        return "channels-last" in self.allow and not self.is_unplanned

    @property
    def rewrites(self) -> tuple[str, ...]:
        """Techniques that change the graph before it is planned."""
        return tuple(each for each in self.allow if each == "chunk")

    def __post_init__(self) -> None:
        check_techniques(self.allow)
        check_budget(self.budget)


def without_channels_last(recipe: Recipe) -> Recipe:
    """The same in the layout that the model has."""
    return dataclasses.replace(recipe, allow=tuple(each for each in recipe.allow if each != "channels-last"))


def without_kernels(recipe: Recipe) -> Recipe:
    """The same with the model's own operators, in the layout that the model has."""
    compiled = ("inductor", "channels-last")
    return dataclasses.replace(recipe, allow=tuple(each for each in recipe.allow if each not in compiled))


def check_techniques(names: Sequence[str]) -> None:
    """Refuse a technique that does not exist, and say what the others mean."""
    unknown = [each for each in names if each not in TECHNIQUES]
    if unknown:
        known = "; ".join(f"{name!r} ({meaning})" for name, meaning in TECHNIQUES.items())
        near = suggestion(unknown[0], TECHNIQUES)
        raise InvalidInput(f"unknown technique {unknown[0]!r}{near}; known are {known}")


KERNELS = ("eager", "inductor")


def with_kernels(allow: tuple[str, ...], kernels: str) -> tuple[str, ...]:
    """Techniques with those that a choice of kernels is."""
    if kernels not in KERNELS:
        near = suggestion(kernels, KERNELS)
        raise InvalidInput(f"kernels are {' or '.join(map(repr, KERNELS))}, {kernels!r} was given{near}")
    return allow if kernels == "eager" else tuple(dict.fromkeys((*allow, kernels, "channels-last")))


def check_budget(budget: Budget) -> None:
    """Refuse what cannot be a budget before anything is captured."""
    if budget is None or (isinstance(budget, str) and budget in ("smallest", AVAILABLE)):
        return
    if isinstance(budget, str) and budget.strip().endswith("%"):
        raise InvalidBudget(
            f'a part of the unplanned peak is written as a number up to 1, {budget!r} was given; write 0.5 for "50%"'
        )
    if isinstance(budget, float) and 1 < budget < _LEAST_BYTES:
        raise InvalidBudget(
            f"a budget of {budget!r} is neither a fraction, which is up to 1, nor a number of bytes that anything fits "
            'in; write for example 0.5 or "6GiB"'
        )
    if isinstance(budget, float) and budget <= 1:
        if not budget > 0:
            raise InvalidBudget(f"a budget is a positive number of bytes or a fraction up to 1, {budget!r} was given")
        return
    parse_bytes(budget)


def is_fraction(budget: Budget) -> bool:
    """Return whether a budget is a part of the unplanned peak."""
    return isinstance(budget, float) and budget <= 1


def check_fractions(fractions: Sequence[float]) -> None:
    """Refuse what cannot be a part of the activations."""
    for fraction in fractions:
        if not 0 < fraction <= 1:
            raise InvalidBudget(f"a fraction of the activation part is above 0 and at most 1, {fraction!r} was given")


def budget_bytes(budget: Budget, unplanned_peak_bytes: int) -> int:
    """A budget in bytes: a fraction is one of the unplanned peak."""
    assert budget is not None
    if is_fraction(budget):
        assert isinstance(budget, float)
        return int(budget * unplanned_peak_bytes)
    return parse_bytes(budget)
