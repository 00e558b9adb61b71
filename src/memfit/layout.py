"""Whether images are laid out with their channels last: where convolutions are seen to be faster so.

Note [Seen in steps]
    What a layout is worth depends on sizes, on the library of convolutions and on the processor, and not on single
    operators alone: gradients of weights are copied into the layout of the weights. So a few real steps are run each
    way, in turns, with the model's own operators. They leave nothing behind.

Note [Three may be enough]
    The first step of each way warms up, so it is slower than others. If the first with channels last is fast enough
    beside the second of the model's own, so would be another; if the second with channels last is too slow beside the
    first of the model's own, so would be another. Where steps take seconds, one less counts; where they do not, three
    are enough only if they are clear.

Note [Where steps do not fit]
    Where the unplanned step is over the budget it is not run. Then every distinct convolution is timed alone in both
    layouts, which says less: what happens between convolutions is left out.
"""

import dataclasses
import logging
import time
from collections import Counter
from collections.abc import Callable

import torch
from torch import nn

from memfit.capture.layout import ChannelsLast
from memfit.capture.rehearse import nothing_remains
from memfit.capture.sample import Sample
from memfit.describe import device_of
from memfit.errors import first_line
from memfit.ir import Graph
from memfit.measure.available import available
from memfit.measure.probe import measured_costs
from memfit.measure.signature import operator_name, with_channels_last
from memfit.plan.identity import identity_program
from memfit.plan.simulate import simulate
from memfit.prepare import Traced, traced_as_eager
from memfit.recipe import Recipe, budget_bytes, without_channels_last
from memfit.trial import can_run_steps, step_seconds

log = logging.getLogger(__name__)

_WORTH_IT = 0.94  # of the time; above that the copies at both ends may take it back
_CLEAR = 0.1  # away from that, one pair is enough
_PAIRS, _SECONDS = 3, 3.0
_LONG_S = 1.0  # a step
_COPIES = 1.25  # what a step with copies between layouts takes of one without, at most
_DATA_ARGUMENTS = {  # places of the images that an operator reads
    "aten.convolution.default": (0,),
    "aten.convolution_backward.default": (0, 1),
}


def with_layout(
    model: nn.Module, sample: Sample, recipe: Recipe, *, with_hooks: bool = True
) -> tuple[Recipe, Traced | None]:
    """A recipe with the layout that is faster here, and the step as the eager run has it, if that is another one."""
    plain = without_channels_last(recipe)
    if not recipe.channels_last or not _has_convolutions(model) or not can_run_steps(model, sample, recipe):
        return plain, None
    unplanned = traced_as_eager(model, sample, recipe, with_hooks=with_hooks)
    assert unplanned is not None
    room_bytes = _room_bytes(unplanned.graph, recipe, device_of(model))
    if room_bytes is not None and not _fits(unplanned.graph, room_bytes):
        is_worth_it = _are_convolutions_faster(unplanned.graph, device_of(model), room_bytes)
        return (recipe, unplanned) if is_worth_it else (plain, None)
    trial = _Trial(lambda: step_seconds(model, sample, recipe))
    with nothing_remains(model, sample), torch.enable_grad():
        if not trial.is_worth_it():
            return plain, None
    step_s = min(trial.own_s)
    is_long = step_s > _LONG_S and device_of(model) == "cpu"  # then little of it is around the operators
    return recipe, dataclasses.replace(unplanned, step_us=step_s * 1e6 if is_long else None)


def _room_bytes(graph: Graph, recipe: Recipe, device: str) -> int | None:
    """Return what steps and operators may take beyond what is live before a step; None: what is free."""
    if recipe.budget is None:
        return None
    if recipe.is_for_process:
        return available(device).free_bytes
    peak_bytes = simulate(graph, identity_program(graph)).peak_bytes
    return max(0, budget_bytes(recipe.budget, peak_bytes) - _resident_bytes(graph))


def _fits(graph: Graph, room_bytes: int) -> bool:
    """Return whether unplanned steps fit in either layout; copies between layouts and workspaces come on top."""
    more_bytes = simulate(graph, identity_program(graph)).peak_bytes - _resident_bytes(graph)
    return more_bytes * _COPIES <= room_bytes


def _resident_bytes(graph: Graph) -> int:
    return sum(graph.storages[each].size_bytes for each in graph.resident)


def _are_convolutions_faster(graph: Graph, device: str, room_bytes: int) -> bool:
    """Time every distinct convolution alone in both layouts, see Note [Where steps do not fit]."""
    counts = Counter(each.signature for each in graph.operations if each.target in _DATA_ARGUMENTS)
    laid_out = {each: with_channels_last(each, _DATA_ARGUMENTS[operator_name(each)]) for each in counts}
    wanted = [*counts, *laid_out.values()]
    costs = measured_costs(wanted, device=device, timed=True, room_bytes=room_bytes)
    times_us = {each: cost.time_us for each, cost in costs.items() if cost.time_us is not None}
    timed = [each for each in counts if each in times_us and laid_out[each] in times_us]
    own_us = sum(times_us[each] * counts[each] for each in timed)
    ratio = sum(times_us[laid_out[each]] * counts[each] for each in timed) / own_us if own_us else 1.0
    log.info("with channels last the convolutions take %.2f of the time", ratio)
    return ratio < _WORTH_IT


def _has_convolutions(model: nn.Module) -> bool:
    return any(isinstance(each, nn.Conv2d | nn.ConvTranspose2d) for each in model.modules())


class _Trial:
    """Seconds of steps each way, see Note [Seen in steps]."""

    def __init__(self, step_s: Callable[[], float]) -> None:
        self._step_s = step_s
        self.own_s: list[float] = []
        self.laid_out_s: list[float] = []

    def is_worth_it(self) -> bool:
        try:
            ratio = self._ratio()
        except _NotForThisModel as error:
            log.info("channels last are not for this model: %s", error)
            return False
        log.info("with channels last a step takes %.2f of the time", ratio)
        return ratio < _WORTH_IT

    def _ratio(self) -> float:
        """Of the time with channels last to that without."""
        end = time.monotonic() + _SECONDS
        self._run_own()
        self._run_laid_out()
        early = self._early_ratio()
        if early is not None:
            return early
        while self._is_unclear() and len(self.own_s) <= _PAIRS and time.monotonic() < end:
            self._run_own()
            self._run_laid_out()
        return self._warm_ratio()

    def _early_ratio(self) -> float | None:
        """After three steps, if these are enough, see Note [Three may be enough]; else four are run."""
        if self.laid_out_s[0] < self.own_s[0]:
            self._run_own()
            ratio = self.laid_out_s[0] / self.own_s[1]
            if ratio < _WORTH_IT - self._margin():
                return ratio
            self._run_laid_out()
        else:
            self._run_laid_out()
            ratio = self.laid_out_s[1] / self.own_s[0]
            if ratio >= _WORTH_IT + self._margin():
                return ratio
            self._run_own()
        return None

    def _margin(self) -> float:
        return 0.0 if self.own_s[0] > _LONG_S else _CLEAR

    def _run_own(self) -> None:
        self.own_s.append(self._step_s())

    def _run_laid_out(self) -> None:
        try:
            with ChannelsLast():
                self.laid_out_s.append(self._step_s())
        except Exception as error:  # `view` on what lies otherwise than the model expects
            raise _NotForThisModel(first_line(error)) from error

    def _warm_ratio(self) -> float:
        return min(self.laid_out_s[1:]) / min(self.own_s[1:])

    def _is_unclear(self) -> bool:
        return abs(self._warm_ratio() - _WORTH_IT) < _CLEAR


class _NotForThisModel(Exception):
    """It cannot run with channels last."""
