"""Find a step in which as many parts of a model run as there may be.

Note [Left out at random]
    Models that leave out layers at random (stochastic depth, layer drop) take most where all layers run. A step that is
    run to plan is to be such a one, or the budget would be one for the layers that happened to run. So where parts did
    not run and something was drawn, forward passes are tried from other seeds, without gradients, and the seed of the
    one with most parts is taken.
"""

import random

import numpy as np
import torch
from torch import nn

from memfit.capture.rehearse import nothing_remains, seed_all
from memfit.capture.sample import Sample, with_others

_MOST_SEEDS = 40  # of 12 layers each left out in a tenth of the steps, all run in every fourth step


def fullest_seed(model: nn.Module, sample: Sample) -> int:
    """Return a seed of a step in which most parts run; 0 where all do, or none is left out at random."""
    parts = [part for part in model.modules() if next(part.parameters(recurse=False), None) is not None]
    fullest, most, drew = 0, *_called(model, sample, parts, 0)
    for seed in range(1, _MOST_SEEDS if drew else 1):
        if most == len(parts):
            break
        count, _ = _called(model, sample, parts, seed)
        if count > most:
            fullest, most = seed, count
    return fullest


def _called(model: nn.Module, sample: Sample, parts: list[nn.Module], seed: int) -> tuple[int, bool]:
    """Run a forward pass; return how many parts ran in it, and whether anything was drawn."""
    ran: set[nn.Module] = set()
    with nothing_remains(model, sample), torch.no_grad():
        hooks = [part.register_forward_pre_hook(lambda part, _: ran.add(part)) for part in parts]
        try:
            seed_all(seed)
            before = _states()
            given = with_others(sample.args, sample.kwargs)
            model(*given.args, **given.kwargs)
            return len(ran), _states() != before
        finally:
            for hook in hooks:
                hook.remove()


def _states() -> tuple[object, ...]:
    own = [each.tobytes() if isinstance(each, np.ndarray) else each for each in np.random.get_state(legacy=True)]
    return torch.get_rng_state().numpy().tobytes(), random.getstate(), *own
