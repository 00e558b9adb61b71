"""Several threads, and several processes, that plan and train at once."""

import contextlib
import gc
import os
import random
import signal
import subprocess
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from budgeted import ConvNet, images
from torch import nn

import memfit
from memfit._memory_events import MemoryRecorder, _Seen
from memfit.alone import alone
from memfit.errors import ExecutionError, InvalidInput

pytestmark = pytest.mark.usefixtures("one_thread")

PATIENCE_S = 120.0


class Net(nn.Module):
    def __init__(self, width: int = 16) -> None:
        super().__init__()
        parts = (nn.Linear(width, width), nn.BatchNorm1d(width), nn.GELU() if width % 2 else nn.ReLU())
        self.layers = nn.Sequential(*parts, nn.Linear(width, width), nn.Tanh())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x).square().mean()


class Looking(Net):
    """Cannot be captured whole: it looks at values."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found = self.layers(x)
        if float(found.detach().sum()) > 1e9:
            found = found * 2
        return found.square().mean()


def made(width: int, kind: type[Net] = Net) -> tuple[nn.Module, torch.Tensor]:
    generator = torch.Generator().manual_seed(width)
    model = kind(width)
    with torch.no_grad():
        for each in model.parameters():
            each.copy_(torch.randn(each.shape, generator=generator) / 4)
    return model, torch.randn(32, width, generator=generator)


def fitted(width: int, kind: type[Net] = Net, **options: Any) -> tuple[nn.Module, torch.Tensor]:
    return planned(*made(width, kind), **options)


def planned(model: nn.Module, batch: torch.Tensor, **options: Any) -> tuple[nn.Module, torch.Tensor]:
    chosen = {"budget": 0.9, "time_limit": 0.2, "remember": False, "progress": False} | options
    return memfit.fit(model, batch, **chosen), batch


def steps(model: nn.Module, batch: torch.Tensor, count: int = 2) -> list[torch.Tensor]:
    losses = []
    for number in range(count):
        model.zero_grad()
        loss = model(batch + number)
        loss.backward()
        losses.append(loss.detach())
    return [*losses, *(each.grad for each in model.parameters()), *(each.clone() for each in model.buffers())]


def same(one: list[torch.Tensor], other: list[torch.Tensor]) -> bool:
    return len(one) == len(other) and all(map(torch.equal, one, other))


def in_threads(*works: Callable[[], Any]) -> list[Any]:
    """What each returned, or what it raised."""
    found: list[Any] = [None] * len(works)

    def run(number: int) -> None:
        try:
            found[number] = works[number]()
        except BaseException as error:
            found[number] = error

    threads = [threading.Thread(target=run, args=(number,), daemon=True) for number in range(len(works))]
    for each in threads:
        each.start()
    for each in threads:
        each.join(PATIENCE_S)
    assert not any(each.is_alive() for each in threads), "a thread waits for ever"
    return found


@contextlib.contextmanager
def meanwhile(work: Callable[[], Any]) -> Iterator[None]:
    """Do something again and again on another thread."""
    ended = threading.Event()

    def run() -> None:
        while not ended.is_set():
            work()
            time.sleep(0.0005)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join(PATIENCE_S)


def shared_state() -> list[Any]:
    return [
        torch.get_rng_state().tolist(),
        random.getstate(),
        list(warnings.filters),
        gc.isenabled(),
        torch.is_grad_enabled(),
        torch.is_autocast_enabled("cpu"),
        torch.are_deterministic_algorithms_enabled(),
        torch.nn.modules.module._global_forward_hooks.copy(),
        [torch.manual_seed, torch.set_rng_state, open, print, os.path.exists, Path.open, nn.Module.__call__],
        "__getattribute__" in vars(nn.Module),
        torch._subclasses.fake_tensor.FakeTensorMode.dispatch,
        torch.autograd.profiler._is_profiler_enabled,
        signal.getsignal(signal.SIGINT),
    ]


def test_ten_threads_fit_ten_models_and_leave_nothing_behind() -> None:
    kinds = [Looking if width == 12 else Net for width in range(8, 18)]
    expected = [steps(*made(width, kind)) for width, kind in enumerate(kinds, start=8)]
    subjects = [made(width, kind) for width, kind in enumerate(kinds, start=8)]
    before = shared_state()
    found = in_threads(*[lambda each=each: steps(*planned(*each, remember=True)) for each in subjects])
    assert not [each for each in found if isinstance(each, BaseException)]
    assert all(map(same, found, expected))
    assert shared_state() == before
    assert MemoryRecorder._active == []


def test_one_thread_trains_while_another_fits_the_same_class() -> None:
    model, batch = fitted(16)
    twin, _ = made(16)
    expected = [steps(twin, batch) for _ in range(8)]
    found = in_threads(
        lambda: [steps(model, batch) for _ in range(8)],
        lambda: steps(*fitted(16)),
        lambda: steps(*fitted(16, Looking, budget="smallest")),
    )
    assert all(map(same, found[0], expected))
    assert same(found[1], expected[0])
    assert same(found[2], expected[0])


def test_numbers_that_other_threads_draw_are_not_the_models() -> None:
    expected = steps(*made(16))
    with meanwhile(lambda: (torch.rand(3), random.random())):
        assert same(steps(*fitted(16)), expected)


class Drawing(Net):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x * scale())


def scale() -> float:
    return drawn()


def drawn() -> float:
    return random.random()


def test_numbers_that_the_model_draws_are_seen_beside_other_threads_too() -> None:
    model, batch = made(16, Drawing)
    with meanwhile(lambda: random.random()):
        plan = memfit.plan(model, batch, budget="smallest", time_limit=0.2, progress=False)
    assert set(plan.regions) == {"layers"}


def test_ctrl_c_ends_waiting_for_another_thread() -> None:
    begun, ended = threading.Event(), threading.Event()

    def plan() -> None:
        with alone():
            begun.set()
            ended.wait(PATIENCE_S)

    def interrupted() -> None:
        time.sleep(0.3)
        os.kill(os.getpid(), signal.SIGINT)

    holder = threading.Thread(target=plan, daemon=True)
    holder.start()
    assert begun.wait(PATIENCE_S)
    threading.Thread(target=interrupted, daemon=True).start()
    model, batch = made(16)
    try:
        with pytest.raises(KeyboardInterrupt):
            memfit.fit(model, batch, 0.9, progress=False)
    finally:
        ended.set()
        holder.join(PATIENCE_S)
    assert "forward" not in vars(model)


class FitsInWorkers(torch.utils.data.Dataset[float]):
    def __len__(self) -> int:
        return 1

    def __getitem__(self, index: int) -> float:
        return float(steps(*fitted(16))[0])


def test_a_worker_that_was_forked_while_a_thread_planned_fits_all_the_same() -> None:
    begun, ended = threading.Event(), threading.Event()

    def plan() -> None:
        with alone():
            begun.set()
            ended.wait(PATIENCE_S)

    holder = threading.Thread(target=plan, daemon=True)
    holder.start()
    assert begun.wait(PATIENCE_S)
    try:
        loader = torch.utils.data.DataLoader(
            FitsInWorkers(), num_workers=1, timeout=PATIENCE_S, multiprocessing_context="fork"
        )
        assert [float(each) for each in loader] == [float(steps(*made(16))[0])]
    finally:
        ended.set()
        holder.join(PATIENCE_S)


def test_a_thread_under_no_grad_or_autocast_plans_what_it_will_run() -> None:
    def under(around: Any) -> list[torch.Tensor]:
        with around:
            model, batch = fitted(16)
        return steps(model, batch)

    expected = steps(*made(16))
    for found in in_threads(lambda: under(torch.no_grad()), lambda: under(torch.autocast("cpu", torch.bfloat16))):
        assert same(found, expected)


def test_inference_mode_is_refused_in_a_sentence() -> None:
    with torch.inference_mode(), pytest.raises(InvalidInput, match="inference_mode"):
        memfit.fit(*made(16), 0.9)


@pytest.mark.parametrize("elsewhere", [False, True], ids=["on this thread", "on another"])
def test_a_profiler_of_the_users_goes_on(elsewhere: bool) -> None:
    """There is one profiler in a process: a second ends it, or the process."""

    def fit_both() -> list[Any]:
        expected = steps(*made(16))
        whole = same(steps(*fitted(16)), expected)
        with pytest.raises(ExecutionError, match="another profiler is running"):
            fitted(16, Looking, budget="smallest")
        return [whole]

    with torch.autograd.profiler.profile(profile_memory=True) as profiler:
        found = in_threads(fit_both) if elsewhere else [fit_both()]
        kept = torch.ones(4000)
    assert found == [[True]]
    assert any(each.name == "aten::ones" for each in profiler.function_events)
    assert kept.sum() == 4000


def test_recordings_leave_the_work_of_collectives_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its end is written by a thread of the backend, into what may be gone: see Note [Threads of a backend]."""
    names: list[str] = []

    def seen(roots: Any) -> _Seen:
        waiting = list(roots)
        while waiting:
            event = waiting.pop()
            names.append(event.name)
            waiting += event.children
        return _Seen()

    monkeypatch.setattr(_Seen, "of", seen)
    store = torch.distributed.HashStore()
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        recorder = MemoryRecorder()
        recorder.start()
        torch.distributed.all_reduce(torch.ones(8))
        recorder.stop()
    finally:
        torch.distributed.destroy_process_group()
    assert "c10d::allreduce_" in names
    assert not [each for each in names if each.startswith("gloo")]


PLANNING = """
import sys, torch, memfit
from budgeted import ConvNet, images
torch.set_num_threads(1)
torch.manual_seed(0)
model, batch = ConvNet(), images(8)
print("ready", flush=True)
sys.stdin.readline()
memfit.fit(model, batch, 0.8, time_limit=0.5, progress=False)
loss = model(batch).square().mean()
loss.backward()
print(float(loss.detach()).hex(), *(float(each.grad.double().sum()).hex() for each in model.parameters()))
"""


def test_two_processes_plan_the_same_model_at_once(tmp_path: Path) -> None:
    environment = os.environ | {
        "MEMFIT_CACHE_DIR": str(tmp_path),
        "PYTHONPATH": os.pathsep.join([str(Path(memfit.__file__).parents[1]), str(Path(__file__).parent)]),
        "OMP_NUM_THREADS": "1",
    }
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    both = [subprocess.Popen([sys.executable, "-c", PLANNING], env=environment, **pipes) for _ in range(2)]
    try:
        for each in both:
            assert each.stdout.readline() == "ready\n"
        for each in both:
            each.stdin.write("\n")
            each.stdin.flush()
        outcomes = [each.communicate(timeout=PATIENCE_S) for each in both]
    finally:
        for each in both:
            each.kill()
    assert [each.returncode for each in both] == [0, 0], outcomes
    torch.manual_seed(0)
    model, batch = ConvNet(), images(8)
    loss = model(batch).square().mean()
    loss.backward()
    expected = " ".join(
        [float(loss.detach()).hex(), *(float(each.grad.double().sum()).hex() for each in model.parameters())]
    )
    assert [output.strip() for output, _ in outcomes] == [expected] * 2
    assert not [each for each in tmp_path.rglob(".*") if each.is_file()], "unfinished files are left"
