"""One line that says what a long call is doing.

Note [Never silent, never loud]
    A call that ends within a second says nothing. After that, a terminal shows one line, which disappears when the call
    ends. Without a terminal (a file, a notebook, a job in the background) every stage is one line in the log of
    "memfit", level INFO; where that level is off, nothing runs at all. Of several ranks on one machine the first one
    speaks. Calls inside a call speak through the line that is there already, so there is never a second one.

Note [One thread]
    All output comes from one thread, which ends before the call returns: also an operator that takes long without a
    word shows that time passes. The thread has a small stack, because a stack counts under a limit on the process.
"""

import contextlib
import dataclasses
import logging
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from typing import Any, Protocol

log = logging.getLogger("memfit")

Progress = Callable[[int, int], None]  # done, total
ProgressLike = Progress | bool | None  # a callback; False: silence; None or True: the line of this module

_QUIET_S = 1.0  # a call that is shorter says nothing
_REFRESH_S = 0.25  # seldom enough to leave the times of operators as they are
_LOG_AGAIN_S = 10.0  # for a stage that goes on
_STACK_BYTES = 2**20  # of the thread; the usual 8 MiB would count under a limit
_BAR_WIDTH = 10


class SearchState(Protocol):
    """The state of a search for a plan."""

    @property
    def seconds(self) -> float: ...

    @property
    def slowdown(self) -> float | None: ...

    @property
    def bound(self) -> float: ...


class ProgressLine:
    """Take what a call tells about itself while it runs, and tell nobody."""

    def doing(self, stage: str) -> None:
        """Begin a stage of unknown length."""

    def counted(self, stage: str, done: int, total: int) -> None:
        """Tell how much of a stage is done."""

    def measured(self, done: int, total: int) -> None:
        """Tell how many operators are measured."""
        self.counted("measuring operators", done, total)
        if done == total:
            self.doing("planning")

    def found(self, found: SearchState) -> None:
        """Tell the best plan so far and what no plan can be below."""


@contextlib.contextmanager
def progress_line(progress: ProgressLike, stage: str) -> Iterator[ProgressLine]:
    """Say what the body is doing, as the caller wants it.

    Args:
        progress: A callback that is told counts, False for silence, None or True for the automatic line.
        stage: What begins, in words.

    Yields:
        What to tell about the stages that follow.

    """
    outer = _OUTER.get()
    if outer is not None and not callable(progress) and progress is not False:
        yield outer  # see Note [Never silent, never loud]
        return
    line = _line_for(progress, stage, outer)
    with speaking(line), line if isinstance(line, _Spoken) else contextlib.nullcontext():
        yield line


@contextlib.contextmanager
def speaking(line: ProgressLine) -> Iterator[None]:
    """Let calls in the body speak through a line that is there already."""
    token = _OUTER.set(line)
    try:
        yield
    finally:
        _OUTER.reset(token)


def search_words(found: SearchState) -> str:
    """Put the state of a search into words."""
    if found.slowdown is None:
        return f"no plan yet, bound {found.bound:+.1%}, {found.seconds:.1f} s"
    return f"best {found.slowdown:+.1%}, bound {found.bound:+.1%}, {found.seconds:.1f} s (Ctrl-C takes the best)"


_OUTER: ContextVar[ProgressLine | None] = ContextVar("progress", default=None)


def _line_for(progress: ProgressLike, stage: str, outer: ProgressLine | None) -> ProgressLine:
    if callable(progress):
        return _Callback(progress, outer or ProgressLine())
    if progress is False or not _is_first_rank():
        return ProgressLine()
    if _is_terminal():
        return _Spoken(stage, _on_terminal)
    return _Spoken(stage, _in_log) if log.isEnabledFor(logging.INFO) else ProgressLine()


class _Callback(ProgressLine):
    """A caller's own function, which is told counts; stages go to the line around the call, if there is one."""

    def __init__(self, callback: Progress, outer: ProgressLine) -> None:
        self._callback, self._outer = callback, outer

    def doing(self, stage: str) -> None:
        self._outer.doing(stage)

    def counted(self, stage: str, done: int, total: int) -> None:
        self._callback(done, total)

    def measured(self, done: int, total: int) -> None:
        self._callback(done, total)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class _State:
    """Write the line as it is at a moment."""

    stage: str
    detail: str = ""
    done: int = 0
    total: int | None = None

    def __str__(self) -> str:
        return f"{self.stage} {self.detail}".rstrip()


_Show = Callable[[_State], None]
_Output = Callable[[float], contextlib.AbstractContextManager[_Show]]  # from the moment at which the call began


class _Spoken(ProgressLine):
    """The automatic line, see Note [One thread]."""

    def __init__(self, stage: str, output: _Output) -> None:
        self._state = _State(stage=stage)  # replaced as a whole, so that the thread never sees half of it
        self._output = output
        self._began = time.monotonic()
        self._ended = threading.Event()
        self._thread: threading.Thread | None = None

    def __enter__(self) -> "_Spoken":
        usual_bytes = threading.stack_size(_STACK_BYTES)
        try:
            thread = threading.Thread(target=self._show, name="memfit-progress", daemon=True)
            thread.start()
            self._thread = thread
        except RuntimeError:  # no memory for a thread: the call matters more than its progress
            self._thread = None
        finally:
            threading.stack_size(usual_bytes)
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        if self._thread is not None:
            self._thread.join()
            self._thread = None  # the line may live on in a fitted model

    def doing(self, stage: str) -> None:
        self._state = _State(stage=stage)

    def counted(self, stage: str, done: int, total: int) -> None:
        self._state = _State(stage=stage, detail=f"{done}/{total}", done=done, total=total)

    def found(self, found: SearchState) -> None:
        self._state = _State(stage="planning:", detail=search_words(found))

    def _show(self) -> None:
        if self._ended.wait(_QUIET_S):
            return
        stopped = contextlib.suppress(MemoryError, OSError, ValueError)  # a limit that is reached, a stream closed
        with stopped, self._output(self._began) as show:
            while True:
                show(self._state)
                if self._ended.wait(_REFRESH_S):
                    return


@contextlib.contextmanager
def _on_terminal(began: float) -> Iterator[_Show]:
    """Draw one line on the terminal and wipe it away at the end."""
    from rich import progress as rich_progress
    from rich.table import Column

    words = rich_progress.TextColumn(
        "{task.description}", markup=False, table_column=Column(no_wrap=True, overflow="ellipsis")
    )
    elapsed = rich_progress.TimeElapsedColumn(table_column=Column(no_wrap=True, min_width=7))
    columns = (rich_progress.SpinnerColumn(), elapsed, words, rich_progress.BarColumn(bar_width=_BAR_WIDTH))
    # What others write to stdout is left alone: it may go elsewhere than the terminal.
    with rich_progress.Progress(
        *columns, console=_console(), transient=True, auto_refresh=False, redirect_stdout=False
    ) as drawn:
        task = drawn.add_task("", total=None)
        drawn.tasks[0].start_time = began

        def show(state: _State) -> None:
            drawn.update(task, description=str(state), completed=state.done, total=state.total)
            drawn.tasks[0].total = state.total  # an update leaves None as it was
            drawn.refresh()

        yield show


@contextlib.contextmanager
def _in_log(began: float) -> Iterator[_Show]:
    """Write a line for every stage, and again from time to time while a stage goes on."""
    said = _State(stage="")
    said_at = began

    def show(state: _State) -> None:
        nonlocal said, said_at
        is_late = state != said and time.monotonic() - said_at >= _LOG_AGAIN_S
        if state.stage != said.stage or is_late:
            log.info("%s", state)
            said, said_at = state, time.monotonic()

    yield show


def _console() -> Any:
    """Return a console on stderr."""
    from rich.console import Console

    return Console(stderr=True, force_jupyter=False)


def _is_terminal() -> bool:
    """Return whether stderr is a terminal on which a line can be wiped away."""
    try:
        return sys.stderr is not None and sys.stderr.isatty() and os.environ.get("TERM") != "dumb"
    except ValueError:  # it was closed
        return False


def _is_first_rank() -> bool:
    return os.environ.get("LOCAL_RANK", "0") == "0"
