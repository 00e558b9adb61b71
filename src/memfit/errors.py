"""Everything memfit raises.

MemfitError
├── InvalidInput        what was given cannot be meant (exit code 2 on the command line)
│   ├── InvalidSample       the sample does not fit the model
│   ├── InvalidModel        the model cannot be built, found or trained
│   ├── InvalidBudget       bytes, a unit or a device name that cannot be read
│   └── InvalidFile         a file of ours that is damaged, foreign or too new
├── InfeasibleBudget    no plan fits; says the smallest budget that one does (exit code 3)
├── CaptureError        the model could not be traced; names module, source line and reason
├── ExecutionError      a captured model was used in a way it was not captured for, or a tier failed
└── NonFiniteLoss       a step's loss is not a number; says which step, nothing was updated

Messages are one paragraph: what happened, what was found, what to do.
"""

import difflib
from collections.abc import Iterable


def first_line(error: BaseException) -> str:
    """What an error says, short enough for one paragraph."""
    return next(iter(str(error).strip().splitlines()), "")


def spelling_advice(name: str, known: Iterable[str]) -> str:
    """What may have been meant, in whatever case it was written.

    >>> spelling_advice("resnet5", ["resnet50", "vgg16"])
    'did you mean resnet50?'
    """
    near = nearest_names(name, known)
    return f"did you mean {' or '.join(near)}?" if near else "check the spelling"


def suggestion(name: str, known: Iterable[str]) -> str:
    """What may have been meant, to stand after a name that is not known; nothing if nothing is near.

    >>> suggestion("adamwx", ["adamw", "sgd"]), suggestion("x", ["adamw"])
    (' (did you mean adamw?)', '')
    """
    near = nearest_names(name, known)
    return f" (did you mean {' or '.join(near)}?)" if near else ""


def nearest_names(name: str, known: Iterable[str]) -> list[str]:
    """Up to three known names that look like this one, the nearest first."""
    by_plain_name = {each.casefold(): each for each in known}
    return [by_plain_name[each] for each in difflib.get_close_matches(name.casefold(), by_plain_name, n=3)]


class MemfitError(Exception):
    """Base of all errors raised by memfit."""


class InvalidInput(MemfitError):
    """What was given cannot be meant."""


class InvalidSample(InvalidInput):
    """The sample does not fit the model."""


class InvalidModel(InvalidInput):
    """The model cannot be built, found or trained."""


class InvalidBudget(InvalidInput):
    """A number of bytes, a unit or a device name that cannot be read."""


class InvalidFile(InvalidInput):
    """A file written by memfit that is damaged, foreign or from a newer version."""


class InfeasibleBudget(MemfitError):
    """No plan fits the budget.

    `smallest_bytes` is the smallest budget a plan was found for, `floor_bytes` what no plan can be below,
    `operation` the operator that sets that floor.
    """

    def __init__(self, message: str, *, smallest_bytes: int = 0, floor_bytes: int = 0, operation: str = "") -> None:
        super().__init__(message)
        self.smallest_bytes = smallest_bytes
        self.floor_bytes = floor_bytes
        self.operation = operation


class CaptureError(MemfitError):
    """The model could not be traced.

    `module` is the path of the innermost module that was running, `source` the line
    (`file.py:12`) of the user's code that could not be followed.
    """

    def __init__(self, message: str, *, module: str = "", source: str = "") -> None:
        super().__init__(message)
        self.module = module
        self.source = source


class ExecutionError(MemfitError):
    """A captured model was used in a way it was not captured for."""


class NonFiniteLoss(MemfitError):
    """The loss of a training step is infinite or not a number. `step` is the number of the update it was for."""

    def __init__(self, message: str, *, step: int = 0) -> None:
        super().__init__(message)
        self.step = step
