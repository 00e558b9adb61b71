"""Hooks of a model, which a captured call cannot run.

Note [Hooks]
    A hook is the user's own code. It may change what passes through, and it may look at it, keep it or print it, in
    every step. A captured call would run it once, on tensors without content. So a part with hooks is not captured
    inside another: around it the model runs by itself, and what is below it can be a region. The hooks of a region's
    own module run around it. Hooks that torch itself puts on modules (weight norm, pruning, sharding) are followed.

Note [Hooks run as often as in eager]
    What memfit runs for itself, to plan a step or to compare one, is no step of the user's: meanwhile hooks of the
    user's own, of modules and of parameters, do nothing, and a model that does not run without them is refused. What
    hooks of modules make is counted from a step on tensors without memory, see `hook_memory.py`. What is not counted is
    warned of by name.
"""

import contextlib
import functools
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import nn
from torch.nn.modules import module as torch_module

from memfit.capture.record import short_line
from memfit.errors import CaptureError, MemfitError, first_line

_REGISTRIES = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")
HOOKS_OF_ALL = tuple(f"_global{name}" for name in _REGISTRIES)
_REGISTRIES_OF_TENSORS = ("_backward_hooks", "_post_accumulate_grad_hooks")
_SHOWN = 3  # in a warning


def check_no_inner_hooks(model: nn.Module) -> None:
    """Refuse a model whose parts have hooks, see Note [Hooks]."""
    found = next(_inner_hooks(model), None)
    if found is None:
        return
    path, hook = found
    of = f"the module {path!r} has" if path else "all modules have"
    raise CaptureError(
        f"{type(model).__name__} could not be captured whole: {of} the hook {_words(hook)}, "
        "which must run in every step; parts without hooks inside are captured one by one, or remove the hook",
        module=path,
        source=_line(hook),
    )


@contextlib.contextmanager
def hooks_left_out(model: nn.Module, tensors: Sequence[torch.Tensor] = ()) -> Iterator[None]:
    """Let hooks of the user's do nothing for a while, see Note [Hooks run as often as in eager]."""
    with _replaced([*_of_modules(model), *_of_tensors([*model.parameters(), *tensors])], lambda _: _do_nothing):
        yield


@contextlib.contextmanager
def hooks_inside(model: nn.Module, around: Callable[[], AbstractContextManager[Any]]) -> Iterator[None]:
    """Run the user's hooks of a model's parts inside of something for a while."""

    def inside(hook: Any) -> Any:
        def run(*arguments: Any, **keywords: Any) -> Any:
            with around():
                return hook(*arguments, **keywords)

        return run

    with _replaced([*_of_parts(model)], inside):
        yield


@contextlib.contextmanager
def _replaced(registries: Sequence[dict[int, Any]], by: Callable[[Any], Any]) -> Iterator[None]:
    before = [(each, dict(each)) for each in registries if any(map(is_of_the_user, each.values()))]
    for registry, hooks in before:
        registry.update({key: by(hook) for key, hook in hooks.items() if is_of_the_user(hook)})
    try:
        yield
    finally:
        for registry, hooks in before:
            registry.clear()
            registry.update(hooks)


@contextlib.contextmanager
def run_without_hooks(model: nn.Module, tensors: Sequence[torch.Tensor] = ()) -> Iterator[None]:
    """Run steps without the user's hooks; CaptureError if that fails, and may be because of that."""
    hook = next((each for registry in _of_modules(model) for each in _followed(registry)), None)
    try:
        with hooks_left_out(model, tensors):
            yield
    except Exception as error:
        if hook is None or isinstance(error, MemfitError | MemoryError):
            raise
        raise CaptureError(
            f"a step of {type(model).__name__} cannot be run to plan it: without the hook {_words(hook)}, which would "
            f"run more often than in the loop, it fails ({type(error).__name__}: {first_line(error)}); do what the "
            "hook does in a module of its own",
            source=_line(hook),
        ) from error


def hooks_of_modules(model: nn.Module) -> list[Any]:
    """Return the user's hooks of a model's parts."""
    return [hook for registry in _of_parts(model) for hook in _followed(registry)]


def warn_of_hooks(model: nn.Module, *, are_counted: bool) -> None:
    """Say which hooks a plan does not count, see Note [Hooks run as often as in eager]; are those of modules?"""
    registries = [*_of_all_modules(), *_of_tensors([*model.parameters()]), *(() if are_counted else _of_parts(model))]
    names = [*dict.fromkeys(_words(each) for registry in registries for each in _followed(registry))]
    if names:
        others = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
        warnings.warn(
            f"{type(model).__name__} has hooks, which do not run while a step is planned "
            f"({', '.join(names[:_SHOWN])}{others}); memory that they allocate is not counted: if they make or keep "
            "tensors, give a budget that is smaller by as much",
            stacklevel=5,
        )


def _do_nothing(*_arguments: Any, **_keywords: Any) -> None:
    """Stand for a hook."""


def _of_modules(model: nn.Module) -> Iterator[dict[int, Any]]:
    yield from _of_all_modules()
    yield from _of_parts(model)


def _of_all_modules() -> Iterator[dict[int, Any]]:
    return (getattr(torch_module, name) for name in HOOKS_OF_ALL)


def _of_parts(model: nn.Module) -> Iterator[dict[int, Any]]:
    yield from (module.__dict__[name] for module in model.modules() for name in _REGISTRIES)


def _of_tensors(tensors: Sequence[torch.Tensor]) -> Iterator[dict[int, Any]]:
    for tensor in tensors:
        yield from (getattr(tensor, name) or {} for name in _REGISTRIES_OF_TENSORS)


def _words(hook: Any) -> str:
    name = getattr(hook, "__name__", type(hook).__name__)
    return f"{name} ({_line(hook)})" if _line(hook) else name


def _line(hook: Any) -> str:
    code = getattr(hook, "__code__", None)
    return "" if code is None else short_line(code.co_filename, code.co_firstlineno)


def _inner_hooks(model: nn.Module) -> Iterator[tuple[str, Any]]:
    for registry in HOOKS_OF_ALL:
        yield from (("", hook) for hook in _followed(getattr(torch_module, registry)))
    for path, module in model.named_modules():
        for registry in _REGISTRIES if path else ():
            yield from ((path, hook) for hook in _followed(module.__dict__[registry]))


def _followed(hooks: dict[int, Any]) -> Iterator[Any]:
    """Yield the hooks of the user's own."""
    return (_function_of(hook) for hook in hooks.values() if is_of_the_user(hook))


def is_of_the_user(hook: Any) -> bool:
    """Return whether a hook is neither torch's nor memfit's."""
    function = _function_of(hook)
    module = getattr(function, "__module__", None) or type(function).__module__
    return not module.startswith(("torch.", "memfit."))


def _function_of(hook: Any) -> Any:
    while isinstance(hook, functools.partial):
        hook = hook.func
    return getattr(hook, "__func__", hook)
