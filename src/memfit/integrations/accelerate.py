"""A model inside a budget in a loop of Accelerate, before or after `accelerator.prepare`.

    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    model = memfit.integrations.accelerate.fit(accelerator, model, batch, budget="6GiB", optimizer=optimizer)

The largest batch is found by prediction instead of by failing: `memfit.max_batch` in the place of
`find_executable_batch_size`.
"""

import contextlib
import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.optimizer import AcceleratedOptimizer
from accelerate.utils import DistributedType
from torch import nn

from memfit.errors import InvalidInput
from memfit.integrations.loop import fit_in_loop
from memfit.integrations.prepared import as_prepared
from memfit.integrations.within import Wishes
from memfit.recipe import EXACT, Budget

__all__ = ["fit"]

_KNOWN = (
    DistributedType.NO,
    DistributedType.MULTI_CPU,
    DistributedType.MULTI_GPU,
)


def fit(
    accelerator: Accelerator,
    model: nn.Module,
    batch: Any,
    budget: Budget,
    *,
    optimizer: torch.optim.Optimizer | None = None,
    loss: Callable[[Any, Any], torch.Tensor] | None = None,
    allow: Sequence[str] = EXACT,
    time_limit: float = 2.5,
) -> nn.Module:
    """Train inside a budget under the accelerator's precision; the same model is returned, wrapped as it was.

    `batch` is what the model takes, if it returns its loss. With `loss(model, batch)` it is what that takes, and the
    loss counts too: it is rehearsed and measured. With an `optimizer` its state is part of the budget. Room is kept
    for gradients of earlier batches if the accelerator accumulates, and for those of DistributedDataParallel.
    """
    if accelerator.distributed_type not in _KNOWN:
        raise InvalidInput(
            f"distributed_type={str(accelerator.distributed_type)!r} places parameters itself, which a plan cannot "
            "follow; use one process, or DistributedDataParallel"
        )
    inner = accelerator.unwrap_model(model, keep_fp32_wrapper=True)
    if getattr(accelerator.state.dynamo_plugin, "backend", None) not in (None, "NO") and hasattr(model, "_orig_mod"):
        raise InvalidInput("dynamo_backend= compiles the model around its plan; leave it out")
    prepared = "_original_forward" in inner.__dict__  # then its forward has the precision inside
    gradient_sets = int(accelerator.gradient_accumulation_steps > 1) + int(accelerator.num_processes > 1)
    fit_in_loop(
        inner,
        batch,
        Wishes(budget=budget, allow=tuple(allow), time_limit_s=time_limit),
        optimizer=optimizer.optimizer if isinstance(optimizer, AcceleratedOptimizer) else optimizer,
        loss=loss,
        precision=contextlib.nullcontext if prepared else accelerator.autocast,
        running=contextlib.nullcontext if prepared else functools.partial(as_prepared, accelerator, inner),
        gradient_sets=gradient_sets,
    )
    return model
