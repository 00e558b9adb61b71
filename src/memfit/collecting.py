"""Python's garbage collector, told to wait."""

import contextlib
import gc
from collections.abc import Iterator


@contextlib.contextmanager
def collected_later() -> Iterator[None]:
    """Meanwhile nothing is collected: traces make millions of objects that stay, and each would be looked at often.

    For work without tensors that have memory: those in cycles would stay as well.
    """
    if not gc.isenabled():
        yield
        return
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
