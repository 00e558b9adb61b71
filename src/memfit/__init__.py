"""Train any PyTorch model inside the memory you have."""

from memfit.api import estimate, fit
from memfit.capture.fakes import without_weights
from memfit.capture.sample import Sample
from memfit.errors import (
    CaptureError,
    ExecutionError,
    InvalidBudget,
    InvalidFile,
    InvalidInput,
    InvalidModel,
    InvalidSample,
    MemfitError,
)
from memfit.estimate import Estimate
from memfit.execute.attach import remove

__all__ = [
    "CaptureError",
    "Estimate",
    "ExecutionError",
    "InvalidBudget",
    "InvalidFile",
    "InvalidInput",
    "InvalidModel",
    "InvalidSample",
    "MemfitError",
    "Sample",
    "estimate",
    "fit",
    "remove",
    "without_weights",
]

__version__ = "0.1.0"
