import inspect

import pytest

import memfit
from memfit import errors

PUBLIC_NAMES = [
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


def test_the_public_names_are_these() -> None:
    assert memfit.__all__ == PUBLIC_NAMES


@pytest.mark.parametrize("name", [name for name in PUBLIC_NAMES if name != "TECHNIQUES"])
def test_every_public_name_is_documented(name: str) -> None:
    documentation = getattr(memfit, name).__doc__
    assert documentation
    assert not documentation.startswith(f"{name}("), "the docstring a dataclass makes by itself"


def test_every_error_is_public_and_has_one_base() -> None:
    raised = [value for value in vars(errors).values() if inspect.isclass(value)]
    assert {error.__name__ for error in raised} <= set(memfit.__all__)
    assert all(issubclass(error, memfit.MemfitError) for error in raised)


def test_every_error_stands_in_the_tree_on_top_of_its_file() -> None:
    tree = errors.__doc__ or ""
    assert all(value.__name__ in tree for value in vars(errors).values() if inspect.isclass(value))


def test_every_technique_says_what_it_does() -> None:
    assert all(name and meaning for name, meaning in memfit.TECHNIQUES.items())


def test_the_version_is_the_one_that_is_installed() -> None:
    from importlib.metadata import version

    assert memfit.__version__ == version("memfit")


def test_the_public_names_of_multilevel_are_these() -> None:
    from memfit import multilevel

    assert multilevel.__all__ == [
        "Config",
        "CycleEstimate",
        "Engine",
        "EngineConfig",
        "ImplicitProblem",
        "IterativeProblem",
        "LevelPeak",
        "Problem",
    ]
    assert all(vars(multilevel)[name].__doc__ for name in multilevel.__all__)


def test_the_public_names_of_distributed_are_these() -> None:
    from memfit import distributed

    assert distributed.__all__ == [
        "STRATEGIES",
        "BucketPolicy",
        "Ranks",
        "estimate",
        "fit",
        "fit_sharded",
        "load_sharded",
        "plan",
        "plan_sharded",
        "resume",
        "save",
        "save_sharded",
        "unit_names",
    ]
    assert all(vars(distributed)[name].__doc__ for name in distributed.__all__)


def test_the_public_names_of_the_zoo_are_these() -> None:
    from memfit import zoo

    assert zoo.__all__ == ["Entry", "Verdict", "entries", "find_entry", "load", "open_plan", "verify"]
    assert all(vars(zoo)[name].__doc__ for name in zoo.__all__)
