"""Run the tests of a file in a process of its own, which has the simulated device.

Note [A process of its own]
    A process that has loaded the device has it for good, and libraries would use it: other tests of the same process
    would not be what they were. So the tests of a file run in one child, and each reports here what became of it.
    `MEMFIT_SIMULATED=1 python -m pytest tests/accelerator/test_fit_there.py` runs them without a child.
"""

import os
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from accelerator.simulated_device import NAME, compiler, load, set_capacity, taken_log, taken_races

_INSIDE = "MEMFIT_SIMULATED"
_OUTCOMES = pytest.StashKey[dict[Path, dict[str, tuple[str, str]]]]()
_GB = 2**30


def pytest_configure(config: pytest.Config) -> None:
    if os.environ.get(_INSIDE) and compiler() is not None:
        load()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if compiler() is None:
        reason = "there is no C++ compiler, which the simulated device is built with"
        for item in items:
            if Path(__file__).parent in item.path.parents:
                item.add_marker(pytest.mark.skip(reason=reason))


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """Report what the child said of a test."""
    if os.environ.get(_INSIDE):
        return None
    outcomes = pyfuncitem.config.stash.setdefault(_OUTCOMES, {})
    if pyfuncitem.path not in outcomes:
        outcomes[pyfuncitem.path] = _outcomes_of(pyfuncitem)
    outcome, said = outcomes[pyfuncitem.path].get(pyfuncitem.name, ("failed", outcomes[pyfuncitem.path][""][1]))
    if outcome == "skipped":
        pytest.skip(said)
    if outcome == "failed":
        pytest.fail(said, pytrace=False)
    return True


def _outcomes_of(item: pytest.Function) -> dict[str, tuple[str, str]]:
    """Run all tests of a file in a child, those that are left out here too."""
    report = Path(os.environ.get("MEMFIT_CACHE_DIR", ".")) / f"{item.path.stem}.xml"
    command = [sys.executable, "-m", "pytest", str(item.path), "-q", f"--junitxml={report}", "-p", "no:cacheprovider"]
    ran = subprocess.run(
        command,
        env=os.environ | {_INSIDE: "1", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        cwd=item.config.rootpath,
        timeout=600,
    )
    outcomes = {"": ("failed", ran.stdout[-4000:] + ran.stderr[-4000:])}
    if report.exists():
        for case in ElementTree.parse(report).getroot().iter("testcase"):
            outcomes[str(case.get("name"))] = _outcome(case)
    return outcomes


def _outcome(case: ElementTree.Element) -> tuple[str, str]:
    for child in case:
        if child.tag in ("failure", "error"):
            return "failed", child.text or child.get("message") or ""
        if child.tag == "skipped":
            return "skipped", child.get("message") or ""
    return "passed", ""


@pytest.fixture(autouse=True)
def _fresh_device() -> Iterator[None]:
    """Begin with an empty log, and end without anything that a real device could have done in another order."""
    if not os.environ.get(_INSIDE):
        yield
        return
    set_capacity(_GB)
    taken_log()
    taken_races()
    yield
    set_capacity(_GB)
    assert taken_races() == []


@pytest.fixture
def device() -> torch.device:
    return torch.device(NAME, 0) if os.environ.get(_INSIDE) else torch.device("cpu")
