"""One process that is killed, once or a few times, and the run that comes after it."""

import dataclasses
import os
import random
import select
import signal
import sys
import tempfile
import time
import traceback
from pathlib import Path

import memfit
from killed.workloads import PLAN, WORKLOADS, run
from memfit.files import read_checked

_OFTEN = ("fit", "fit_in_regions", "plan", "save_plans", "save_costs")
_COMPILED_EVERY = 20  # trials: they take much longer
_MOST_KILLS = 3  # of one folder
_PATIENCE_S = 600.0
_UNEXPECTED = ("Traceback", "damaged", "ResourceWarning")  # in what the next run says


@dataclasses.dataclass(frozen=True, kw_only=True)
class Ended:
    """A process that came to its end, or was killed."""

    code: int
    said: str
    result: str
    seconds: float

    @property
    def was_killed(self) -> bool:
        return self.code == -signal.SIGKILL


@dataclasses.dataclass(frozen=True, kw_only=True)
class Trial:
    """What became of one trial."""

    number: int
    workload: str
    moments: list[float]  # seconds after the start
    killed: int  # how often it was still running
    problem: str = ""


class Trials:
    """Trials by number; the same number is the same workload at the same share of its time."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._expected: dict[str, Ended] = {}

    def run(self, number: int) -> Trial:
        draw = random.Random(number)
        name = "fit_compiled" if number % _COMPILED_EVERY == 0 else _OFTEN[number % len(_OFTEN)]
        expected = self.expected(name)
        moments: list[float] = []
        with tempfile.TemporaryDirectory(dir=self._folder) as given:
            folder, killed = Path(given), 0
            if draw.random() < 0.3:  # something is kept from before
                self._in_process(name, folder, None)
            for _ in range(draw.randint(1, _MOST_KILLS)):
                moments.append(round(draw.uniform(0.0, 1.05) * expected.seconds, 4))
                killed += self._in_process(name, folder, moments[-1]).was_killed
            problem = _files(folder) or self._next_run(name, folder)
        return Trial(number=number, workload=name, moments=moments, killed=killed, problem=problem)

    def expected(self, name: str) -> Ended:
        """Return what a run comes to that nobody kills."""
        if name not in self._expected:
            with tempfile.TemporaryDirectory(dir=self._folder) as folder:
                self._expected[name] = ended = self._in_process(name, Path(folder), None)
            if ended.code:
                raise RuntimeError(f"{name} fails without being killed: {ended.said}")
        return self._expected[name]

    def _next_run(self, name: str, folder: Path) -> str:
        """Say what is wrong with it; "" if all is well."""
        ended, expected = self._in_process(name, folder, None), self.expected(name)
        if ended.code:
            return f"ended with {ended.code}: {ended.said[-800:]}"
        if ended.result != expected.result:
            return f"came to {ended.result[:80]} instead of {expected.result[:80]}"
        found = next((each for each in _UNEXPECTED if each in ended.said), None)
        return "" if found is None else f"said {found!r}: {ended.said[-800:]}"

    def _in_process(self, name: str, folder: Path, moment_s: float | None) -> Ended:
        """Run a workload in a process of its own, with all it starts in one group that is killed together."""
        if name == "save_plans":
            os.environ["MEMFIT_KILLED_PLAN"] = str(self._plan())
        start = time.monotonic()
        child = os.fork()
        if child == 0:
            _be_child(name, folder)
        code = _wait(child, start + (_PATIENCE_S if moment_s is None else moment_s))
        said, result = folder / "said", folder / "result"
        ended = Ended(
            code=code,
            said=said.read_text(errors="replace") if said.exists() else "",
            result=result.read_text() if result.exists() else "",
            seconds=time.monotonic() - start,
        )
        result.unlink(missing_ok=True)
        return ended

    def _plan(self) -> Path:
        """A plan for who saves it."""
        path = self._folder / PLAN
        if not path.exists():
            with tempfile.TemporaryDirectory(dir=self._folder) as folder:
                self._in_process("plan", Path(folder), None)
                Path(folder, PLAN).rename(path)
        return path


def _wait(child: int, until: float) -> int:
    """Wait for a process, and kill it with all it has started when its time is over."""
    handle = os.pidfd_open(child)
    ended, _, _ = select.select([handle], [], [], max(0.0, until - time.monotonic()))
    os.close(handle)
    if not ended:
        try:
            os.killpg(child, signal.SIGKILL)
        except ProcessLookupError:  # it has no group of its own yet
            os.kill(child, signal.SIGKILL)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def _be_child(name: str, folder: Path) -> None:
    code = 1
    try:
        os.setsid()
        said = os.open(folder / "said", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(said, 1)
        os.dup2(said, 2)
        for kind in ("MEMFIT_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR", "TMPDIR"):
            place = folder / kind.lower()
            place.mkdir(exist_ok=True)
            os.environ[kind] = str(place)
        tempfile.tempdir = None  # it is asked for anew
        result = run(name, folder)
        (folder / "result").write_text(result)
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _files(folder: Path) -> str:
    """Say which of the files that memfit keeps is there in part."""
    cache = folder / "memfit_cache_dir"
    for path in cache.rglob("*.json") if cache.exists() else ():
        if path.name.startswith("."):
            continue  # unfinished, under a name that nobody reads
        try:
            if path.parent.parent.name == "plans":
                memfit.Plan.load(path)
            elif path.parent == cache:
                label = path.read_text().partition("\n")[0][:-64]
                assert read_checked(path, label=label) is not None
            else:
                assert read_checked(path) is not None
        except Exception as error:
            return f"{path.relative_to(folder)} is damaged: {error!r}"
    return ""


assert set(WORKLOADS) == {*_OFTEN, "fit_compiled"}
