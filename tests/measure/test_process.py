import dataclasses
import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from memfit.ir import Compute, Free, Graph, Instruction, Kind, Operation, OptimizerMemory, Phase, Program, Storage
from memfit.measure import process
from memfit.measure.process import (
    KnownMemory,
    OperatorMemory,
    ProcessCache,
    RuntimeMemory,
    can_be_measured,
    operator_memory,
    process_peak,
    runtime_memory,
    signatures_of,
)
from memfit.measure.signature import encode

MIB = 2**20
PAGE = 4096
NO_RUNTIME = RuntimeMemory(
    eager_bytes=0, planned_bytes=0, operation_bytes=0, eager_mapped_bytes=0, planned_mapped_bytes=0
)
RUNTIME = RuntimeMemory(
    eager_bytes=20 * MIB,
    planned_bytes=30 * MIB,
    operation_bytes=1000,
    eager_mapped_bytes=5 * MIB,
    planned_mapped_bytes=7 * MIB,
)


def storage(name: str, size_bytes: int, kind: Kind = Kind.ACTIVATION) -> Storage:
    return Storage(name=name, size_bytes=size_bytes, kind=kind, dtype="uint8", shape=(size_bytes,))


def operation(name: str, inputs: tuple[int, ...], outputs: tuple[int, ...]) -> Operation:
    return Operation(
        name=name, target=f"aten.{name}", phase=Phase.FORWARD, inputs=inputs, outputs=outputs, signature=f'["{name}"]'
    )


GRAPH = Graph(
    storages=(storage("x", 4 * MIB, Kind.BATCH), storage("a", 8 * MIB), storage("b", 2 * MIB)),
    operations=(operation("first", (0,), (1,)), operation("second", (1,), (2,))),
    resident=(0,),
    tangents=(),
    held=(2,),
)
MEASURED = {
    '["first"]': OperatorMemory(rise_bytes=8 * MIB, written_bytes=8 * MIB, retained_bytes=0, retained_mapped_bytes=0),
    '["second"]': OperatorMemory(rise_bytes=2 * MIB, written_bytes=2 * MIB, retained_bytes=0, retained_mapped_bytes=0),
}


def program(*instructions: Instruction) -> Program:
    return Program(graph_digest="", forward=instructions or (Compute(0), Compute(1), Free(1)), backward=())


def peak(
    measured: dict[str, OperatorMemory] = MEASURED,
    *,
    graph: Graph = GRAPH,
    workspaces: tuple[int, ...] = (0, 0),
    optimizer: OptimizerMemory | None = None,
    planned: bool = False,
    runtime: RuntimeMemory = NO_RUNTIME,
) -> process.ProcessPeak:
    return process_peak(
        graph,
        program(),
        workspace_bytes=workspaces,
        optimizer=optimizer,
        planned=planned,
        operators=measured,
        runtime=runtime,
    )


def with_first(**sizes: int) -> dict[str, OperatorMemory]:
    return {**MEASURED, '["first"]': dataclasses.replace(MEASURED['["first"]'], **sizes)}


def test_without_more_the_process_takes_its_tensors_and_a_page_for_each() -> None:
    found = peak()
    assert found.peak_bytes == 14 * MIB + 3 * PAGE
    assert found.parts == {"tensors": 14 * MIB + 3 * PAGE, "libraries": 0, "heap": 0, "runtime": 0}


def test_what_a_library_takes_while_an_operator_runs_counts_at_that_operator() -> None:
    assert peak(with_first(rise_bytes=9 * MIB)).peak_bytes == peak().peak_bytes  # the other is higher
    found = peak(with_first(rise_bytes=30 * MIB))
    assert found.parts["libraries"] == 22 * MIB
    assert found.peak_bytes == 34 * MIB + 2 * PAGE


def test_a_workspace_of_torch_is_not_counted_twice() -> None:
    found = peak(with_first(rise_bytes=30 * MIB), workspaces=(20 * MIB, 0))
    assert found.parts["tensors"] == 32 * MIB + 2 * PAGE
    assert found.parts["libraries"] == 2 * MIB


def test_a_workspace_that_nobody_writes_to_is_not_in_memory() -> None:
    assert peak(workspaces=(20 * MIB, 0)).peak_bytes == peak().peak_bytes


def test_results_that_are_not_written_are_not_in_memory() -> None:
    assert peak(with_first(written_bytes=5 * MIB, rise_bytes=5 * MIB)).peak_bytes == peak().peak_bytes - 3 * MIB


def test_what_libraries_keep_counts_all_along() -> None:
    found = peak(with_first(retained_bytes=3 * MIB, retained_mapped_bytes=9 * MIB))
    assert found.parts["libraries"] == 3 * MIB
    assert found.mapped_bytes == peak().mapped_bytes + 9 * MIB


def test_an_operator_that_was_not_measured_counts_with_an_upper_bound() -> None:
    found = peak({})
    assert found.peak_bytes == 14 * MIB + 3 * PAGE + 10 * MIB  # reads 8 MiB and makes 2
    assert found.parts["libraries"] == 10 * MIB


def test_compiled_kernels_take_all_memory_from_torch() -> None:
    compiled = [dataclasses.replace(each, target="memfit.stretch:0123") for each in GRAPH.operations]
    assert peak({}, graph=dataclasses.replace(GRAPH, operations=tuple(compiled))).parts["libraries"] == 0


def test_small_blocks_stay_in_the_heap() -> None:
    small = tuple(dataclasses.replace(each, size_bytes=1000) for each in GRAPH.storages)
    found = peak({}, graph=dataclasses.replace(GRAPH, storages=small))
    assert found.parts["heap"] == 3 * 1080
    assert found.parts["tensors"] == 0


def test_the_optimizer_has_its_moment() -> None:
    found = peak(optimizer=OptimizerMemory(state_bytes=MIB, workspace_bytes=50 * MIB))
    assert found.parts["tensors"] == (4 + 2 + 1 + 50) * MIB + 2 * PAGE


def test_the_runtime_of_a_plan_grows_with_its_graph() -> None:
    assert peak(runtime=RUNTIME).parts["runtime"] == 20 * MIB
    assert peak(runtime=RUNTIME, planned=True).parts["runtime"] == 30 * MIB + 2 * 1000


def test_pages_that_nobody_writes_to_are_mapped() -> None:
    unwritten = with_first(written_bytes=0, rise_bytes=0)
    assert peak(unwritten).peak_bytes < peak().peak_bytes
    assert peak(unwritten).mapped_bytes == peak().mapped_bytes == peak().peak_bytes
    assert peak(workspaces=(20 * MIB, 0)).mapped_bytes == 32 * MIB + 2 * PAGE


def test_the_runtime_is_mapped_in_another_measure() -> None:
    assert peak(runtime=RUNTIME).mapped_bytes == peak().mapped_bytes + 5 * MIB
    assert peak(runtime=RUNTIME, planned=True).mapped_bytes == peak().mapped_bytes + 7 * MIB + 2 * 1000


def test_signatures_are_those_of_a_program_once_each() -> None:
    assert signatures_of(GRAPH, program(Compute(1), Compute(0), Free(1), Compute(1))) == ['["second"]', '["first"]']


def test_only_a_process_with_its_tensors_in_it_can_be_measured(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert not can_be_measured("cuda:0")
    monkeypatch.setattr(process, "HIGH_WATER_RESET", tmp_path / "nothing")
    assert not can_be_measured("cpu")


class Children:
    """Stands for child processes: it knows what each would print."""

    def __init__(self, *outputs: str) -> None:
        self.outputs = list(outputs)
        self.inputs: list[str] = []

    def __call__(self, _command: list[str], *, input: str, **_: object) -> subprocess.CompletedProcess[str]:
        self.inputs.append(input)
        return subprocess.CompletedProcess([], 0, stdout=self.outputs.pop(0), stderr="")


LINE = '{"rise_bytes": 3, "written_bytes": 2, "retained_bytes": 1, "retained_mapped_bytes": 4}\n'
FOUND = OperatorMemory(rise_bytes=3, written_bytes=2, retained_bytes=1, retained_mapped_bytes=4)


def test_one_child_measures_many_and_a_later_call_none(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    children = Children(2 * LINE)
    monkeypatch.setattr(subprocess, "run", children)
    cache = ProcessCache(tmp_path)
    assert operator_memory(["a", "b", "a"], cache=cache) == {"a": FOUND, "b": FOUND}
    assert operator_memory(["b"], cache=cache) == {"b": FOUND}
    assert children.inputs == ['["a", "b"]']


def test_a_child_that_dies_of_one_leaves_the_rest_to_the_next(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    children = Children(LINE + '{"rise_by', LINE)
    monkeypatch.setattr(subprocess, "run", children)
    assert operator_memory(["a", "b", "c"], cache=ProcessCache(tmp_path)) == {"a": FOUND, "c": FOUND}
    assert children.inputs == ['["a", "b", "c"]', '["c"]']


def test_what_fails_is_absent(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(subprocess, "run", Children('{"failure": "MemoryError: too big"}\n' + LINE))
    assert operator_memory(["a", "b"], cache=ProcessCache(tmp_path)) == {"b": FOUND}


def test_compiled_kernels_are_not_probed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(subprocess, "run", Children())
    assert operator_memory(['["memfit.stretch:01",[],{}]'], cache=ProcessCache(tmp_path)) == {}


def test_the_runtime_is_measured_once(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(subprocess, "run", Children(json.dumps(dataclasses.asdict(RUNTIME))))
    cache = ProcessCache(tmp_path)
    assert runtime_memory(cache=cache) == runtime_memory(cache=cache) == RUNTIME


def test_a_runtime_that_cannot_be_measured_is_an_error(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(subprocess, "run", Children(""))
    with pytest.raises(RuntimeError, match=r"python -m memfit\.runtime_probe"):
        runtime_memory(cache=ProcessCache(tmp_path))


def test_what_is_saved_is_added(tmp_path: Path) -> None:
    cache = ProcessCache(tmp_path)
    assert cache.load() == KnownMemory()
    cache.save(KnownMemory(operators={"a": FOUND}))
    cache.save(KnownMemory(runtime=RUNTIME))
    assert cache.load() == KnownMemory(operators={"a": FOUND}, runtime=RUNTIME)


@pytest.mark.parametrize(
    "text",
    ["", "[]", "null", '{"format": "memfit.process", "version": 0}', '{"format": "memfit.process", "version": 1}'],
)
def test_a_damaged_file_is_measured_again(text: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    cache = ProcessCache(tmp_path)
    cache.path.parent.mkdir()
    cache.path.write_text(text)
    assert cache.load() == KnownMemory()
    assert "damaged" in caplog.text


def test_a_size_that_was_not_measured_is_not_believed(tmp_path: Path) -> None:
    cache = ProcessCache(tmp_path)
    cache.save(KnownMemory(operators={"a": dataclasses.replace(FOUND, rise_bytes=7777777)}))
    cache.path.write_text(cache.path.read_text().replace("7777777", "8777777"))
    assert cache.load() == KnownMemory()


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_real_operators_in_a_real_child(tmp_path: Path) -> None:
    image = torch.empty(4, 16, 256, 256)  # 16 MiB
    relu = encode(torch.ops.aten.relu.default, [image], {})
    unwritten = encode(torch.ops.aten.empty_like.default, [image], {})
    found = operator_memory([relu, unwritten, '["aten.nonsense.default",[],{}]'], cache=ProcessCache(tmp_path))
    assert set(found) == {relu, unwritten}
    assert abs(found[relu].rise_bytes - 16 * MIB) < MIB
    assert abs(found[relu].written_bytes - 16 * MIB) < MIB
    assert found[unwritten].rise_bytes < MIB
    assert found[unwritten].written_bytes < MIB
