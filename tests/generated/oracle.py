"""A generated run, plain and fitted: what became of it.

The plain eager run from the same seed is the oracle. Loss, gradients (and which are None), buffers and the generator
are compared bit for bit after each step; the measured peak with the budget and with the prediction; the estimated
peak of the plain step with its measured one.

Note [Promises]
    The budget is promised where no hooks were warned of: those of models whose forward looks at values are not counted.
    Bits are promised where no technique rounds and nothing was warned of, with two exceptions. Where the model is
    called several times for one backward, autograd adds up all uses of a parameter one by one, and those of a captured
    call at once. Where `fit` is not told of the loss, a gradient may come in another layout than its output has. Where
    there is a tolerance, the first step is held to it alone: the next starts from other weights.
    Compiled kernels are within 1e-3 of eager: of the largest number of a tensor, for gradients of the largest
    gradient; where a model computes in 16 bits, of which eager rounds every result to 8, within 0.05. Where eager's
    own gradients are further than that from the same step's in float64, theirs are within four times what eager's
    are off; so is a buffer, by itself: the mean of what was normalized before is what rounding leaves.
"""

import contextlib
import dataclasses
import re
import time
import warnings
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

import memfit
from generated.build import Invalid, build
from generated.compiled import compiled_everywhere, stretches_that_run
from generated.exact import farthest, gradients_in_float64
from generated.loops import Loss, autocast, has_own_loss, plain_step, sample_of, tensors_of, train
from generated.specs import Spec
from memfit.measure.peak import measure_peak

EQUAL, REFUSED, CRASH, DIFFERENT = "equal", "refused", "crash", "different"
OVER, ESTIMATE, INVALID = "over budget", "estimate off", "invalid"
SOUND = (EQUAL, REFUSED, INVALID)

_TIME_LIMIT_S = 0.15  # for a search: what is compared does not depend on how good a plan is
_BESIDE_BYTES = 4096  # over a budget that is not minded
_NOT_MINDED_BYTES = 64 * 1024  # of an estimate
_SHARE = 0.01
_GRADIENT, _BUFFER = "gradient", "buffer"  # what their names begin with
_TOLERANCES = {"chunk": 1e-4, "16-bit": 0.05, "8-bit": 0.5, "4-bit": 2.0, "inductor": 1e-3}  # of a tensor's largest
_IN_16_BITS = 0.05
_ROUNDING_TIMES = 4
_ADDED_OTHERWISE = 1e-5
_NOT_COUNTED = "memory that they allocate is not counted"  # in a warning of hooks
_ROUNDED = ("rounds", "rounding", "looks at values", "casts")  # in a warning: other numbers are announced


@dataclasses.dataclass(kw_only=True)
class Outcome:
    """What became of one seed."""

    seed: int
    kind: str = EQUAL
    reason: str = ""
    captured: str = ""  # "whole", "regions" or "left as it is"
    budget_bytes: int | None = None
    predicted_bytes: int | None = None
    peak_bytes: int | None = None
    estimated_bytes: int | None = None
    eager_bytes: int | None = None
    kernels: int = 0  # distinct compiled ones that ran
    rejected: int = 0  # that ran operator by operator: the compiler did not take them
    far: float = 0.0  # the largest difference where there is a tolerance
    plan_seconds: float = 0.0
    seconds: float = 0.0

    @property
    def signature(self) -> tuple[str, str]:
        """What failures of one class have in common."""
        kept = self.reason if self.kind in (CRASH, REFUSED) else ""
        return self.kind, re.sub(r"'[^']*'|[\d.]+( [KM]?i?B)?", "#", kept)[:90]


class _Ended(Exception):
    """A run that ended with an outcome of some kind."""

    def __init__(self, kind: str, reason: str) -> None:
        super().__init__(reason)
        self.kind = kind


def outcome_of(spec: Spec) -> Outcome:
    """Run plainly, estimate, fit, run fitted, compare."""
    outcome = Outcome(seed=spec.seed)
    start = time.monotonic()
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        try:
            _compare(spec, outcome, said)
        except _Ended as end:
            outcome.kind, outcome.reason = end.kind, str(end)
    outcome.seconds = round(time.monotonic() - start, 3)
    return outcome


def run_plainly(spec: Spec) -> tuple[nn.Module, list[dict[str, torch.Tensor | None]], int]:
    """The model, what its plain steps left, and their peak."""
    model = _seeded(spec)
    return model, list(train(spec, model)), _peak_bytes(spec, model)


def _compare(spec: Spec, outcome: Outcome, said: list[Any]) -> None:
    try:
        eager, expected, outcome.eager_bytes = run_plainly(spec)
    except _Ended:
        raise
    except Exception as error:
        raise _without_eager(spec, error) from error
    planned = _seeded(spec)
    with compiled_everywhere(spec.fit.kernels):
        _fit(spec, planned, outcome)
        _check_no_failure(planned, said)
        found = _trained(spec, planned, outcome)
    rounded = any(each in str(message.message) for message in said for each in _ROUNDED)
    _check_equal(spec, expected, found, outcome, rounded=rounded)
    if not any(_NOT_COUNTED in str(message.message) for message in said):
        _check_peak(spec, outcome)
    _check_estimate(spec, eager, outcome)


def _check_no_failure(model: nn.Module, said: list[Any]) -> None:
    """What fails inside memfit is a crash, also where only a part is left eager for it."""
    plan = memfit.plan_of(model)
    reasons = [*(str(each.message) for each in said), *({} if plan is None else plan.left_eager).values()]
    failed = next((each for each in reasons if "failed inside memfit" in each), None)
    if failed is not None:
        raise _Ended(CRASH, failed[failed.index("failed inside memfit") :][:600])


def _without_eager(spec: Spec, failed: Exception) -> _Ended:
    """What becomes of a run that eager ends with an error: the same error, or a sentence, and nothing else."""
    model = _seeded(spec)
    try:
        _fit(spec, model, Outcome(seed=spec.seed))
        list(train(spec, model))
        _peak_bytes(spec, model)  # a step more: numbers that grow beyond all bounds fail in whichever comes to them
    except _Ended as end:
        as_eager = end.kind == REFUSED or type(failed).__name__ in str(end)
        return _Ended(INVALID if as_eager else end.kind, f"{_text(failed)}; fitted: {end}")
    except Exception as error:
        as_eager = isinstance(error, memfit.MemfitError | type(failed))
        return _Ended(INVALID if as_eager else CRASH, f"{_text(failed)}; fitted: {_text(error)}")
    return _Ended(DIFFERENT, f"trains where eager does not: {_text(failed)}")


def _trained(spec: Spec, model: nn.Module, outcome: Outcome) -> list[dict[str, torch.Tensor | None]]:
    with stretches_that_run() as ran:
        try:
            found = list(train(spec, model))
            outcome.peak_bytes = _peak_bytes(spec, model)
        except Exception as error:
            raise _ended(error) from error
    outcome.kernels = sum(each.is_compiled for each in ran)
    outcome.rejected = len(ran) - outcome.kernels
    return found


def _seeded(spec: Spec) -> nn.Module:
    torch.manual_seed(spec.seed)
    try:
        return build(spec.model).train()
    except Invalid as error:
        raise _Ended(INVALID, str(error)) from error


def _ended(error: Exception) -> _Ended:
    return _Ended(REFUSED if isinstance(error, memfit.MemfitError) else CRASH, _text(error))


def _text(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())}"[:600]


def _fit(spec: Spec, model: nn.Module, outcome: Outcome) -> None:
    budget: float | int | str = spec.fit.budget or "smallest"
    before = torch.get_rng_state()
    start = time.monotonic()
    try:
        try:
            _fitted(spec, model, budget)
        except memfit.InfeasibleBudget as error:
            if not error.smallest_bytes:
                raise
            outcome.budget_bytes = error.smallest_bytes
            _fitted(spec, model, error.smallest_bytes)  # which the sentence promises to be enough
    except Exception as error:
        raise _ended(error) from error
    outcome.plan_seconds = round(time.monotonic() - start, 3)
    if not torch.equal(before, torch.get_rng_state()):
        raise _Ended(DIFFERENT, "the generator after the fit")
    plan = memfit.plan_of(model)
    if plan is None:
        outcome.captured = "left as it is"
    else:
        outcome.captured = "regions" if plan.regions else "whole"
        outcome.budget_bytes, outcome.predicted_bytes = plan.budget_bytes, plan.peak_bytes


def _fitted(spec: Spec, model: nn.Module, budget: float | int | str) -> None:
    args, kwargs = sample = sample_of(spec)
    told = spec.fit.outside_loss and not has_own_loss(spec)
    with autocast(spec) if spec.fit.in_autocast or not told else contextlib.nullcontext():  # as the loop, or the loss
        memfit.fit(
            model,
            sample if told else memfit.Sample(args, kwargs),
            budget,
            loss=Loss(spec) if told else None,
            allow=spec.fit.allow,
            kernels=spec.fit.kernels,
            backward_from="auto" if has_own_loss(spec) else "all",
            time_limit=_TIME_LIMIT_S,
            remember=False,
            progress=False,
        )


def _peak_bytes(spec: Spec, model: nn.Module) -> int:
    batch = sample_of(spec)
    held = tensors_of(batch)
    model.zero_grad(set_to_none=True)
    plain_step(spec, model, batch)
    for each in (*model.parameters(), *held):
        each.grad = None
    return measure_peak(lambda: plain_step(spec, model, batch), resident=[model, held]).peak_bytes


def _check_equal(spec: Spec, expected: list[Any], found: list[Any], outcome: Outcome, *, rounded: bool) -> None:
    """See Note [Promises]."""
    tolerance = _tolerance(spec, rounded=rounded)
    steps = 1 if tolerance else len(expected)
    for number, (one, other) in enumerate(zip(expected[:steps], found, strict=False)):
        scale = max((float(each.abs().max()) for each in _gradients(one)), default=0.0) if tolerance else 0.0
        for name in one.keys() | other.keys():
            far = difference(one.get(name), other.get(name), scale if name.startswith(_GRADIENT) else 0.0)
            allowed = tolerance
            if far > tolerance and name.startswith((_GRADIENT, _BUFFER)) and outcome.kernels:
                of = _GRADIENT if name.startswith(_GRADIENT) else name
                allowed = max(tolerance, _ROUNDING_TIMES * _own_rounding(spec, one, of))
            if far > allowed:
                raise _Ended(DIFFERENT, f"{name} of step {number} by {far:.2g}")
            if far <= tolerance:
                outcome.far = max(outcome.far, far)
            else:
                outcome.reason = f"{name} of step {number} by {far:.2g}, as eager's own rounding"


def _tolerance(spec: Spec, *, rounded: bool) -> float:
    """See Note [Promises]."""
    coarse = spec.loop.autocast or spec.model.dtype in ("bfloat16", "float16")
    added_otherwise = spec.loop.forwards > 1 or not _knows_loss(spec)
    promised = [_TOLERANCES[each] for each in {*spec.fit.allow, spec.fit.kernels} if each in _TOLERANCES]
    if rounded or (coarse and (added_otherwise or spec.fit.kernels != "eager")):
        promised.append(_IN_16_BITS)
    if added_otherwise:
        promised.append(_ADDED_OTHERWISE)
    return max(promised, default=0.0)


def _own_rounding(spec: Spec, eager: dict[str, torch.Tensor | None], beginning: str) -> float:
    """How far what has names that begin so is from what is exact in eager, as far as that can be known."""
    exact = gradients_in_float64(spec, _seeded)
    if exact is None or difference(exact["generator"], eager["generator"]):
        return 0.0
    return farthest(eager, exact, beginning)


def _gradients(seen: dict[str, torch.Tensor | None]) -> Iterator[torch.Tensor]:
    for name, each in seen.items():
        if name.startswith(_GRADIENT) and each is not None and each.numel():
            yield _dense(each.detach()).double().nan_to_num()


def difference(one: torch.Tensor | None, other: torch.Tensor | None, scale: float = 0.0) -> float:
    """The largest difference relative to the largest number, or to `scale` if that is larger; 0 if all bits are equal.

    NaN is equal to NaN. What a sum leaves of numbers that cancel is compared with a scale.
    """
    if one is None or other is None:
        return 0.0 if one is other else float("inf")
    if (one.dtype, one.shape, one.layout) != (other.dtype, other.shape, other.layout):
        return float("inf")
    one, other = _dense(one), _dense(other)
    if one.numel() == 0 or torch.equal(one, other):
        return 0.0
    one, other = one.double(), other.double()
    if not torch.equal(one.isnan(), other.isnan()) or not torch.equal(one.isinf(), other.isinf()):
        return float("inf")
    one, other = one.nan_to_num(), other.nan_to_num()
    return float((one - other).abs().max() / one.abs().max().clamp(min=max(scale, 1e-30)))


def _dense(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_dense() if tensor.is_sparse else tensor


def _knows_loss(spec: Spec) -> bool:
    return has_own_loss(spec) or spec.fit.outside_loss


def _check_peak(spec: Spec, outcome: Outcome) -> None:
    if outcome.budget_bytes is None or outcome.peak_bytes is None or not _knows_loss(spec):
        return
    over = outcome.peak_bytes - outcome.budget_bytes * (1 + _SHARE) - _BESIDE_BYTES
    if over > 0:
        raise _Ended(OVER, f"{outcome.peak_bytes} bytes with a budget of {outcome.budget_bytes}")


def _check_estimate(spec: Spec, model: nn.Module, outcome: Outcome) -> None:
    args, kwargs = sample = sample_of(spec)
    try:
        if has_own_loss(spec):
            with autocast(spec):
                estimate = memfit.estimate(model, memfit.Sample(args, kwargs), progress=False)
        else:
            estimate = memfit.estimate(model, sample, loss=Loss(spec), progress=False)
    except Exception as error:
        raise _ended(error) from error
    outcome.estimated_bytes = estimate.peak_bytes
    assert outcome.eager_bytes is not None
    off = estimate.peak_bytes - outcome.eager_bytes
    if abs(off) > max(_NOT_MINDED_BYTES, _SHARE * outcome.eager_bytes):
        raise _Ended(ESTIMATE, f"{off / outcome.eager_bytes:+.1%} of {outcome.eager_bytes} bytes")
