"""Several processes: one plan for all of them, and what each of them takes."""

from memfit.distributed.agree import fit, plan
from memfit.distributed.buckets import BucketPolicy
from memfit.distributed.ranks import Ranks
from memfit.distributed.resume import resume, save
from memfit.distributed.shards import unit_names
from memfit.distributed.simulated import STRATEGIES, estimate

__all__ = ["STRATEGIES", "BucketPolicy", "Ranks", "estimate", "fit", "plan", "resume", "save", "unit_names"]
