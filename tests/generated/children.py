"""Seeds in processes of their own: what ends a process is an outcome of one seed, and the others go on.

Children are forked, so that starting one takes milliseconds: this process must not have run anything of torch's.
"""

import contextlib
import gc
import multiprocessing
import os
import signal
import tempfile
import time
from collections.abc import Iterator
from multiprocessing.connection import Connection, wait

import torch

from generated.draw import draw
from generated.oracle import CRASH, INVALID, Outcome, outcome_of, run_plainly

_TOGETHER = 50  # seeds of one child; they share a cost cache: one for thousands takes longer to read than to measure
_PATIENCE_S = 900.0  # for one seed
_FORK = multiprocessing.get_context("fork")


class _Child:
    """A process that runs some seeds in their order, and is started again if one of them ends it."""

    def __init__(self, seeds: list[int], kernels: str, folder: str) -> None:
        self.seeds = seeds  # of which nothing was heard yet
        self._kernels, self._folder = kernels, folder
        self._start()

    def _start(self) -> None:
        self.said, says = _FORK.Pipe(duplex=False)
        self._process = _FORK.Process(target=_run, args=(self.seeds, self._kernels, self._folder, says))
        self._process.start()
        says.close()
        self._since = time.monotonic()

    def news(self) -> Iterator[Outcome]:
        """What was said of the first seed, or what the child's end says of it."""
        if not self.said.poll():
            if time.monotonic() - self._since > _PATIENCE_S:
                self._process.kill()
            return
        seconds, self._since = time.monotonic() - self._since, time.monotonic()
        try:
            outcome = self.said.recv()
            self.seeds.pop(0)
        except EOFError:
            self._process.join()
            outcome = _of_end(self.seeds.pop(0), self._kernels, self._process.exitcode or 0)
            outcome.seconds = round(seconds, 3)
            self.end()
            if self.seeds:
                self._start()
        yield outcome

    def end(self) -> None:
        self._process.kill()
        self._process.join()
        self.said.close()


def outcomes_of(seeds: list[int], kernels: str, jobs: int = 1) -> Iterator[Outcome]:
    """Outcomes as they come, in no order where there are several jobs."""
    waiting = [seeds[start : start + _TOGETHER] for start in range(0, len(seeds), _TOGETHER)]
    running: list[_Child] = []
    gc.collect()
    gc.freeze()  # what was imported stays: looking through it before every measured step takes longer than the step
    with tempfile.TemporaryDirectory(prefix="memfit-generated-") as folder:
        try:
            while waiting or running:
                while waiting and len(running) < jobs:
                    some = waiting.pop(0)
                    running.append(_Child(some, kernels, os.path.join(folder, str(some[0]))))
                wait([child.said for child in running], _PATIENCE_S / 10)
                for child in list(running):
                    yield from child.news()
                    if not child.seeds:
                        child.end()
                        running.remove(child)
        finally:
            for child in running:
                child.end()


def _run(seeds: list[int], kernels: str, folder: str, says: Connection) -> None:
    _be_a_child()
    os.environ["MEMFIT_CACHE_DIR"] = folder
    for seed in seeds:
        says.send(outcome_of(draw(seed, kernels)))


def _be_a_child() -> None:
    torch.set_num_threads(1)  # tiny steps are faster on one
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def _of_end(seed: int, kernels: str, code: int) -> Outcome:
    """The outcome of a seed that ended its process: no model if plain eager ends one as well."""
    alone = _FORK.Process(target=_plainly, args=(seed, kernels))
    alone.start()
    alone.join(_PATIENCE_S)
    alone.kill()
    alone.join()
    ended = _name(alone.exitcode or 0)
    if ended:
        return Outcome(seed=seed, kind=INVALID, reason=f"plain eager ends its process: {ended}")
    return Outcome(seed=seed, kind=CRASH, reason=f"ends its process: {_name(code) or 'quietly'}")


def _plainly(seed: int, kernels: str) -> None:
    _be_a_child()
    with contextlib.suppress(Exception):  # of which the oracle has an opinion
        run_plainly(draw(seed, kernels))


def _name(code: int) -> str:
    return "" if code == 0 else signal.Signals(-code).name if code < 0 else f"exit code {code}"
