"""A model and its captured step, as timing takes them."""

from memfit.capture.alternatives import extend
from memfit.capture.lower import lower
from memfit.capture.sample import Sample
from memfit.capture.trace import traced


def captured(model, sample, techniques=()):
    example = Sample.of(sample)
    with traced(model, example) as joint:
        extend(joint, techniques)
        return joint, lower(joint), model, example
