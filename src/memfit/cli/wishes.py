"""How to plan, as the options of a command say it."""

import dataclasses
from typing import Any, Self

import torch
from torch import nn

from memfit.cli import reference as references
from memfit.cli.options import optimizer_of
from memfit.errors import InvalidInput
from memfit.measure.devices import find_device, is_bytes
from memfit.measure.optimizer import check_optimizer
from memfit.plan.select import Selection
from memfit.recipe import EXACT, Budget, check_budget, check_techniques
from memfit.spelling import spelling_advice

_OUTPUTS = ("all", "loss")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Wishes:
    """The keywords of `memfit.plan` and `memfit.frontier` that options decide."""

    optimizer: str | None
    allow: tuple[str, ...]
    recompute: tuple[Selection, ...]
    keep: tuple[Selection, ...]
    outputs: str
    device: str | None
    time_limit: float

    @classmethod
    def of(
        cls,
        *,
        optimizer: str,
        allow: str | None,
        recompute: list[str] | None,
        keep: list[str] | None,
        outputs: str,
        device: str | None,
        time_limit: float,
    ) -> Self:
        """Read options; what cannot be meant is refused before any model is built."""
        check_optimizer(optimizer_of(optimizer))
        if outputs not in _OUTPUTS:
            raise InvalidInput(f"--outputs is {' or '.join(_OUTPUTS)}, {outputs!r} was given")
        return cls(
            optimizer=optimizer_of(optimizer),
            allow=parse_allow(allow),
            recompute=tuple(parse_selection(each) for each in recompute or ()),
            keep=tuple(parse_selection(each) for each in keep or ()),
            outputs=outputs,
            device=_device_name(device),
            time_limit=time_limit,
        )

    def keywords(self) -> dict[str, Any]:
        return {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}

    def budget(self, text: str | None) -> Budget:
        """The budget of an option; a device's memory if none is given; None if modules are named by hand."""
        if text is not None:
            return parse_budget(text)
        if self.device is not None:
            return find_device(self.device).usable_bytes
        if self.recompute:
            return None
        raise InvalidInput(
            "there is no budget; give --budget 6GiB, a share of the unplanned peak such as --budget 0.5, "
            "--budget smallest, a --device, or name what to compute again with --recompute"
        )


def parse_budget(text: str) -> Budget:
    """Read a budget: bytes with a unit, a number up to 1 as a share, or "smallest".

    >>> parse_budget("0.5"), parse_budget("6GiB"), parse_budget("smallest")
    (0.5, '6GiB', 'smallest')
    """
    budget: Budget = text.strip()
    try:
        number = float(text)
    except ValueError:
        pass
    else:
        budget = number
    check_budget(budget)
    return budget


def parse_allow(text: str | None) -> tuple[str, ...]:
    """Read names of techniques, separated by commas.

    >>> parse_allow("lean, chunk")
    ('lean', 'chunk')
    """
    if text is None:
        return EXACT
    names = tuple(dict.fromkeys(name.strip() for name in text.split(",") if name.strip()))
    check_techniques(names or ("",))
    return names


def parse_selection(text: str) -> Selection:
    """Read what `--recompute` or `--keep` names: a number of blocks, a type of module, or a pattern of names.

    >>> parse_selection("2"), parse_selection("nn.ReLU").__name__, parse_selection("encoder.layer.*")
    (2, 'ReLU', 'encoder.layer.*')
    """
    text = text.strip()
    if not text:
        raise InvalidInput("a pattern of module names is empty; name modules (encoder.*), a type (nn.ReLU) or a number")
    if text.isascii() and text.isdecimal():
        return int(text)
    _, is_torch_type, name = text.rpartition("nn.")
    if is_torch_type and text in (f"nn.{name}", f"torch.nn.{name}"):
        return _torch_module_type(text, name)
    if ":" in text:
        found = references.load(references.parse(text, InvalidInput))
        if not isinstance(found, type) or not issubclass(found, nn.Module):
            raise InvalidInput(f"{text!r} is not a class of modules; name a subclass of torch.nn.Module")
        return found
    return text


def _torch_module_type(text: str, name: str) -> type[nn.Module]:
    found = getattr(torch.nn, name, None)
    if not isinstance(found, type) or not issubclass(found, nn.Module):
        types = [each for each, value in vars(torch.nn).items() if isinstance(value, type)]
        raise InvalidInput(f"{text!r} is not a type of modules in torch.nn; {spelling_advice(name, types)}")
    return found


def _device_name(device: str | None) -> str | None:
    if device is None:
        return None
    if is_bytes(device):
        raise InvalidInput(f"--device names a device such as A100-40GB, {device!r} was given; give bytes as --budget")
    return find_device(device).name
