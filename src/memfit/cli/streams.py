"""Where things are written: answers on stdout, everything else on stderr, files whole or not at all."""

import contextlib
import sys
from collections.abc import Iterator
from pathlib import Path

import typer

from memfit.errors import InvalidInput
from memfit.files import write_atomically

INTERRUPTED = 130  # as shells say it


@contextlib.contextmanager
def only_results_on_stdout() -> Iterator[None]:
    """What the user's modules print goes to stderr: stdout is for the answer."""
    with contextlib.redirect_stdout(sys.stderr):
        yield


@contextlib.contextmanager
def interruptible() -> Iterator[None]:
    """Ctrl-C ends the command with one word."""
    try:
        yield
    except KeyboardInterrupt:
        typer.echo("interrupted", err=True)
        raise typer.Exit(INTERRUPTED) from None


def check_writable(path: Path | None, *, force: bool, option: str) -> None:
    """Ask before a file is written over, or refuse where nobody can be asked; before the work, not after it."""
    if path is None or force or not path.exists():
        return
    can_ask = path.is_file() and sys.stdin.isatty() and sys.stderr.isatty()
    if can_ask and typer.confirm(f"{path} exists. Write over it?", err=True):
        return
    raise InvalidInput(f"{option} {str(path)!r} exists; give --force to write over it, or another path")


def write_file(path: Path, text: str, *, noun: str, option: str) -> None:
    """Write a file a user asked for."""
    try:
        write_atomically(path, text)
    except OSError as error:
        raise InvalidInput(
            f"the {noun} could not be written to {str(path)!r} ({error.strerror or error}); give another {option} path"
        ) from None
