"""The training loop of a description, and all there is to compare after each of its steps."""

import contextlib
import dataclasses
from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from generated.build import make_batch
from generated.losses import LOSSES, rows_of
from generated.specs import Spec

Batch = tuple[tuple[Any, ...], dict[str, Any]]
STEPS = 2
_SAMPLE = 999  # the batch that a model is fitted with is not among those it trains on


def batch_of(spec: Spec, number: int) -> Batch:
    """Arguments of one call of the model."""
    model = spec.model
    if spec.loop.partial and number // 100 == 1:
        model = dataclasses.replace(model, batch=max(1, model.batch // 2))
    return make_batch(model, spec.seed * 1000 + number)


def sample_of(spec: Spec) -> Batch:
    """The batch to fit and to estimate with."""
    return batch_of(spec, _SAMPLE)


def has_own_loss(spec: Spec) -> bool:
    return spec.model.outputs.startswith("loss")


class Loss:
    """The loss of a model and a batch: its own, or one of all that it returns with a gradient."""

    def __init__(self, spec: Spec) -> None:
        self.spec = spec

    def __call__(self, model: nn.Module, batch: Batch) -> torch.Tensor:
        args, kwargs = batch
        noise = 0.1 * torch.randn(()) if self.spec.loop.draws else torch.zeros(())
        with autocast(self.spec):
            output = model(*args, **kwargs)
            if has_own_loss(self.spec):
                return output["loss"] if isinstance(output, dict) else output
            read = _differentiable(output)[: 1 if self.spec.loop.one_output else None]
            read = read[:: 2 if self.spec.loop.skips else 1]
            return sum((self._one(each) for each in read), torch.zeros(())) * (1 + noise)

    def _one(self, output: torch.Tensor) -> torch.Tensor:
        output = output.float() if output.dtype in (torch.bfloat16, torch.float16) else output
        if self.spec.loop.loss in LOSSES:
            with torch.autocast("cpu", enabled=False):
                return LOSSES[self.spec.loop.loss](rows_of(output))
        if self.spec.loop.loss == "cross entropy" and output.dim() > 1:
            rows = output.flatten(1)
            return F.cross_entropy(rows, torch.arange(len(rows)) % rows.shape[1])
        if self.spec.loop.loss == "smooth":
            return F.smooth_l1_loss(output, torch.full_like(output, 0.3))
        return output.sum() / 8 if self.spec.loop.loss == "sum" else output.square().mean()


def _differentiable(output: Any) -> list[torch.Tensor]:
    if isinstance(output, torch.Tensor):
        return [output] if output.requires_grad else []
    if dataclasses.is_dataclass(output):
        output = vars(output)
    if isinstance(output, dict):
        output = list(output.values())
    if isinstance(output, list | tuple):
        return [tensor for each in output for tensor in _differentiable(each)]
    return []


def autocast(spec: Spec) -> contextlib.AbstractContextManager[Any]:
    return torch.autocast("cpu", torch.bfloat16) if spec.loop.autocast else contextlib.nullcontext()


def plain_step(spec: Spec, model: nn.Module, batch: Batch) -> None:
    """One forward and one backward: what a budget is for. What a model returns beside its loss is held meanwhile."""
    if not has_own_loss(spec):
        Loss(spec)(model, batch).backward()
        return
    args, kwargs = batch
    with autocast(spec):
        output = model(*args, **kwargs)
    (output["loss"] if isinstance(output, dict) else output).backward()


def train(spec: Spec, model: nn.Module) -> Iterator[dict[str, torch.Tensor | None]]:
    """Loss, gradients, buffers and the generator after each step."""
    torch.manual_seed(spec.seed + 1)
    for number in range(STEPS):
        model.zero_grad(set_to_none=spec.loop.set_to_none)
        loss = torch.zeros(())
        for part in range(spec.loop.accumulated):
            batches = [batch_of(spec, 100 * number + 10 * part + call) for call in range(spec.loop.forwards)]
            loss = torch.stack([Loss(spec)(model, batch) for batch in batches]).sum()
            loss.backward()
            leaves = [each for batch in batches for each in tensors_of(batch) if each.requires_grad]
        yield _seen(model, loss) | {f"gradient of batch {number}": each.grad for number, each in enumerate(leaves)}
        _update(model)
        if spec.loop.evaluated:
            yield {"output": _evaluated(spec, model)}


def tensors_of(given: Any) -> list[torch.Tensor]:
    """All tensors in a batch."""
    if isinstance(given, torch.Tensor):
        return [given]
    given = vars(given) if dataclasses.is_dataclass(given) else given
    given = list(given.values()) if isinstance(given, dict) else given
    return [tensor for each in given for tensor in tensors_of(each)] if isinstance(given, list | tuple) else []


def _evaluated(spec: Spec, model: nn.Module) -> torch.Tensor:
    """The loss in `eval()`, without gradients."""
    model.eval()
    with torch.no_grad():
        args, kwargs = batch_of(spec, 50)
        found = model(*args, **kwargs)
    model.train()
    while not isinstance(found, torch.Tensor):
        found = vars(found) if dataclasses.is_dataclass(found) else found
        found = next(iter(found.values() if isinstance(found, dict) else found))
    return found.clone()


def _seen(model: nn.Module, loss: torch.Tensor) -> dict[str, torch.Tensor | None]:
    gradients = {f"gradient of {name}": each.grad for name, each in model.named_parameters()}
    buffers = {f"buffer {name}": each for name, each in model.named_buffers()}
    seen = {"loss": loss.detach(), **gradients, **buffers, "generator": torch.get_rng_state()}
    return {name: None if each is None else each.clone() for name, each in seen.items()}


def _update(model: nn.Module) -> None:
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.grad is not None:
                parameter.sub_(parameter.grad, alpha=0.01)
