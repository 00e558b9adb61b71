"""One plan at a time in a process.

Note [One plan at a time]
    Planning changes for a while what all threads share: functions of torch and Python that a trace watches, filters of
    warnings, the garbage collector, the one profiler there is, generators, and the model. So a second thread that plans
    waits for the first, interruptibly. Captured calls that run do not wait, and neither does what the engine of
    autograd runs on threads of its own: who waits for those may be the one that plans. A process that is forked
    meanwhile begins with nobody planning: the thread that did is not in it.
"""

import contextlib
import os
import threading
from collections.abc import Iterator

_lock = threading.RLock()


@contextlib.contextmanager
def alone() -> Iterator[None]:
    """Wait until no other thread plans, and let none begin."""
    if isinstance(threading.current_thread(), threading._DummyThread):  # not one that Python has started
        yield
        return
    with _lock:
        yield


def others_run() -> bool:
    """Return whether there are other threads than this one and those that memfit has started."""
    here = threading.current_thread()
    return any(each is not here and not each.name.startswith("memfit-") for each in threading.enumerate())


def _renew() -> None:
    global _lock
    _lock = threading.RLock()


os.register_at_fork(after_in_child=_renew)
