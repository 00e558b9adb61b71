"""The peak of the process rather than of its tensors: what has to fit where a limit is set on a process.

Note [Beyond the tensors]
    A process takes more than torch allocates, and in one respect less. More: buffers of libraries while an operator
    runs, what they keep for its next call, code pages, the objects of Python and autograd, captured graphs, the last
    page of every mapping, and the holes of malloc's heap. Less: pages of a tensor that nobody writes to.
    Operators and the runtime are measured in processes of their own (`measure/process_probe.py`,
    `runtime_probe.py`), so that the measuring process does not grow, and remembered on disk.

Note [Never too little]
    An operator that could not be probed counts with an upper bound: as much again as it reads and makes, which is what
    a library takes that reorders every argument. Kernels that were compiled for this process cannot be probed in
    another; they take all memory from torch, so nothing is added for them.

Note [Mapped bytes]
    `RLIMIT_DATA` counts what a process has mapped for itself: pages that nobody writes to and the stacks of threads
    count, code of libraries does not. oneDNN maps a megabyte for the code of many a primitive, and fills a little of
    it. A cgroup counts what is in memory. So there are two figures of one process.

Note [Holes of the heap]
    With malloc as it comes a process takes a sixth to two thirds more, and not the same in two runs of one step. A
    model of glibc's heap (best fit, coalescing, the adapting threshold, 64-byte alignment), walked with the sizes of a
    step, was 10 to 20% too low on three of five models. So nothing is predicted for that; `release_freed_memory` does
    away with the holes.
"""

import dataclasses
import json
import logging
import subprocess
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from memfit.files import cache_folder, read_checked, write_checked
from memfit.ir import (
    GENERATOR_STATE_BYTES,
    Compute,
    Graph,
    Instruction,
    LossMemory,
    Operation,
    OptimizerMemory,
    Program,
)
from memfit.measure.probe import device_name
from memfit.measure.process_status import HIGH_WATER_RESET
from memfit.ops.stretch import PREFIX as COMPILED

log = logging.getLogger(__name__)

_LABEL = '{"format": "memfit.process", "version": 2} '
_OPERATORS, _RUNTIME = "memfit.measure.process_probe", "memfit.runtime_probe"  # what children run
_MOST_CHILDREN = 4  # for one list of signatures: a child that is killed leaves the rest to the next
_PAGE_BYTES = 4096
_HEADER_BYTES = 80  # of malloc beside a block that is aligned to 64 bytes
_OWN_PAGES_BYTES = 128 * 2**10  # bigger blocks have a mapping of their own, see Note [Fragmented heap] in `malloc.py`


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class OperatorMemory:
    """Hold what a call of an operator takes of the process, see Note [Cold and warm] in `process_probe.py`."""

    rise_bytes: int  # how far the process rises while it runs
    written_bytes: int  # of its results
    retained_bytes: int  # by libraries, after the first call
    retained_mapped_bytes: int  # the same as mapped, see Note [Mapped bytes]


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class RuntimeMemory:
    """Hold what the first steps of any model leave in a process: code pages, threads, objects."""

    eager_bytes: int
    planned_bytes: int  # the same of a model that runs by a plan
    operation_bytes: int  # for every operation of a captured graph
    eager_mapped_bytes: int  # the same as mapped, see Note [Mapped bytes]
    planned_mapped_bytes: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class ProcessPeak:
    """Predict a process beyond what it had before the model was built."""

    peak_bytes: int  # in memory
    parts: Mapping[str, int]  # of the peak: "tensors", "libraries", "heap", "runtime"
    mapped_bytes: int  # what `RLIMIT_DATA` has to leave, see Note [Mapped bytes]


def process_peak(
    graph: Graph,
    program: Program,
    *,
    workspace_bytes: Sequence[int],
    optimizer: OptimizerMemory | None = None,
    loss: LossMemory | None = None,
    planned: bool,
    operators: Mapping[str, OperatorMemory] | None = None,
    runtime: RuntimeMemory | None = None,
) -> ProcessPeak:
    """Predict the peak of a process that trains by `program` on a CPU and returns freed memory at once.

    The process is one that called `release_freed_memory`; otherwise the holes of malloc's heap come on top.
    `workspace_bytes` is by operation, then by alternative. `planned` says whether the program is a plan's, whose
    captured graph is in memory too, or that of the eager run. `operators` and `runtime` are measured if they are not
    given. Ask `can_be_measured` first.
    """
    operators = operator_memory(signatures_of(graph, program)) if operators is None else operators
    runtime = runtime_memory() if runtime is None else runtime
    optimizer = optimizer or OptimizerMemory()
    called = [operators[signature] for signature in signatures_of(graph, program) if signature in operators]
    captured_bytes = (len(graph.operations) + len(graph.alternatives)) * runtime.operation_bytes if planned else 0
    written = _Walk(graph, operators, workspace_bytes, mapped=False).step(program, optimizer, loss)
    mapped = _Walk(graph, operators, workspace_bytes, mapped=True).step(program, optimizer, loss)
    parts = {
        "tensors": written.tensor_bytes,
        "libraries": written.library_bytes + sum(each.retained_bytes for each in called),
        "heap": written.heap_bytes,
        "runtime": captured_bytes + (runtime.planned_bytes if planned else runtime.eager_bytes),
    }
    own_bytes = sum(each.retained_mapped_bytes for each in called) + captured_bytes
    own_bytes += runtime.planned_mapped_bytes if planned else runtime.eager_mapped_bytes
    return ProcessPeak(
        peak_bytes=sum(parts.values()),
        parts=parts,
        mapped_bytes=mapped.tensor_bytes + mapped.library_bytes + mapped.heap_bytes + own_bytes,
    )


def can_be_measured(device: str) -> bool:
    """Return whether a process can be measured for `device`: its tensors are in it, and the kernel tells its peak."""
    return torch.device(device).type == "cpu" and HIGH_WATER_RESET.exists()


def signatures_of(graph: Graph, program: Program) -> list[str]:
    """List the distinct operator calls of a program, in order."""
    runs = (each.operation for each in (*program.forward, *program.backward) if isinstance(each, Compute))
    return list(dict.fromkeys(signature for run in runs if (signature := graph.operation(run).signature)))


class _Walk:
    """A step that is walked to its peak, with the pages that are in memory or with all that are mapped."""

    def __init__(
        self, graph: Graph, operators: Mapping[str, OperatorMemory], workspaces: Sequence[int], *, mapped: bool
    ) -> None:
        self.tensor_bytes = self.library_bytes = self.heap_bytes = 0  # at the peak
        self._graph, self._operators, self._workspaces, self._mapped = graph, operators, workspaces, mapped
        self._resident = [each.size_bytes for each in graph.storages]
        self._big_bytes = self._small_bytes = self._most_small_bytes = 0
        for operation in () if mapped else (*graph.alternatives, *graph.operations):
            self._leave_out_unwritten(operation)

    def step(self, program: Program, optimizer: OptimizerMemory, loss: LossMemory | None) -> "_Walk":
        for storage in self._graph.resident:
            self._allocate(storage)
        runs = [each.operation for each in (*program.forward, *program.backward) if isinstance(each, Compute)]
        again = sum(1 for run in set(runs) if self._graph.operation(run).random and runs.count(run) > 1)
        self._small_bytes += again * GENERATOR_STATE_BYTES
        self._big_bytes += optimizer.state_bytes + (0 if loss is None else loss.batch_bytes)
        self._look(0, 0)
        self._run(program.forward)
        if loss is not None:
            self._look(loss.working_bytes, 0)
            for storage in self._graph.returned_alone:
                self._free(storage)
            self._big_bytes += loss.lasting_bytes
        for storage in self._graph.tangents:
            self._allocate(storage)
        self._run(program.backward)
        self._look(optimizer.workspace_bytes, 0)
        self.heap_bytes += self._most_small_bytes  # freed small blocks stay in the heap
        return self

    def _run(self, instructions: Sequence[Instruction]) -> None:
        for instruction in instructions:
            if not isinstance(instruction, Compute):
                self._free(instruction.storage)
                continue
            operation = self._graph.operation(instruction.operation)
            if instruction.in_place and operation.may_overwrite is not None:
                self._free(operation.may_overwrite)
            for storage in operation.outputs:
                self._allocate(storage)
            self._look(*self._inside(operation, self._workspaces[instruction.operation]))

    def _inside(self, operation: Operation, workspace_bytes: int) -> tuple[int, int]:
        """Return what an operator takes beside its results: from torch, and from the system by itself."""
        if not operation.signature or operation.target.startswith(COMPILED):
            return workspace_bytes, 0
        memory = self._operators.get(operation.signature)
        made_bytes = sum(self._resident[index] for index in operation.outputs)
        if memory is None:  # see Note [Never too little]
            return workspace_bytes, made_bytes + sum(self._resident[index] for index in operation.inputs)
        inside_bytes = max(0, memory.rise_bytes - made_bytes)
        in_memory_bytes = workspace_bytes if self._mapped else min(inside_bytes, workspace_bytes)
        return in_memory_bytes, max(0, inside_bytes - workspace_bytes)

    def _look(self, workspace_bytes: int, library_bytes: int) -> None:
        """Remember the highest moment."""
        self._most_small_bytes = max(self._most_small_bytes, self._small_bytes)
        if self._big_bytes + workspace_bytes + library_bytes > self.tensor_bytes + self.library_bytes:
            self.tensor_bytes, self.library_bytes = self._big_bytes + workspace_bytes, library_bytes

    def _leave_out_unwritten(self, operation: Operation) -> None:
        """Take pages that an operator does not write to off the biggest of its results."""
        memory = self._operators.get(operation.signature)
        if memory is None or not operation.outputs:
            return
        sizes_bytes = sum(self._graph.storages[index].size_bytes for index in operation.outputs)
        biggest = max(operation.outputs, key=lambda index: self._graph.storages[index].size_bytes)
        missing_bytes = max(0, sizes_bytes - memory.written_bytes)
        if missing_bytes >= _OWN_PAGES_BYTES:
            size_bytes = self._graph.storages[biggest].size_bytes
            self._resident[biggest] = max(0, size_bytes - missing_bytes)

    def _allocate(self, storage: int) -> None:
        self._add(storage, 1)

    def _free(self, storage: int) -> None:
        self._add(storage, -1)

    def _add(self, storage: int, sign: int) -> None:
        size_bytes = self._resident[storage]
        if self._graph.storages[storage].size_bytes >= _OWN_PAGES_BYTES:
            self._big_bytes += sign * -(-(size_bytes + _HEADER_BYTES) // _PAGE_BYTES) * _PAGE_BYTES
        else:
            self._small_bytes += sign * (size_bytes + _HEADER_BYTES)


def operator_memory(signatures: Iterable[str], *, cache: "ProcessCache | None" = None) -> dict[str, OperatorMemory]:
    """Return what every signature takes of a process; those that cannot be run are absent.

    What is not known from the disk is measured in a child process, all of it in one unless that is killed.
    """
    cache = cache or ProcessCache()
    known = cache.load().operators
    wanted = [each for each in dict.fromkeys(signatures) if not each.startswith(f'["{COMPILED}')]
    missing = [each for each in wanted if each not in known]
    fresh: dict[str, OperatorMemory] = {}
    failed: dict[str, str] = {}
    for _ in range(_MOST_CHILDREN):
        left = [each for each in missing if each not in fresh and each not in failed]
        if not left:
            break
        _probe(left, fresh, failed)
    for signature, reason in failed.items():
        log.info("the process memory of an operator is not measured (%s): %s", reason, signature[:80])
    if fresh:
        cache.save(KnownMemory(operators=fresh))
    known = {**known, **fresh}
    return {each: known[each] for each in wanted if each in known}


def _probe(signatures: Sequence[str], fresh: dict[str, OperatorMemory], failed: dict[str, str]) -> None:
    """Probe in one child until all are done or it dies of one."""
    lines = _child_lines(_OPERATORS, json.dumps(signatures))
    for signature, line in zip(signatures, lines, strict=False):
        if "failure" in line:
            failed[signature] = line["failure"]
        else:
            fresh[signature] = OperatorMemory(**line)
    if len(lines) < len(signatures):
        failed[signatures[len(lines)]] = "the process that measured it ended"


def runtime_memory(*, cache: "ProcessCache | None" = None) -> RuntimeMemory:
    """Return what the runtime takes, measured once in a child process."""
    cache = cache or ProcessCache()
    known = cache.load().runtime
    if known is not None:
        return known
    lines = _child_lines(_RUNTIME, "")
    if not lines:
        raise RuntimeError(f"{_RUNTIME} ended without a result; run `python -m {_RUNTIME}` to see why")
    found = RuntimeMemory(**lines[-1])
    cache.save(KnownMemory(runtime=found))
    return found


def _child_lines(module: str, text: str) -> list[dict[str, Any]]:
    """Run a module in a child process and return the JSON lines that it wrote before its end."""
    command = [sys.executable, "-W", "ignore", "-m", module]
    done = subprocess.run(command, input=text, capture_output=True, text=True, check=False)
    if done.returncode:
        log.info("%s ended with code %d: %s", module, done.returncode, done.stderr[-500:])
    lines = []
    for line in done.stdout.splitlines():
        try:
            lines.append(json.loads(line))
        except ValueError:  # cut off in the middle
            break
    return lines


@dataclasses.dataclass(frozen=True, kw_only=True)
class KnownMemory:
    """Hold what is known of processes on a machine."""

    operators: Mapping[str, OperatorMemory] = dataclasses.field(default_factory=dict)
    runtime: RuntimeMemory | None = None


class ProcessCache:
    """Keep measurements, in one file per processor, torch version and number of threads.

    A file that is not what was written is not an error: it is measured again and replaced.
    """

    def __init__(self, folder: Path | None = None) -> None:
        words = (device_name("cpu"), f"torch-{torch.__version__}", f"{torch.get_num_threads()}-threads")
        self.path = (folder or cache_folder()) / "process" / f"{'_'.join(words)}.json"

    def load(self) -> KnownMemory:
        content = read_checked(self.path, label=_LABEL)
        if content is None:
            return KnownMemory()
        runtime = content["runtime"]
        return KnownMemory(
            operators={name: OperatorMemory(**fields) for name, fields in content["operators"].items()},
            runtime=None if runtime is None else RuntimeMemory(**runtime),
        )

    def save(self, fresh: KnownMemory) -> None:
        """Add to what is on disk. Of two processes that save at once, one may have to measure again."""
        known = self.load()
        operators = {**known.operators, **fresh.operators}
        runtime = fresh.runtime or known.runtime
        content = {
            "runtime": None if runtime is None else dataclasses.asdict(runtime),
            "operators": {name: dataclasses.asdict(operators[name]) for name in sorted(operators)},
        }
        try:
            write_checked(self.path, content, label=_LABEL)
        except OSError as error:
            log.warning("the cache of process memory could not be written (%s)", error)
