"""Which models a step calls, seen from outside: the calls that are not made inside another."""

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from memfit.capture.sample import cut_off
from memfit.errors import InvalidInput
from memfit.integrations.within import Part


class OutermostCalls:
    """Notes the first outermost call of every part of a root that is trained, while `following`."""

    def __init__(self, root: nn.Module) -> None:
        self._root = root
        self._parts: dict[nn.Module, Part] = {}
        self._depth = 0

    def parts(self) -> list[Part]:
        """What was called; an error if that was nothing that is trained."""
        if not self._parts:
            raise InvalidInput(
                f"the training step of {type(self._root).__name__} calls no module with parameters to train, so there "
                "is nothing to plan; compute the loss from modules that are called (self.model(x), not functions of "
                "their weights)"
            )
        return list(self._parts.values())

    @contextlib.contextmanager
    def following(self) -> Iterator[None]:
        modules = list(self._root.modules())
        hooks = [each.register_forward_pre_hook(self._enter, with_kwargs=True, prepend=True) for each in modules]
        hooks += [each.register_forward_hook(self._leave, always_call=True) for each in modules]
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()

    def _enter(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if not self._depth and module not in self._parts and _is_trained(module):
            self._parts[module] = Part(model=module, sample=cut_off(args, kwargs))
        self._depth += 1

    def _leave(self, *_: Any) -> None:
        self._depth -= 1


def _is_trained(module: nn.Module) -> bool:
    trains = torch.is_grad_enabled() and module.training
    return trains and any(parameter.requires_grad for parameter in module.parameters())
