"""Score function: for lower problems that cannot be differentiated, because they choose at random.

Williams, Simple Statistical Gradient-Following Algorithms, 1992. The lower `training_step` returns, beside its
loss, "log_prob": the log-probability of the choices it made, as a differentiable function of the upper
parameters. The upper gradient is (upper loss - baseline) times the gradient of the log-probabilities of all steps
of the inner loop. Unbiased; limits: noisy, the less so the better the baseline (a running mean of losses).
"""

import torch

from memfit.errors import InvalidInput
from memfit.multilevel.hypergradient.method import Gradients, Pull


def reinforce(pull: Pull) -> Gradients:
    """The upper loss times the score of the lower problem's choices."""
    lower, upper, decay = pull.lower, pull.upper, pull.lower.config.reinforce_baseline
    loss = pull.loss.detach().clone()
    lower.engine.ranks.average([loss])
    baseline = lower.baseline.get(upper.name)
    advantage = loss if baseline is None else loss - baseline
    if decay:
        lower.baseline[upper.name] = loss if baseline is None else decay * baseline + (1 - decay) * loss
    return {problem: _scored(pull, problem, advantage) for problem in pull.onto}


def _scored(pull: Pull, problem: object, advantage: torch.Tensor) -> list[torch.Tensor]:
    for upper, score in pull.lower.score.items():
        if upper is problem:
            return [advantage * part for part in score]
    name = getattr(problem, "name", "")
    raise InvalidInput(
        f'the problem {pull.lower.name!r} returned no "log_prob" that depends on {name!r}, which the method '
        "'reinforce' needs; return it from training_step beside the loss"
    )
