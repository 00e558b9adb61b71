"""Several processes: one plan for all of them, and what one of them takes."""

from memfit.distributed.buckets import BucketPolicy
from memfit.distributed.shards import unit_names
from memfit.distributed.simulated import STRATEGIES, estimate
