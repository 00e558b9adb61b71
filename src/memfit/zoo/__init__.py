"""Plans that are there already: well-known models at several budgets and devices.

    plan = memfit.zoo.load("resnet50", budget="10GiB", batch_size=184)
    model = memfit.apply(plan, torchvision.models.resnet50())

Plans for devices that were not there when they were made say so: their times are estimated.
"""

from memfit.zoo.entry import Entry
from memfit.zoo.store import entries, find_entry, load, open_plan
from memfit.zoo.verify import Verdict, verify

__all__ = ["Entry", "Verdict", "entries", "find_entry", "load", "open_plan", "verify"]
