"""Multilevel optimization with a memory policy for each level."""

from memfit.multilevel.configs import Config, EngineConfig
from memfit.multilevel.engine import Engine
from memfit.multilevel.problems import ImplicitProblem, IterativeProblem, Problem

__all__ = ["Config", "Engine", "EngineConfig", "ImplicitProblem", "IterativeProblem", "Problem"]
