"""Multilevel optimization with a memory policy for each level."""

from memfit.multilevel.configs import Config, EngineConfig
from memfit.multilevel.engine import Engine
from memfit.multilevel.estimate import CycleEstimate, LevelPeak
from memfit.multilevel.problems import ImplicitProblem, IterativeProblem, Problem

__all__ = [
    "Config",
    "CycleEstimate",
    "Engine",
    "EngineConfig",
    "ImplicitProblem",
    "IterativeProblem",
    "LevelPeak",
    "Problem",
]
