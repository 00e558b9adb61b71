"""Options of a transformers Trainer that cannot be kept together with a plan, said before anything is run."""

from collections.abc import Iterator
from typing import Any

from memfit.errors import InvalidInput


def check_options(trainer: Any) -> None:
    """Refuse a trainer by the names of all its options that a plan cannot honour."""
    found = list(_refusals(trainer))
    if found:
        raise InvalidInput(f"this trainer cannot be fitted: {'; '.join(found)}")


def _refusals(trainer: Any) -> Iterator[str]:
    args, model = trainer.args, trainer.model
    if args.torch_compile:
        yield "torch_compile=True compiles the model around its plan; leave it out"
    if args.deepspeed or trainer.is_deepspeed_enabled:
        yield "deepspeed moves parameters and gradients itself; leave it out"
    if args.fsdp or trainer.is_fsdp_enabled:
        yield "fsdp shards the model when training starts, after it was planned; leave it out"
    if args.gradient_checkpointing or getattr(model, "is_gradient_checkpointing", False):
        yield "gradient_checkpointing=True decides what is computed again, which is what the plan does; leave it out"
    if args.n_gpu > 1:
        yield "several GPUs in one process replicate the model in every step; start one process for each (torchrun)"
    if args.auto_find_batch_size:
        yield "auto_find_batch_size=True changes the batch after it was planned; ask memfit.max_batch before"
    if args.neftune_noise_alpha is not None:
        yield "neftune_noise_alpha adds a hook inside the model when training starts; leave it out"
    if getattr(args, "use_liger_kernel", False):
        yield "use_liger_kernel=True replaces parts of the model when training starts; leave it out"
    if any(part in str(args.optim).lower() for part in ("lomo", "layerwise")):
        yield f"optim={str(args.optim)!r} updates parameters by hooks of its own; choose another"
    if trainer.model_init is not None:
        yield "model_init= makes a new model when training starts; give the model itself"
    if getattr(trainer, "is_distributed_loading_by_transformers", False):
        yield "the model was sharded when it was loaded; load it whole"
