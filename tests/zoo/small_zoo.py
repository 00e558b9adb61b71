"""A zoo of one small model, built as the real one is."""

import contextlib
from pathlib import Path

from memfit.cli.progress import Display, display
from memfit.cli.zoo_build import build
from memfit.zoo.catalog import Case

NET = """
from torch import nn


def make_model(width=64):
    return nn.Sequential(*(part for _ in range(4) for part in (nn.Linear(width, width), nn.ReLU())))
"""


def case_in(folder: Path) -> Case:
    """A step of a model in a file of this folder, here and on a device that is not here."""
    (folder / "small_net.py").write_text(NET)
    return Case(
        name="net",
        reference=f"{folder / 'small_net.py'}:make_model()",
        inputs=("512x64",),
        batch_size=512,
        devices=("cpu", "T4"),
        optimizer="sgd",
    )


def built(case: Case, folder: Path, *, again: bool = False) -> list[str]:
    """Build what is missing; what was built."""
    made: list[str] = []
    with contextlib.ExitStack() as stack:
        shown: Display = stack.enter_context(display())
        build([case], folder, time_limit_s=0.5, seed=0, again=again, shown=shown, report=made.append)
    return made
