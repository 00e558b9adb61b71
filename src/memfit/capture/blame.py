"""Whose an error is that is raised while memfit works: the model's, which is told as it is, or memfit's own."""

import os
import traceback

from memfit.capture.held import is_foreign
from memfit.errors import InternalError, first_line

BUGS = (AssertionError, KeyError, AttributeError, NameError)  # which no operator of torch raises
_SOLVERS = tuple(f"{os.sep}{name}{os.sep}" for name in ("highspy", "numpy"))  # that run below memfit's own code
_OWN = os.path.dirname(os.path.dirname(__file__)) + os.sep


def is_of_the_model(error: BaseException) -> bool:
    """Return whether code outside of torch and memfit was running below our own.

    What watches a trace is called from the model's code, and may fail there as well: see `BUGS`.
    """
    frames = traceback.extract_tb(error.__traceback__)[1:]
    if frames and isinstance(error, BUGS) and frames[-1].filename.startswith(_OWN):
        return False
    return any(not _is_below_us(frame) for frame in frames)


def failed_running(error: BaseException) -> InternalError:
    """Say that a captured call failed at no fault of the model's."""
    return InternalError(
        f"running a captured call failed inside memfit ({type(error).__name__}: {first_line(error)}); "
        "memfit.remove(model) lets it train without a plan. Please report it: memfit.bug_report(model, sample) writes "
        "down what is needed, no weights and no data"
    )


def _is_below_us(frame: traceback.FrameSummary) -> bool:
    of_dataclass = frame.filename == "<string>" and frame.name.startswith("__")
    return of_dataclass or is_foreign(frame.filename) or any(each in frame.filename for each in _SOLVERS)
