"""Train any PyTorch model inside the memory you have."""

from memfit import _kernel_cache as _kernel_cache  # before anything imports the compiler of torch
from memfit import integrations as integrations
from memfit import zoo
from memfit.api import apply, estimate, fit, frontier, plan, plan_of
from memfit.capture.fakes import without_weights
from memfit.capture.sample import Sample
from memfit.errors import (
    CaptureError,
    ExecutionError,
    InfeasibleBudget,
    InternalError,
    InvalidBudget,
    InvalidFile,
    InvalidInput,
    InvalidModel,
    InvalidSample,
    MemfitError,
    NonFiniteLoss,
    RankError,
)
from memfit.estimate import Estimate
from memfit.execute.attach import Captures, captures_of, remove
from memfit.internal import bug_report
from memfit.malloc import keep_freed_memory, release_freed_memory
from memfit.plan.frontier import Frontier
from memfit.plan.loop import Loop
from memfit.plan.plan import Plan
from memfit.prove.check import Check, check
from memfit.prove.profile import Profile, profile
from memfit.prove.run import RunCheck, check_run
from memfit.prove.verification import verify_every
from memfit.recipe import TECHNIQUES
from memfit.report import notebook as _notebook  # noqa: F401  (it registers how objects look in notebooks)
from memfit.report.write import report
from memfit.step.buckets import Buckets
from memfit.step.choice import Alternative, Choice
from memfit.step.construct import init, load, save
from memfit.step.losses import Mean
from memfit.step.max_batch import MaxBatch, max_batch
from memfit.step.policy import StepPolicy
from memfit.step.step import Step

__all__ = [
    "TECHNIQUES",
    "Alternative",
    "Buckets",
    "CaptureError",
    "Captures",
    "Check",
    "Choice",
    "Estimate",
    "ExecutionError",
    "Frontier",
    "InfeasibleBudget",
    "InternalError",
    "InvalidBudget",
    "InvalidFile",
    "InvalidInput",
    "InvalidModel",
    "InvalidSample",
    "Loop",
    "MaxBatch",
    "Mean",
    "MemfitError",
    "NonFiniteLoss",
    "Plan",
    "Profile",
    "RankError",
    "RunCheck",
    "Sample",
    "Step",
    "StepPolicy",
    "apply",
    "bug_report",
    "captures_of",
    "check",
    "check_run",
    "estimate",
    "fit",
    "frontier",
    "init",
    "keep_freed_memory",
    "load",
    "max_batch",
    "plan",
    "plan_of",
    "profile",
    "release_freed_memory",
    "remove",
    "report",
    "save",
    "verify_every",
    "without_weights",
    "zoo",
]

__version__ = "0.1.0"
