"""What is imported before it is needed: counted in modules, which do not depend on the machine's mood."""

import subprocess
import sys

import pytest

COUNT = "import sys; before = set(sys.modules); {}; print(*sorted({{*sys.modules}} - before))"


def imported_by(statement: str) -> set[str]:
    run = subprocess.run(
        [sys.executable, "-c", COUNT.format(statement)], capture_output=True, text=True, check=True, timeout=120
    )
    return {*run.stdout.splitlines()[-1].split()}


def test_memfit_by_itself_imports_next_to_nothing():
    imported = imported_by("import memfit")
    assert "torch" not in imported
    assert sum(name.startswith("memfit") for name in imported) <= 2


@pytest.mark.parametrize("option", ["--help", "--version"])
def test_help_and_version_do_not_wait_for_torch(option):
    statement = (
        f"sys.argv = ['memfit', {option!r}]; from memfit.cli.main import run\ntry: run()\nexcept SystemExit: pass"
    )
    imported = imported_by(statement)
    assert not {"torch", "numpy", "memfit.api"} & imported
    assert len(imported) < 250


def test_functions_are_there_though_packages_have_their_names():
    statement = (
        "import memfit.plan.plan, memfit.report.write, memfit; print(callable(memfit.plan), callable(memfit.report))"
    )
    run = subprocess.run([sys.executable, "-c", statement], capture_output=True, text=True, check=True, timeout=120)
    assert run.stdout.split() == ["True", "True"]


def test_asking_for_a_name_draws_nothing():
    """Who has seeded before the first use draws what was seeded."""
    lines = (
        "import random, torch, numpy, memfit",
        "def state(): return random.getstate(), torch.get_rng_state().tolist(), numpy.random.get_state()[1].tolist()",
        "before = state()",
        "memfit.zoo, memfit.fit",
        "print(state() == before)",
    )
    run = subprocess.run(
        [sys.executable, "-c", "\n".join(lines)], capture_output=True, text=True, check=True, timeout=120
    )
    assert run.stdout.split() == ["True"]


def test_a_name_that_is_not_there_is_an_attribute_error():
    import memfit

    with pytest.raises(AttributeError, match="no attribute 'fitt'"):
        memfit.fitt  # noqa: B018  (asked for, not used)
    assert {"fit", "plan", "zoo"} <= {*dir(memfit)}
