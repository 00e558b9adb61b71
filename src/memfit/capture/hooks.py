"""Hooks of a model's parts, which a captured call cannot run.

Note [Hooks]
    A hook is the user's own code. It may change what passes through, and it may look at it, keep it or print it, in
    every step. A captured call would run it once, on tensors without content. So a part with hooks is not captured
    inside another: around it the model runs by itself, and what is below it can be a region. The hooks of a region's
    own module run around it. Hooks that torch itself puts on modules (weight norm, pruning, sharding) are followed.
"""

import functools
from collections.abc import Iterator
from typing import Any

from torch import nn
from torch.nn.modules import module as torch_module

from memfit.capture.record import short_line
from memfit.errors import CaptureError

_OF_MODULES = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")
HOOKS_OF_ALL = tuple(f"_global{name}" for name in _OF_MODULES)


def check_no_inner_hooks(model: nn.Module) -> None:
    """Refuse a model whose parts have hooks, see Note [Hooks]."""
    found = next(_inner_hooks(model), None)
    if found is None:
        return
    path, hook = found
    code = getattr(hook, "__code__", None)
    line = "" if code is None else short_line(code.co_filename, code.co_firstlineno)
    name = getattr(hook, "__name__", type(hook).__name__)
    of = f"the module {path!r} has" if path else "all modules have"
    raise CaptureError(
        f"{type(model).__name__} could not be captured whole: {of} the hook {name}{f' ({line})' if line else ''}, "
        "which must run in every step; parts without hooks inside are captured one by one, or remove the hook",
        module=path,
        source=line,
    )


def _inner_hooks(model: nn.Module) -> Iterator[tuple[str, Any]]:
    for registry in HOOKS_OF_ALL:
        yield from (("", hook) for hook in _followed(getattr(torch_module, registry)))
    for path, module in model.named_modules():
        for registry in _OF_MODULES if path else ():
            yield from ((path, hook) for hook in _followed(module.__dict__[registry]))


def _followed(hooks: dict[int, Any]) -> Iterator[Any]:
    """Yield the hooks of the user's own."""
    for hook in hooks.values():
        while isinstance(hook, functools.partial):
            hook = hook.func
        hook = getattr(hook, "__func__", hook)
        module = getattr(hook, "__module__", None) or type(hook).__module__
        if not module.startswith(("torch.", "memfit.")):
            yield hook
