"""Plans and checkpoints past one process, on `torch.distributed`."""

from memfit.distributed.checkpoint import load_sharded, save_sharded
from memfit.distributed.fsdp import fit_sharded, plan_sharded

__all__ = ["fit_sharded", "load_sharded", "plan_sharded", "save_sharded"]
