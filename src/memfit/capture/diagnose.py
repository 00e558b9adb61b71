"""From a failed trace to a sentence a user can act on."""

import contextlib
import os
import traceback
from collections.abc import Iterator

import torch
import torch.utils.checkpoint

from memfit import _torch
from memfit.capture.held import is_foreign
from memfit.capture.record import short_line
from memfit.errors import CaptureError, MemfitError, first_line

_REENTRANT_CODE = torch.utils.checkpoint.CheckpointFunction.backward.__code__


def explain(error: Exception, *, model_name: str, module: str) -> CaptureError:
    """Name the module, the source line, the reason and what to do."""
    source = _failing_line(error)
    reason, advice = _reason(error)
    place = f"in module {module!r}" if module else "at its top level"
    at_line = f" at {source}" if source else ""
    message = f"{model_name} could not be captured: {place}{at_line}, {reason}; {advice}"
    return CaptureError(message, module=module, source=source)


def in_memfit(error: Exception) -> bool:
    """Whether memfit itself raised this, with a sentence that needs no more explanation."""
    frames = traceback.extract_tb(error.__traceback__)
    return bool(frames) and frames[-1].filename.startswith(os.path.dirname(__file__))


@contextlib.contextmanager
def refusals_as_capture_errors(model_name: str) -> Iterator[None]:
    """Raise as a `CaptureError` what the steps of a capture refuse outside of a trace."""
    try:
        yield
    except ValueError as error:
        if isinstance(error, MemfitError) or not in_memfit(error):
            raise
        raise explain(error, model_name=model_name, module="") from error


def _failing_line(error: Exception) -> str:
    lines = [
        short_line(frame.filename, frame.lineno or 0)
        for frame in traceback.extract_tb(error.__traceback__)
        if not is_foreign(frame.filename)
    ]
    return lines[-1] if lines else ""


def _is_checking_a_distribution(error: Exception) -> bool:
    return any(
        frame.f_globals.get("__name__", "").startswith("torch.distributions.")
        and ("validate_args" in frame.f_code.co_varnames or frame.f_code.co_name == "_validate_sample")
        for frame, _ in traceback.walk_tb(error.__traceback__)
    )


def _reason(error: Exception) -> tuple[str, str]:
    if any(frame.f_code is _REENTRANT_CODE for frame, _ in traceback.walk_tb(error.__traceback__)):
        return "a reentrant checkpoint cannot be followed", "call torch.utils.checkpoint with use_reentrant=False"
    if "convert all Tensors to FakeTensors" in str(error):
        return (
            "a tensor is used that is neither a parameter, a buffer nor an argument",
            "register it with register_buffer, or pass it in",
        )
    if "flat_args" in str(error):
        return (
            "an argument is an object whose tensors cannot be found",
            "pass tensors, or tuples, lists and dicts of them; a class of your own can be registered with "
            "torch.utils._pytree.register_pytree_node",
        )
    if "dynamo-optimized" in str(error):
        return (
            "that part is compiled by torch.compile, whose kernels a trace cannot follow",
            'fit the model without it, and let memfit compile kernels (kernels="inductor")',
        )
    if "fake mode" in str(error).lower() and isinstance(error, AssertionError):
        return "tensors of two without_weights() blocks meet", "build the model and the sample in one block"
    if "modified by an inplace operation" in str(error):
        return (
            "a value is written over that the backward pass needs; a buffer that is given another tensor counts as "
            "written over, too",
            "let what needs it read a copy (buffer.clone()), or write after that",
        )
    if "numpy" in str(error).lower():
        return (
            "the code computes with NumPy, which a trace cannot follow",
            "write that part with torch, or leave it out of the module that is captured",
        )
    if isinstance(error, ValueError) and in_memfit(error):
        return first_line(error), "change the model there, or leave that part out of the module that is captured"
    if isinstance(error, _torch.DataDependentOutputException) and _is_checking_a_distribution(error):
        return (
            "torch.distributions looks at the values of its arguments to check them",
            "give it validate_args=False, or call torch.distributions.Distribution.set_default_validate_args(False)",
        )
    if isinstance(error, _torch.DataDependentOutputException):
        return (
            f"the code asks for the value of a tensor that depends on the batch or on the weights ({error.func})",
            "replace the Python branch by tensor operations such as torch.where, or leave that part "
            "out of the module that is captured",
        )
    if isinstance(error, _torch.DynamicOutputShapeException):
        return (
            f"the size of a result depends on values ({error.func})",
            "use a form with a fixed size, such as a mask, or leave that part out of the module that is captured",
        )
    return (
        f"{type(error).__name__}: {first_line(error)}",
        "check that the model runs on this sample by itself; if it does, leave that part out of the module that is "
        "captured, which a trace cannot follow",
    )
