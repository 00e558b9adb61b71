"""Train any PyTorch model inside the memory you have.

What is named here is imported when it is first asked for: `import memfit` by itself takes no time.
"""

import importlib
import random
import sys
from types import ModuleType
from typing import TYPE_CHECKING, Any

from memfit import _kernel_cache as _kernel_cache  # before anything imports the compiler of torch

if TYPE_CHECKING:
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

_PACKAGES = ("integrations", "zoo")
_HOMES = {
    "Alternative": "memfit.step.choice",
    "Buckets": "memfit.step.buckets",
    "CaptureError": "memfit.errors",
    "Captures": "memfit.execute.attach",
    "Check": "memfit.prove.check",
    "Choice": "memfit.step.choice",
    "Estimate": "memfit.estimate",
    "ExecutionError": "memfit.errors",
    "Frontier": "memfit.plan.frontier",
    "InfeasibleBudget": "memfit.errors",
    "InternalError": "memfit.errors",
    "InvalidBudget": "memfit.errors",
    "InvalidFile": "memfit.errors",
    "InvalidInput": "memfit.errors",
    "InvalidModel": "memfit.errors",
    "InvalidSample": "memfit.errors",
    "Loop": "memfit.plan.loop",
    "MaxBatch": "memfit.step.max_batch",
    "Mean": "memfit.step.losses",
    "MemfitError": "memfit.errors",
    "NonFiniteLoss": "memfit.errors",
    "Plan": "memfit.plan.plan",
    "Profile": "memfit.prove.profile",
    "RankError": "memfit.errors",
    "RunCheck": "memfit.prove.run",
    "Sample": "memfit.capture.sample",
    "Step": "memfit.step.step",
    "StepPolicy": "memfit.step.policy",
    "TECHNIQUES": "memfit.recipe",
    "apply": "memfit.api",
    "bug_report": "memfit.internal",
    "captures_of": "memfit.execute.attach",
    "check": "memfit.prove.check",
    "check_run": "memfit.prove.run",
    "estimate": "memfit.api",
    "fit": "memfit.api",
    "frontier": "memfit.api",
    "init": "memfit.step.construct",
    "keep_freed_memory": "memfit.malloc",
    "load": "memfit.step.construct",
    "max_batch": "memfit.step.max_batch",
    "plan": "memfit.api",
    "plan_of": "memfit.api",
    "profile": "memfit.prove.profile",
    "release_freed_memory": "memfit.malloc",
    "remove": "memfit.execute.attach",
    "report": "memfit.report.write",
    "save": "memfit.step.construct",
    "verify_every": "memfit.prove.verification",
    "without_weights": "memfit.capture.fakes",
}


def __getattr__(name: str) -> Any:
    if name not in _PACKAGES and name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    drawn = random.getstate()  # some of what torch imports draws from Python's generator
    try:
        value = _imported(name)
    finally:
        random.setstate(drawn)
    globals()[name] = value
    return value


def _imported(name: str) -> Any:
    if name in _PACKAGES:
        return importlib.import_module(f"{__name__}.{name}")
    importlib.import_module("memfit.report.notebook")  # it registers how objects look in notebooks
    return getattr(importlib.import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


class _Package(ModuleType):
    """Keeps packages that are imported from taking the place of the functions that have their names."""

    def __setattr__(self, name: str, value: Any) -> None:
        if name not in _HOMES or not isinstance(value, ModuleType):
            super().__setattr__(name, value)


sys.modules[__name__].__class__ = _Package
