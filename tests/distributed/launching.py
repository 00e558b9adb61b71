"""Start the ranks of a job as processes of their own, on this machine alone."""

import fcntl
import functools
import os
import shutil
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

FOLDER = Path(__file__).parent
ROOT = FOLDER.parents[1]


def environments(world_size: int) -> list[dict[str, str]]:
    """One environment a rank, as torchrun makes it."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    common = os.environ | {
        "WORLD_SIZE": str(world_size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": port,
        "OMP_NUM_THREADS": "1",
        "PYTHONFAULTHANDLER": "1",
        "PYTHONPATH": os.pathsep.join([str(ROOT / "src"), str(ROOT), str(FOLDER)]),
    }
    return [common | {"RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(world_size)]


def started(script: str, *arguments: object, world_size: int = 2) -> list[subprocess.Popen[str]]:
    """The ranks of a job; whoever starts them ends them."""
    command = [sys.executable, str(FOLDER / script), *map(str, arguments)]
    return [
        subprocess.Popen(command, env=each, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        for each in environments(world_size)
    ]


def filled_once(name: str, fill: Callable[[Path], object]) -> Path:
    """A folder that is filled once, though several test processes ask; who comes later waits, also to hear why not."""
    jobs = Path(os.environ["MEMFIT_TEST_JOBS"])
    folder, failed = jobs / name, jobs / f"{name}.failed"
    with (jobs / f"{name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        assert not failed.exists(), failed.read_text()
        if not folder.exists():
            unfinished = Path(tempfile.mkdtemp(dir=jobs))
            try:
                _filled(fill, unfinished)
            except BaseException as error:
                failed.write_text(str(error))
                raise
            unfinished.rename(folder)
    return folder


def _filled(fill: Callable[[Path], object], folder: Path) -> None:
    """Fill a folder; once more if torch's profiler has ended a rank, which it does under threads of gloo's."""
    try:
        fill(folder)
    except AssertionError as error:
        if not any(word in str(error) for word in ("SIGABRT", "SIGSEGV", "Segmentation fault", "terminate called")):
            raise
        shutil.rmtree(folder)
        folder.mkdir()
        fill(folder)


@functools.cache
def ddp_job(world_size: int) -> Path:
    """The folder that `ddp_job.py` filled."""
    return filled_once(f"ddp{world_size}", lambda folder: run("ddp_job.py", folder, world_size=world_size))


def run(script: str, *arguments: object, world_size: int = 2, timeout_s: float = 240.0) -> list[str]:
    """What each rank printed; a rank that fails fails the test with its own words."""
    processes = started(script, *arguments, world_size=world_size)
    try:
        outcomes = [process.communicate(timeout=timeout_s) for process in processes]
    finally:
        for process in processes:
            process.kill()
    failed = [errors[-2000:] for process, (_, errors) in zip(processes, outcomes, strict=True) if process.returncode]
    assert not failed, "\n\n".join(failed)
    return [output for output, _ in outcomes]
