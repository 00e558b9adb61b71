"""Train any PyTorch model inside the memory you have."""

from memfit.api import apply, estimate, fit, frontier, plan, plan_of
from memfit.capture.fakes import without_weights
from memfit.capture.sample import Sample
from memfit.errors import (
    CaptureError,
    ExecutionError,
    InfeasibleBudget,
    InvalidBudget,
    InvalidFile,
    InvalidInput,
    InvalidModel,
    InvalidSample,
    MemfitError,
)
from memfit.estimate import Estimate
from memfit.execute.attach import remove
from memfit.pipeline import TECHNIQUES
from memfit.plan.frontier import Frontier
from memfit.plan.plan import Plan
from memfit.prove.check import Check, check
from memfit.prove.profile import Profile, profile

__all__ = [
    "TECHNIQUES",
    "CaptureError",
    "Check",
    "Estimate",
    "ExecutionError",
    "Frontier",
    "InfeasibleBudget",
    "InvalidBudget",
    "InvalidFile",
    "InvalidInput",
    "InvalidModel",
    "InvalidSample",
    "MemfitError",
    "Plan",
    "Profile",
    "Sample",
    "apply",
    "check",
    "estimate",
    "fit",
    "frontier",
    "plan",
    "plan_of",
    "profile",
    "remove",
    "without_weights",
]

__version__ = "0.1.0"
