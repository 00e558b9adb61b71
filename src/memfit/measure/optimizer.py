"""What an optimizer allocates, found by letting it step on tensors without memory."""

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from memfit import _torch
from memfit.errors import InvalidInput, first_line
from memfit.ir import OptimizerMemory
from memfit.measure.live import AnsweredQuestions, LiveBytes
from memfit.optimizer_twin import empty_twin
from memfit.spelling import suggestion
from memfit.tensors import local_part, storage_bytes


@dataclasses.dataclass(frozen=True, kw_only=True)
class KnownMemory:
    """Stands for an optimizer, and what else lives beside the step, whose memory has been found out already."""

    name: str
    memory: OptimizerMemory


OptimizerLike = str | Optimizer | Callable[..., Optimizer] | KnownMemory

_BY_NAME: dict[str, Callable[..., Optimizer]] = {
    name.lower(): cls
    for name, cls in vars(torch.optim).items()
    if isinstance(cls, type) and issubclass(cls, Optimizer) and cls is not Optimizer
}
_BY_NAME["sgd"] = lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9)


def optimizer_memory(
    optimizer: OptimizerLike,
    parameters: Sequence[nn.Parameter],
    *,
    for_cuda: bool = False,
    without_gradient: Sequence[nn.Parameter] = (),
) -> OptimizerMemory:
    """State and workspace of one step of `optimizer` over `parameters`.

    `optimizer` is a name in `torch.optim` ("sgd" means with momentum), an instance, or
    anything that makes one from parameters. `for_cuda` counts the step as it runs on CUDA, where
    optimizers that were not told otherwise work on all parameters at once (`foreach`). Parameters
    `without_gradient` are skipped by the step, as those that the loss does not depend on.
    """
    if isinstance(optimizer, KnownMemory):
        return optimizer.memory
    mode = _torch.FakeTensorMode()
    with (
        _explaining(optimizer_name(optimizer)),
        mode,
        torch.compiler.set_stance("force_eager"),  # some compile their step, which takes memory
        AnsweredQuestions(),
    ):
        twin, originals = _twin(optimizer, parameters)
        if for_cuda:
            _choose_foreach(twin)
        skipped = {id(parameter) for parameter in without_gradient}
        for stand_in, original in originals:
            if stand_in.requires_grad and id(original) not in skipped:
                stand_in.grad = torch.empty_like(stand_in)
        twin.step()
        with LiveBytes() as live:
            twin.step()
    return OptimizerMemory(state_bytes=storage_bytes(list(twin.state.values())), workspace_bytes=live.peak_bytes)


def optimizer_name(optimizer: OptimizerLike) -> str:
    """What to call an optimizer in a sentence."""
    if isinstance(optimizer, str):
        return optimizer
    if isinstance(optimizer, Optimizer):
        return type(optimizer).__name__
    if isinstance(optimizer, KnownMemory):
        return optimizer.name
    return getattr(optimizer, "__name__", type(optimizer).__name__)


def _twin(
    optimizer: str | Optimizer | Callable[..., Optimizer], parameters: Sequence[nn.Parameter]
) -> tuple[Optimizer, list[tuple[nn.Parameter, nn.Parameter]]]:
    """An optimizer like the given one over stand-ins without memory, and whom each stands in for."""
    originals: list[tuple[nn.Parameter, nn.Parameter]] = []

    def stand_in(parameter: nn.Parameter) -> nn.Parameter:
        originals.append((_stand_in(parameter), parameter))
        return originals[-1][0]

    if isinstance(optimizer, Optimizer):
        twin = empty_twin(optimizer)
        twin.param_groups = [
            _without_memory(group) | {"params": [stand_in(parameter) for parameter in group["params"]]}
            for group in optimizer.param_groups
        ]
    else:
        twin = _maker(optimizer)([stand_in(parameter) for parameter in parameters if parameter.requires_grad])
    return twin, originals


def _without_memory(settings: dict[str, Any]) -> dict[str, Any]:
    """Settings of which some are tensors, such as a learning rate, as tensors without memory."""
    return {
        name: torch.empty(value.shape, dtype=value.dtype, device=value.device)
        if isinstance(value, torch.Tensor)
        else value
        for name, value in settings.items()
        if name != "params"
    }


def _choose_foreach(optimizer: Optimizer) -> None:
    """Choose as torch does for parameters on CUDA; the parameters here are on another device."""
    for group in optimizer.param_groups:
        if "foreach" in group and group["foreach"] is None and not group.get("fused"):
            group["foreach"] = True


def _maker(optimizer: str | Callable[..., Optimizer]) -> Callable[..., Optimizer]:
    check_optimizer(optimizer)
    return _BY_NAME[optimizer.lower()] if isinstance(optimizer, str) else optimizer


def check_optimizer(optimizer: OptimizerLike | None) -> None:
    """Refuse an unknown name at once, before minutes are spent on the model."""
    if isinstance(optimizer, str) and optimizer.lower() not in _BY_NAME:
        raise InvalidInput(
            f"unknown optimizer {optimizer!r}{suggestion(optimizer, _BY_NAME)}; known are "
            f"{', '.join(sorted(_BY_NAME))}, or give an instance"
        )


def known_optimizers() -> list[str]:
    """The names that can be given."""
    return sorted(_BY_NAME)


def is_optimizer_name(name: str | None) -> bool:
    """Whether an optimizer can be named so."""
    return name is not None and name.lower() in _BY_NAME


def _stand_in(parameter: nn.Parameter) -> nn.Parameter:
    here = local_part(parameter)  # an optimizer of sharded parameters works on what is in this process
    empty = torch.empty_strided(here.shape, here.stride(), dtype=here.dtype, device=here.device)
    return nn.Parameter(empty, requires_grad=parameter.requires_grad)


@contextlib.contextmanager
def _explaining(name: str) -> Iterator[None]:
    try:
        yield
    except InvalidInput:
        raise
    except Exception as error:
        raise InvalidInput(
            f"the optimizer {name} could not be stepped without memory ({type(error).__name__}: {first_line(error)}); "
            "estimate without an optimizer and add its state by hand"
        ) from error
