"""Errors that are not the user's: a sentence with what was being done, and a report that can be sent.

Note [Internal errors]
    An assertion of ours, or an error of torch's under our own code, says nothing to who called `fit`. It becomes an
    `InternalError` with what was being done. That is a `CaptureError`: what is planned region by region then leaves
    that part eager, as one that could not be traced. Errors of the model's own code stay as they are.
"""

import contextlib
import dataclasses
import json
import platform
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn

from memfit.capture.lower import lower
from memfit.capture.record import in_library, short_line
from memfit.capture.sample import Sample
from memfit.capture.trace import traced
from memfit.describe import describe_sample
from memfit.errors import InternalError, MemfitError, first_line
from memfit.execute.attach import removed
from memfit.files import own_version, write_atomically
from memfit.ops.number import NotFollowed

_FORMAT = "memfit.bug_report"


@contextlib.contextmanager
def internal_errors(doing: str) -> Iterator[None]:
    """Raise what fails inside as an `InternalError`, see Note [Internal errors]."""
    try:
        yield
    except (MemfitError, MemoryError, NotFollowed):
        raise
    except Exception as error:
        if _is_of_the_model(error):
            raise
        raise InternalError(
            f"{doing} failed inside memfit ({type(error).__name__}: {first_line(error)}); the model is as it was. "
            "Please report it: memfit.bug_report(model, sample) writes down what is needed, no weights and no data",
        ) from error


def _is_of_the_model(error: Exception) -> bool:
    """Return whether code outside of torch and memfit was running below our own."""
    frames = traceback.extract_tb(error.__traceback__)[1:]
    return any(not in_library(frame.filename) for frame in frames)


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
