"""Whether images are laid out with their channels last: where convolutions are seen to be faster so.

Note [Seen in steps]
    What a layout is worth depends on sizes, on the library of convolutions and on the processor, and not on single
    operators alone: gradients of weights are copied into the layout of the weights. So a few real steps are run each
    way, in turns, with the model's own operators. They leave nothing behind.
"""

import logging
import time
from collections.abc import Sequence

import torch
from torch import nn

from memfit.capture.layout import ChannelsLast
from memfit.capture.rehearse import nothing_remains
from memfit.capture.sample import Sample
from memfit.errors import first_line
from memfit.ir import OptimizerMemory
from memfit.prepare import Traced, could_run_here, traced_as_eager
from memfit.recipe import Recipe, without_channels_last
from memfit.trial import can_run_steps, step_seconds

log = logging.getLogger(__name__)

_WORTH_IT = 0.94  # of the time; above that the copies at both ends may take it back
_CLEAR = 0.1  # away from that, one pair is enough
_PAIRS, _SECONDS = 3, 3.0


def with_layout(
    model: nn.Module, sample: Sample, recipe: Recipe, *, with_hooks: bool = True
) -> tuple[Recipe, Traced | None]:
    """A recipe with the layout that is faster here, and the step as the eager run has it, if that is another one."""
    plain = without_channels_last(recipe)
    if not recipe.channels_last or not _has_convolutions(model) or not can_run_steps(model, sample, recipe):
        return plain, None
    unplanned = traced_as_eager(model, sample, recipe, with_hooks=with_hooks)
    assert unplanned is not None
    if not could_run_here(unplanned.graph, OptimizerMemory()) or not _is_worth_it(model, sample, recipe):
        return plain, None
    return recipe, unplanned


def _has_convolutions(model: nn.Module) -> bool:
    return any(isinstance(each, nn.Conv2d | nn.ConvTranspose2d) for each in model.modules())


def _is_worth_it(model: nn.Module, sample: Sample, recipe: Recipe) -> bool:
    """See Note [Seen in steps]."""
    own_s: list[float] = []
    laid_out_s: list[float] = []
    with nothing_remains(model, sample), torch.enable_grad():
        end = time.monotonic() + _SECONDS
        while len(own_s) < 2 or (_is_unclear(own_s, laid_out_s) and len(own_s) <= _PAIRS and time.monotonic() < end):
            own_s.append(step_seconds(model, sample, recipe))
            try:
                with ChannelsLast():
                    laid_out_s.append(step_seconds(model, sample, recipe))
            except Exception as error:  # `view` on what lies otherwise than the model expects
                log.info("channels last are not for this model: %s", first_line(error))
                return False
    ratio = _ratio(own_s, laid_out_s)
    log.info("with channels last a step takes %.2f of the time", ratio)
    return ratio < _WORTH_IT


def _ratio(own_s: Sequence[float], laid_out_s: Sequence[float]) -> float:
    return min(laid_out_s[1:]) / min(own_s[1:])  # the first of each warm up


def _is_unclear(own_s: Sequence[float], laid_out_s: Sequence[float]) -> bool:
    return abs(_ratio(own_s, laid_out_s) - _WORTH_IT) < _CLEAR
