"""Errors that are not the user's: a sentence with what was being done, and a report that can be sent.

Note [Internal errors]
    An assertion of ours, or an error of torch's under our own code, says nothing to who called `fit`. It becomes an
    `InternalError` with what was being done. That is a `CaptureError`: what is planned region by region then leaves
    that part eager, as one that could not be traced. Errors of the model's own code stay as they are.
"""

import contextlib
import dataclasses
import functools
import inspect
import json
import platform
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

import torch
from torch import nn

from memfit.capture.blame import is_of_the_model
from memfit.capture.lower import lower
from memfit.capture.record import short_line
from memfit.capture.sample import Sample
from memfit.capture.trace import traced
from memfit.describe import describe_sample
from memfit.errors import InternalError, MemfitError, first_line
from memfit.execute.attach import removed
from memfit.files import own_version, write_atomically
from memfit.ops.number import NotFollowed

_FORMAT = "memfit.bug_report"

_P = ParamSpec("_P")
_R = TypeVar("_R")


def in_sentences(doing: str) -> Callable[[Callable[_P, _R]], Callable[_P, _R]]:
    """Let a function that users call raise no error but sentences, see Note [Internal errors].

    `doing` says what it does with the model that is among its arguments.
    """

    def decorate(function: Callable[_P, _R]) -> Callable[_P, _R]:
        signature = inspect.signature(function)

        @functools.wraps(function)
        def call(*args: _P.args, **kwargs: _P.kwargs) -> _R:
            signature.bind(*args, **kwargs)  # who calls it with other arguments is told so by Python
            model = next((each for each in (*args, *kwargs.values()) if isinstance(each, nn.Module)), None)
            with internal_errors(f"{doing} {'a model' if model is None else type(model).__name__}"):
                return function(*args, **kwargs)

        return call

    return decorate


@contextlib.contextmanager
def internal_errors(doing: str) -> Iterator[None]:
    """Raise what fails inside as an `InternalError`, see Note [Internal errors]."""
    try:
        yield
    except (MemfitError, MemoryError, NotFollowed):
        raise
    except Exception as error:
        if is_of_the_model(error):
            raise
        raise InternalError(
            f"{doing} failed inside memfit ({type(error).__name__}: {first_line(error)}); the model is as it was. "
            "Please report it: memfit.bug_report(model, sample) writes down what is needed, no weights and no data",
        ) from error


def bug_report(
    model: nn.Module,
    sample: Any,
    path: str | Path = "memfit-bug.json",
    *,
    error: BaseException | None = None,
    **options: Any,
) -> Path:
    """Write down what is needed to look into a failure: graph, versions and options; no weights, no data.

    `options` are those that `fit` or `plan` was called with, `error` is what it raised. The graph has the operators of
    a training step with shapes and source lines; it is left out where the model cannot be traced.
    """
    example = Sample.of(sample)
    content = {
        "format": _FORMAT,
        "versions": {"memfit": own_version(), "torch": torch.__version__, "python": platform.python_version()},
        "machine": {"system": platform.platform(), "threads": torch.get_num_threads()},
        "model": type(model).__name__,
        "modules": {name: type(module).__name__ for name, module in model.named_modules()},
        "sample": describe_sample(example),
        "options": {name: _described(value) for name, value in options.items()},
        "error": None if error is None else _account(error),
        "graph": _graph(model, example),
    }
    path = Path(path)
    write_atomically(path, json.dumps(content, indent=1) + "\n")
    return path


def _described(value: Any) -> Any:
    """An option as data; of what is no plain value, the type alone."""
    if isinstance(value, list | tuple):
        return [_described(each) for each in value]
    return value if isinstance(value, str | int | float | None) else type(value).__name__


def _account(error: BaseException) -> list[dict[str, Any]]:
    """An error and what it came from, with lines of code but without their values."""
    accounts = []
    each: BaseException | None = error
    while each is not None:
        frames = traceback.extract_tb(each.__traceback__)
        lines = [f"{short_line(frame.filename, frame.lineno or 0)} {frame.name}" for frame in frames]
        accounts.append({"type": type(each).__name__, "message": first_line(each), "lines": lines})
        each = each.__cause__
    return accounts


def _graph(model: nn.Module, example: Sample) -> Any:
    try:
        with removed(model), traced(model, example, runs=False) as joint:
            graph = lower(joint)
    except Exception as error:
        return {"not traced": first_line(error)}
    return {
        "storages": [dataclasses.asdict(each) for each in graph.storages],
        "operations": [dataclasses.asdict(each) for each in graph.operations],
    }
