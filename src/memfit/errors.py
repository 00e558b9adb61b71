"""Everything memfit raises.

MemfitError
├── InvalidInput        what was given cannot be meant (exit code 2 on the command line)
│   ├── InvalidSample       the sample does not fit the model
│   ├── InvalidModel        the model cannot be built, found or trained
│   ├── InvalidBudget       bytes, a unit or a device name that cannot be read
│   └── InvalidFile         a file of ours that is damaged, foreign or too new
├── InfeasibleBudget    no plan fits; says the smallest budget that one does (exit code 3)
├── CaptureError        the model could not be traced; names module, source line and reason
│   └── InternalError       planning failed inside memfit; says what was being done, and how to report it
├── RankError           the ranks of a run do not agree, or one of them failed; all of them raise it
├── ExecutionError      a captured model was used in a way it was not captured for, or a tier failed
└── NonFiniteLoss       a step's loss is not a number; says which step, nothing was updated

Messages are one paragraph: what happened, what was found, what to do.
"""


def first_line(error: BaseException) -> str:
    """What an error says, short enough for one paragraph."""
    return next(iter(str(error).strip().splitlines()), "")


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

    def after(self, cause: str) -> "InfeasibleBudget":
        """The same, said behind what led to it."""
        return InfeasibleBudget(
            f"{cause}. {self}",
            smallest_bytes=self.smallest_bytes,
            floor_bytes=self.floor_bytes,
            operation=self.operation,
        )


class CaptureError(MemfitError):
    """The model could not be traced.

    `module` is the path of the innermost module that was running, `source` the line
    (`file.py:12`) of the user's code that could not be followed. `unplanned_bytes` is the peak of a step as it is,
    where that was measured and nothing of the model can be planned.
    """

    def __init__(self, message: str, *, module: str = "", source: str = "", unplanned_bytes: int | None = None) -> None:
        super().__init__(message)
        self.module = module
        self.source = source
        self.unplanned_bytes = unplanned_bytes


class InternalError(CaptureError):
    """Planning failed inside memfit, at no fault of the caller; see `memfit.bug_report`."""


class ExecutionError(MemfitError):
    """A captured model was used in a way it was not captured for."""


class RankError(MemfitError):
    """The ranks of a run do not agree, or one of them failed. Raised alike on all of them."""


class NonFiniteLoss(MemfitError):
    """The loss of a training step is infinite or not a number. `step` is the number of the update it was for."""

    def __init__(self, message: str, *, step: int = 0) -> None:
        super().__init__(message)
        self.step = step
