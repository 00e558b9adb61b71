"""Compiled kernels in generated models: wherever there can be one, whatever it is worth.

Generated models move so little memory that a fit would leave nearly all of them to eager kernels, and say that all is
well of kernels that never ran.
"""

import contextlib
from collections.abc import Iterator
from unittest import mock

from memfit import ways
from memfit.capture import runs
from memfit.ops.stretch import Stretch


@contextlib.contextmanager
def compiled_everywhere(kernels: str) -> Iterator[None]:
    """Compile runs of any size meanwhile, and take the compiled plan where there is one."""
    if kernels == "eager":
        yield
        return
    with mock.patch.object(runs, "_SMALLEST_RUN_BYTES", 0), mock.patch.object(ways, "_may_beat", return_value=False):
        yield


@contextlib.contextmanager
def stretches_that_run() -> Iterator[set[Stretch]]:
    """The set that all are put into that run meanwhile."""
    ran: set[Stretch] = set()
    own = Stretch._made

    def made(self: Stretch, tensors: object) -> object:
        result = own(self, tensors)  # type: ignore[arg-type]
        ran.add(self)
        return result

    with mock.patch.object(Stretch, "_made", made):
        yield ran
