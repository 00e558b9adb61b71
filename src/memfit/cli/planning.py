"""Build what a command is about and plan it, showing what is going on."""

from torch import nn

from memfit import api
from memfit.capture.sample import Sample
from memfit.cli.progress import Display
from memfit.cli.subject import Subject
from memfit.cli.wishes import Wishes
from memfit.plan.plan import Plan
from memfit.recipe import Budget


def built_for_planning(
    subject: Subject, wishes: Wishes, measure: bool | None, seed: int, shown: Display
) -> tuple[nn.Module, Sample]:
    """Model and sample: with weights where operators are to be timed here."""
    shown.doing("building the model")
    if measure:
        return subject.with_weights(seed)
    if measure is None and wishes.device is None:
        return subject.where_it_fits(seed)
    return subject.without_weights()


def planned(model: nn.Module, sample: Sample, budget: Budget, wishes: Wishes, shown: Display) -> Plan:
    """The plan for a budget. Ctrl-C while it is searched for gives the best so far."""
    shown.doing("tracing a training step")
    return api.plan(model, sample, budget=budget, **wishes.keywords(), report=shown.found, progress=shown.measured)
