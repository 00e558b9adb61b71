"""Kernels compiled several at a time: which go together, and that each is there afterwards, whatever fails."""

import dataclasses
import functools
import os
import subprocess
import sys
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import fx

from memfit import _kernel_batches, _torch
from memfit._kernel_batches import _as_kernel, _compile, _Compilers, _Waiting, source_of
from memfit.ops import stretch as stretch_module
from memfit.ops.stretch import compile_all, stretch_of

aten = torch.ops.aten


@dataclasses.dataclass
class Builder:
    """Stands for Inductor's."""

    library: Path
    options: str = "-O3"
    _build_option: Any = None

    def get_target_file_path(self) -> str:
        return str(self.library)

    def get_command_line(self) -> str:
        return f"c++ {self.options} {self.library.with_suffix('.cpp')} -o {self.library}"


def kernel(folder: Path, number: int, built: list[Path], options: str = "-O3", fails: bool = False) -> _Waiting:
    library = folder / f"kernel{number}.main.so"
    library.with_suffix(".cpp").write_text("")

    def build(_lock: str, _builders: Any) -> None:
        if fails:
            raise RuntimeError("no such instruction")
        if not library.exists():
            built.append(library)
            library.write_text("")

    made = _as_kernel(functools.partial(build, str(folder / f"{number}.lock"), (Builder(library, options),)))
    assert made is not None
    return made


def test_what_compiles_alike_is_compiled_together(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    together: list[list[str]] = []

    def compile_together(kernels: list[_Waiting]) -> None:
        together.append([each.name for each in kernels])
        for each in kernels:
            each.library.write_text("")

    monkeypatch.setattr(_kernel_batches, "_compile_together", compile_together)
    built: list[Path] = []
    batch = [kernel(tmp_path, number, built, "-O1" if number == 2 else "-O3") for number in range(4)]
    _compile(batch)
    assert together == [["kernel0", "kernel1", "kernel3"]]
    assert [each.name for each in built] == ["kernel2.main.so"]
    assert all(each.done.result(timeout=0) is None for each in batch)


def test_what_fails_together_is_compiled_one_by_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(_kernels: Any) -> None:
        raise OSError("the disk is full")

    monkeypatch.setattr(_kernel_batches, "_compile_together", fail)
    monkeypatch.setattr(_kernel_batches, "_ONE_BY_ONE", set())
    built: list[Path] = []
    good, bad, other = (kernel(tmp_path, number, built, fails=number == 1) for number in range(3))
    _compile([good, bad, other])
    assert len(built) == 2
    assert good.done.result(timeout=0) is None
    assert other.done.result(timeout=0) is None
    with pytest.raises(RuntimeError, match="no such instruction"):
        bad.done.result(timeout=0)


def test_compilers_start_for_a_few_kernels_and_all_of_them_at_the_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    batches: list[int] = []
    go_on = threading.Event()

    def compile_(batch: list[_Waiting]) -> None:
        batches.append(len(batch))
        assert go_on.wait(30)
        for each in batch:
            each.done.set_result(None)

    monkeypatch.setattr(_kernel_batches, "_compile", compile_)
    compilers, built = _Compilers(), []
    kernels = [kernel(tmp_path, number, built) for number in range(21)]
    with ThreadPoolExecutor(2) as pool:
        for each in kernels[:3]:
            compilers.add(each, pool, 2)
        assert compilers._running == 0  # not for three
        for each in kernels[3:]:
            compilers.add(each, pool, 2)
        assert compilers._running == 1  # one processor is left to who writes kernels
        compilers.start(pool, 2, most=2)
        assert compilers._running == 2
        go_on.set()
        for each in kernels:
            each.done.result(timeout=30)
    assert compilers._running == 0
    assert sum(batches) == 21
    assert max(batches) <= 8
    assert batches[0] == 4  # when the fourth came, it was started
    assert batches[-1] <= 4  # what is left at the end is shared


def test_what_is_left_is_shared_among_compilers(tmp_path: Path) -> None:
    compilers, built = _Compilers(), []
    for number in range(13):
        compilers._waiting.append(kernel(tmp_path, number, built))
    assert [len(compilers._next(2)) for _ in range(4)] == [7, 4, 2, 0]


def test_a_forked_process_waits_for_nobody(tmp_path: Path) -> None:
    compilers, built = _Compilers(), []
    waiting = kernel(tmp_path, 0, built)
    compilers.add(waiting, None, 2)
    compilers.forget()
    assert waiting.done.done()
    assert compilers._next(2) == []


def test_what_is_there_already_is_left_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    together: list[int] = []
    monkeypatch.setattr(_kernel_batches, "_compile_together", lambda kernels: together.append(len(kernels)))
    built: list[Path] = []
    batch = [kernel(tmp_path, number, built) for number in range(4)]
    batch[1].library.write_text("by another process")
    _compile(batch)
    assert together == [3]
    assert batch[1].library.read_text() == "by another process"


def test_other_threads_are_left_to_inductor(tmp_path: Path) -> None:
    from torch._inductor.async_compile import AsyncCompile

    taken: list[Any] = []
    task = kernel(tmp_path, 0, []).build
    with _kernel_batches.in_batches():
        thread = threading.Thread(target=lambda: taken.append(AsyncCompile.submit(task)))
        thread.start()
        thread.join()
    assert not _kernel_batches._COMPILERS._waiting
    assert taken[0] is None or taken[0].result(timeout=60) is None
    assert (tmp_path / "kernel0.main.so").exists()


def test_other_tasks_of_inductor_are_left_to_it(tmp_path: Path) -> None:
    def task(_lock: str, _builders: Any) -> None: ...

    library = tmp_path / "kernel.main.so"
    assert _as_kernel(lambda: None) is None
    assert _as_kernel(functools.partial(task, "lock")) is None
    assert _as_kernel(functools.partial(task, "lock", (Builder(library), Builder(library)))) is None
    assert _as_kernel(functools.partial(task, "lock", (object(),))) is None
    assert _as_kernel(functools.partial(task, "lock", (Builder(library),))) is None  # its source is not there


def test_every_kernel_is_found_by_the_hash_that_its_module_is_named_by() -> None:
    text = source_of([("abc", Path("/cache/abc.main.cpp")), ("abcd", Path("/cache/abcd.main.cpp"))])
    assert '#include "/cache/abc.main.cpp"' in text
    assert 'strncmp(text, "abc.", 4) == 0) module = kernel_0::init_0()' in text
    assert 'strncmp(text, "abcd.", 5) == 0) module = kernel_1::init_1()' in text


FACTORS = (2.5, 3.5, 4.5, 5.5, 6.5)


@pytest.fixture
def _no_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stretch_module, "_STRETCHES", {})


def _graph(factor: float) -> fx.Graph:
    graph = fx.Graph()
    with _torch.FakeTensorMode():
        value, result = torch.empty(5, 7), torch.empty(5, 7)
    one = graph.placeholder("one")
    product = graph.call_function(aten.mul.Tensor, (one, factor))
    positive = graph.call_function(aten.relu.default, (product,))
    graph.output([positive])
    one.meta["val"] = value
    product.meta["val"] = positive.meta["val"] = result
    return graph


def compiled(factors: Sequence[float]) -> None:
    """Compile a kernel for each factor, and see that it computes what it should."""
    stretches = [stretch_of(_graph(factor)) for factor in factors]
    compile_all(stretches)
    x = torch.randn(5, 7)
    for stretch, factor in zip(stretches, factors, strict=True):
        assert stretch.is_compiled
        assert torch.equal(stretch(x), torch.relu(x * factor))


@pytest.mark.slow  # compiles
@pytest.mark.usefixtures("_no_others")
def test_a_library_of_several_kernels_serves_later_processes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    compiled(FACTORS)
    libraries = list(tmp_path.rglob("*.main.so"))
    assert len(libraries) == 5
    assert len({path.stat().st_ino for path in libraries}) < 5
    assert not list(tmp_path.rglob("memfit-*"))
    written = {path: path.stat().st_mtime_ns for path in libraries}
    code = "from tests.test_kernel_batches import *\ncompiled((6.5, 2.5))"
    subprocess.run([sys.executable, "-W", "ignore", "-c", code], env=dict(os.environ), check=True, timeout=300)
    assert {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*.main.so")} == written


@pytest.mark.slow  # compiles
@pytest.mark.usefixtures("_no_others")
def test_kernels_are_compiled_where_they_cannot_be_compiled_together(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(_kernel_batches, "_HEADERS", "#error not here\n")
    monkeypatch.setattr(_kernel_batches, "_ONE_BY_ONE", set())
    compiled([factor + 10 for factor in FACTORS])  # others than this process has
    assert _kernel_batches._ONE_BY_ONE
    assert len({path.stat().st_ino for path in tmp_path.rglob("*.main.so")}) == 5
