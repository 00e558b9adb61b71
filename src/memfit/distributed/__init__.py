"""Several processes, on `torch.distributed`: one plan for all of them, what each takes, checkpoints of sharded runs."""

from memfit.distributed.agree import fit, plan
from memfit.distributed.buckets import BucketPolicy
from memfit.distributed.checkpoint import load_sharded, save_sharded
from memfit.distributed.fsdp import fit_sharded, plan_sharded
from memfit.distributed.ranks import Ranks
from memfit.distributed.resume import resume, save
from memfit.distributed.shards import unit_names
from memfit.distributed.simulated import STRATEGIES, estimate

__all__ = [
    "STRATEGIES",
    "BucketPolicy",
    "Ranks",
    "estimate",
    "fit",
    "fit_sharded",
    "load_sharded",
    "plan",
    "plan_sharded",
    "resume",
    "save",
    "save_sharded",
    "unit_names",
]
