"""Run every distinct operator call once, alone, to learn its workspace, real outputs and time.

Note [Cold operators]
    An operator timed in a loop finds its inputs in the cache, which it would not inside a
    training step. Between two runs the cache is filled with something else.

Note [Room]
    A probe makes what its operator reads, once for all arguments of a dtype where nothing is written into them, and
    runs it. That must fit the room there is, with what the operator makes and a workspace that is guessed: the largest
    share that calls of the same kind took of what they read and made, all of it before one was seen. Kinds tell apart
    the numbers an operator is given: a convolution of as many groups as channels may take a hundred times what it
    reads, one without groups takes about that. So small calls come first. What does not fit is run on fewer rows, twice
    where that can be done: what more rows took more tells what all of them would take, and whether that fits. If not,
    it is not run: its workspace is that guess, and is marked as a bound.
"""

import itertools
import logging
import math
import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch

from memfit import _torch
from memfit._memory_events import MemoryRecorder, set_mark
from memfit.accelerator import (
    MemoryWatch,
    generators_kept,
    is_accelerator,
    name_of_device,
    synchronize,
    without_autocast,
)
from memfit.errors import first_line
from memfit.files import hash_of
from memfit.measure import signature as signatures
from memfit.measure.available import available
from memfit.measure.cost import CostCache, OperatorCost
from memfit.ops.calls import faithful_call
from memfit.ops.registry import is_lean_function
from memfit.tensors import storage_key, tensors_in

log = logging.getLogger(__name__)

_TIMED_RUNS = 3
_CACHE_FILLER_BYTES = 64 * 2**20
_LARGEST_SHARE = 0.5  # of the memory that is free: a probe never takes more
_UNKNOWN_SHARE = 1.0  # of what a call reads and makes: its workspace, if no call of its operator was seen
_LEAN_SHARE = 0.3  # the same of lean operators, which work chunk by chunk
_WITH_WORKSPACES = (  # parts of names of torch's operators that may allocate much beside what they return
    "attention",
    "conv",
    "fft",
    "gru",
    "index",
    "linalg",
    "lstm",
    "mm",
    "rnn",
    "scatter",
    "sort",
    "topk",
    "unique",
)
_FEWER = (8, 4)  # times as few rows have calls that are run to learn about one that does not fit
_BATCH = 32  # probes in one recording
_END = "end"

Progress = Callable[[int, int], None]  # done, total


def measured_costs(
    wanted: Iterable[str],
    *,
    device: str,
    timed: bool = False,
    cache: CostCache | None = None,
    progress: Progress | None = None,
    room_bytes: int | None = None,
    made_bytes: Mapping[str, int] | None = None,
) -> dict[str, OperatorCost]:
    """Return the cost of every signature that can be run here; the others are absent.

    Known costs come from the cache on disk, new ones are added to it, also when interrupted. No probe takes more than
    `room_bytes`, see Note [Room]; `made_bytes` are the sizes of what calls make, as far as they are known.
    """
    cache = cache or CostCache(device_name(device))
    known = cache.load()
    wanted = list(dict.fromkeys(wanted))
    missing = [each for each in wanted if each not in known or (timed and known[each].time_us is None)]
    room = _Room(_room_bytes(device, room_bytes), made_bytes or {})
    for signature in wanted:
        if signature in known:
            room.learn(signature, known[signature])
    missing.sort(key=room.call_bytes)
    fresh: dict[str, OperatorCost] = {}
    try:
        too_big = _probe_all(missing, room, fresh, progress, timed=timed)
    finally:
        if fresh:
            cache.save(fresh)
    costs = {each: cost for each in wanted if (cost := fresh.get(each) or known.get(each)) is not None}
    return costs | {each: room.bounded(each) for each in too_big}


def _probe_all(
    missing: Sequence[str], room: "_Room", fresh: dict[str, OperatorCost], progress: Progress | None, *, timed: bool
) -> list[str]:
    """Run all calls that fit, into `fresh`; what does not fit, or ran out of memory, is returned."""
    too_big: list[str] = []
    waiting = list(missing)
    while waiting:
        batch = list(itertools.islice(filter(room.fits, waiting), _BATCH))
        if not batch and not _learn_from_smaller(waiting, room):
            break
        done = len(missing) - len(waiting)
        tell = None if progress is None else lambda more, done=done: progress(done + more, len(missing))
        too_big += _probe_batch(batch, room, fresh, tell, timed=timed)
        begun = set(batch)
        waiting = [each for each in waiting if each not in begun]
    return too_big + waiting


def _learn_from_smaller(too_big: Sequence[str], room: "_Room") -> bool:
    """Run calls that do not fit on fewer rows, as far as that was not tried; whether something was tried."""
    new = [each for each in too_big if room.begin_to_learn(each)]
    for signature in new:
        seen: dict[str, OperatorCost] = {}
        for times in _FEWER:
            smaller = signatures.with_fewer_rows(signature, times)
            if smaller is not None and smaller not in seen and room.fits(smaller):
                _probe_batch([smaller], _Room(0, {}), seen, None, timed=False)
        room.learn_of_fewer(signature, seen)
    return bool(new)


def _room_bytes(device: str, room_bytes: int | None) -> int:
    free_bytes = int(_LARGEST_SHARE * available(device).free_bytes)
    return free_bytes if room_bytes is None else min(room_bytes, free_bytes)


class _Room:
    """How much a probe may take, and what operators of its kind were seen to take, see Note [Room]."""

    def __init__(self, room_bytes: int, made_bytes: Mapping[str, int]) -> None:
        self._room_bytes = room_bytes
        self._made_bytes = made_bytes
        self._tried: set[str] = set()  # calls that do not fit, and were run on fewer rows if they can be
        self._expected: dict[str, int] = {}  # by call: what it would take, by what it took on fewer rows
        self._shares: dict[str, float] = {}  # by kind, and by operator: the largest workspace to what is read and made

    def call_bytes(self, signature: str) -> int:
        """Return what a call reads and makes."""
        return sum(signatures.argument_bytes(signature)) + self._made_bytes.get(signature, 0)

    def learn(self, signature: str, cost: OperatorCost) -> None:
        call_bytes = sum(signatures.argument_bytes(signature)) + sum(cost.output_bytes)
        share = cost.workspace_bytes / max(1, call_bytes)
        for key in (signatures.kind(signature), signatures.operator_name(signature)):
            self._shares[key] = max(share, self._shares.get(key, 0.0))

    def begin_to_learn(self, signature: str) -> bool:
        """Return whether a call on fewer rows may tell more of one that does not fit, and was not run yet."""
        is_new = signature not in self._tried
        self._tried.add(signature)
        return is_new

    def learn_of_fewer(self, signature: str, seen: Mapping[str, OperatorCost]) -> None:
        """Expect of a call what it took on fewer rows: as much more as one of these took more than another."""
        taken = sorted((signatures.rows(each), cost.workspace_bytes) for each, cost in seen.items())
        if not taken:
            return
        if signatures.kind(signature) not in self._shares:
            for each, cost in seen.items():
                self.learn(each, cost)
        (fewest, least_bytes), (most, most_bytes) = (0, 0) if len(taken) == 1 else taken[0], taken[-1]
        a_row_bytes = max(0.0, (most_bytes - least_bytes) / (most - fewest))
        self._expected[signature] = most_bytes + math.ceil(a_row_bytes * (signatures.rows(signature) - most))

    def guess_bytes(self, signature: str) -> int:
        """A workspace that is expected of a call before it runs."""
        return self._likely_bytes(signature, _unknown_share(signatures.operator_name(signature)))

    def bound_bytes(self, signature: str) -> int:
        """A workspace that is not expected to be exceeded by a call that does not run."""
        return self._likely_bytes(signature, _UNKNOWN_SHARE)

    def _likely_bytes(self, signature: str, unknown: float) -> int:
        """Return what fewer rows tell, else the share of its kind, of its operator, or of an unknown one."""
        if signature in self._expected:
            return self._expected[signature]
        by_operator = self._shares.get(signatures.operator_name(signature), unknown)
        return int(self._shares.get(signatures.kind(signature), by_operator) * self.call_bytes(signature))

    def bounded(self, signature: str) -> OperatorCost:
        """The cost of a call that is not run."""
        log.info("too big to run here, its workspace is bounded from above: %s", signature[:80])
        return OperatorCost(workspace_bytes=self.bound_bytes(signature), output_bytes=(), is_bound=True)

    def fits(self, signature: str) -> bool:
        made_bytes = self._made_bytes.get(signature, sum(signatures.argument_bytes(signature)))
        read_bytes = signatures.decoded_bytes(signature)
        return read_bytes + made_bytes + self.guess_bytes(signature) <= self._room_bytes


def _unknown_share(name: str) -> float:
    """Return how much of what a call reads and makes its workspace may be, before a call of the operator was seen."""
    if name.startswith("aten.") and not any(part in name for part in _WITH_WORKSPACES):
        return 0.0
    return _LEAN_SHARE if is_lean_function(signatures.known_operator(name)) else _UNKNOWN_SHARE


def _probe_batch(
    batch: Sequence[str],
    room: _Room,
    fresh: dict[str, OperatorCost],
    tell: Callable[[int], None] | None,
    *,
    timed: bool,
) -> list[str]:
    """Run some calls in one recording of the allocator; starting one takes longer than most operators do."""
    recorder = MemoryRecorder() if MemoryRecorder.is_free() else None
    if recorder is None:
        log.warning("operators are not measured while another profiler is running; what they allocate is not known")
    probes = [_Probe(signature, number) for number, signature in enumerate(batch)]
    if recorder is not None:
        recorder.start()
    try:
        for number, probe in enumerate(probes, start=1):
            probe.run(timed=timed)
            if tell is not None:
                tell(number)
    finally:
        rises = {} if recorder is None else _rises(recorder.stop())
        for probe in probes:
            cost = probe.cost(rises)
            if cost is not None:
                fresh[probe.signature] = cost
                room.learn(probe.signature, cost)
    return [probe.signature for probe in probes if probe.ran_out]


def _rises(events: Iterable[tuple[str, int]]) -> dict[int, int]:
    """Return how far the live bytes rise while each probe runs, by its number."""
    rises: dict[int, int] = {}
    number, live_bytes = -1, 0
    for label, change_bytes in events:
        if label:
            number, live_bytes = (int(label), 0) if label != _END else (-1, 0)
            rises.setdefault(number, 0)
        elif number >= 0:
            live_bytes += change_bytes
            rises[number] = max(rises.get(number, 0), live_bytes)
    return rises


def kernel_settings() -> list[Any]:
    """Return what users set in torch, and what is installed, that decides which kernels run."""
    backends: Any = torch.backends
    cudnn, cuda, mkldnn = backends.cudnn, backends.cuda, backends.mkldnn
    return [
        torch.are_deterministic_algorithms_enabled(),
        mkldnn.enabled,
        [cudnn.enabled, cudnn.benchmark, cudnn.deterministic, cudnn.version()],
        [each.fp32_precision for each in (backends, cuda.matmul, cudnn.conv, cudnn.rnn)],
        [each.fp32_precision for each in (mkldnn.matmul, mkldnn.conv, mkldnn.rnn)],
        [cuda.matmul.allow_fp16_reduced_precision_reduction, cuda.matmul.allow_bf16_reduced_precision_reduction],
        [*_torch.attention_settings()],
    ]


def device_name(device: str) -> str:
    """The name of the hardware, as costs are remembered by, and what decides which kernels an accelerator runs."""
    if is_accelerator(device):
        return f"{name_of_device(device)}-{hash_of(kernel_settings())[:8]}"
    return f"cpu-{torch.backends.cpu.get_cpu_capability()}"


class _Probe:
    """One call, run alone."""

    def __init__(self, signature: str, number: int) -> None:
        self.signature = signature
        self.ran_out = False  # of memory
        self._number = number
        self._devices = [device for device in signatures.devices(signature) if is_accelerator(device)]
        self._output_bytes: tuple[int, ...] | None = None
        self._rise_bytes: int | None = None  # on an accelerator
        self._time_us: float | None = None

    def run(self, *, timed: bool) -> None:
        try:
            # As it runs in a captured graph, whatever the caller is in the middle of.
            with (
                _torch.no_modes(),
                generators_kept(self._devices),
                torch.no_grad(),
                without_autocast(),
            ):
                operator, args, kwargs = signatures.decode(self.signature, shares_memory=not timed)
                args = _PREPARATIONS.get(str(operator), _as_they_are)(args)
                self._measure(faithful_call(operator), args, kwargs, timed=timed)
        except Exception as error:  # an operator may reject made-up values; its cost then stays unknown
            self.ran_out = isinstance(error, MemoryError) or "memory" in str(error)
            log.info("not measured (%s: %s): %s", type(error).__name__, first_line(error), self.signature[:80])

    def _measure(self, operator: Any, args: list[Any], kwargs: dict[str, Any], *, timed: bool) -> None:
        results: list[Any] = []
        if self._devices:
            operator(*args, **kwargs)  # the first call may prepare something once; on a CPU not in torch's memory
            watch = MemoryWatch(self._devices[0], requested=True)
            results.append(operator(*args, **kwargs))
            self._rise_bytes = watch.rise_bytes()
        else:
            set_mark(str(self._number))
            results.append(operator(*args, **kwargs))
            set_mark(_END)
        self._output_bytes = tuple(_fresh_bytes(results.pop(), (args, kwargs), on_accelerator=bool(self._devices)))
        if timed:
            self._time_us = _time_us(lambda: operator(*args, **kwargs), self._devices)

    def cost(self, rises: Mapping[int, int]) -> OperatorCost | None:
        """Return what was seen; None if it did not run."""
        if self._output_bytes is None:
            return None
        rise_bytes = rises.get(self._number) if self._rise_bytes is None else self._rise_bytes
        if rise_bytes is None:
            return None
        return OperatorCost(
            workspace_bytes=max(0, rise_bytes - sum(self._output_bytes)),
            output_bytes=self._output_bytes,
            time_us=self._time_us,
        )


def _as_they_are(args: list[Any]) -> list[Any]:
    if any(tensor.dtype is torch.uint8 and not tensor.numel() for tensor in tensors_in(args)):
        raise ValueError("an opaque argument whose real size is not known")  # calling could crash
    return args


def _with_rnn_workspace(args: list[Any]) -> list[Any]:
    """The last argument is opaque, comes from the forward operator, and has size 0 in a trace."""
    reverse, mode, hidden_size, layers, has_biases, train, bidirectional, batch_sizes, batch_first = args[13:22]
    flags = (reverse, batch_sizes, mode, hidden_size, layers, has_biases, bidirectional, batch_first, train)
    layer = faithful_call(torch.ops.aten.mkldnn_rnn_layer.default)
    return [*args[:-1], layer(*args[:7], *flags)[3]]


def _with_reserve(args: list[Any]) -> list[Any]:
    """The last argument comes from the forward operator: empty for most layouts, and opaque for the others."""
    images, _, weight, _, _, _, _, eps, _ = args
    forward = torch.ops.aten.cudnn_batch_norm.default
    return [*args[:-1], forward(images, weight, torch.zeros_like(weight), None, None, True, 0.1, eps)[3]]


_PREPARATIONS = {
    "aten.mkldnn_rnn_layer_backward.default": _with_rnn_workspace,
    "aten.cudnn_batch_norm_backward.default": _with_reserve,
}


def _time_us(run: Callable[[], Any], devices: Sequence[torch.device]) -> float:
    """Median time of cold runs, see Note [Cold operators]."""
    device = devices[0] if devices else torch.device("cpu")
    filler = torch.empty(_CACHE_FILLER_BYTES, dtype=torch.uint8, device=device)
    times = []
    for _ in range(_TIMED_RUNS):
        filler.add_(1)
        synchronize(device)
        start = time.perf_counter_ns()
        run()
        synchronize(device)
        times.append((time.perf_counter_ns() - start) / 1000)
    return statistics.median(times)


def _fresh_bytes(result: Any, arguments: Any, *, on_accelerator: bool) -> Iterator[int]:
    """Sizes of the storages a call made, in the order of its results; beside an accelerator, host memory is none."""
    seen = {storage_key(tensor) for tensor in tensors_in(arguments)}
    for tensor in tensors_in(result):
        if storage_key(tensor) not in seen:
            seen.add(storage_key(tensor))
            is_elsewhere = on_accelerator and not is_accelerator(tensor.device)
            yield 0 if is_elsewhere else tensor.untyped_storage().nbytes()
