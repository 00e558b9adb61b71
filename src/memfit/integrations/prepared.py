"""A model's forward as `accelerator.prepare` will wrap it."""

import contextlib
from collections.abc import Iterator
from typing import Any

from accelerate import Accelerator
from accelerate.utils import convert_outputs_to_fp32
from torch import nn


@contextlib.contextmanager
def as_prepared(accelerator: Accelerator, model: nn.Module) -> Iterator[None]:
    """Autocast inside the forward pass, results in fp32, as long as this lasts."""
    if not accelerator.native_amp:
        yield
        return
    inner = model.forward

    def forward(*args: Any, **kwargs: Any) -> Any:
        with accelerator.autocast():
            return inner(*args, **kwargs)

    own = model.__dict__.get("forward")
    model.forward = convert_outputs_to_fp32(forward)
    try:
        yield
    finally:
        del model.forward
        if own is not None:
            model.forward = own
