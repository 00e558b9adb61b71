"""Run every distinct operator call once, alone, to learn its workspace, real outputs and time.

Note [Cold operators]
    An operator timed in a loop finds its inputs in the cache, which it would not inside a
    training step. Between two runs the cache is filled with something else.
"""

import logging
import statistics
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import psutil
import torch

from memfit import _torch
from memfit._memory_events import memory_events
from memfit.measure import signature as signatures
from memfit.measure.cost import CostCache, OperatorCost
from memfit.ops.calls import faithful_call
from memfit.tensors import storage_key, tensors_in

log = logging.getLogger(__name__)

_TIMED_RUNS = 3
_CACHE_FILLER_BYTES = 64 * 2**20
_LARGEST_SHARE = 0.5  # of the memory that is free: a probe never takes more

Progress = Callable[[int, int], None]  # done, total


def measured_costs(
    wanted: Iterable[str],
    *,
    device: str,
    timed: bool = False,
    cache: CostCache | None = None,
    progress: Progress | None = None,
) -> dict[str, OperatorCost]:
    """The cost of every signature that can be run here; the others are absent.

    Known costs come from the cache on disk, new ones are added to it, also when interrupted.
    """
    cache = cache or CostCache(device_name(device))
    known = cache.load()
    wanted = list(dict.fromkeys(wanted))
    missing = [each for each in wanted if each not in known or (timed and known[each].time_us is None)]
    fresh: dict[str, OperatorCost] = {}
    try:
        for done, each in enumerate(missing):
            cost = _probe(each, timed=timed)
            if cost is not None:
                fresh[each] = cost
            if progress is not None:
                progress(done + 1, len(missing))
    finally:
        if fresh:
            cache.save(fresh)
    known |= fresh
    return {each: known[each] for each in wanted if each in known}


def device_name(device: str) -> str:
    """The name of the hardware, as costs are remembered by."""
    if torch.device(device).type == "cuda":
        return str(torch.cuda.get_device_name(device))
    return f"cpu-{torch.backends.cpu.get_cpu_capability()}"


def _probe(signature: str, *, timed: bool) -> OperatorCost | None:
    with torch.random.fork_rng(enabled=True):
        return _probed(signature, timed=timed)


def _probed(signature: str, *, timed: bool) -> OperatorCost | None:
    try:
        if 2 * _argument_bytes(signature) > _LARGEST_SHARE * psutil.virtual_memory().available:
            raise MemoryError("too big to measure here")
        # As it runs in a captured graph, whatever the caller is in the middle of.
        with _torch.no_modes(), torch.no_grad(), torch.autocast("cpu", enabled=False):
            operator, args, kwargs = signatures.decode(signature)
            args = _PREPARATIONS.get(str(operator), _as_they_are)(args)
            return _measure(faithful_call(operator), args, kwargs, timed=timed)
    except Exception as error:  # an operator may reject made-up values; its cost then stays unknown
        log.warning("not measured (%s: %s): %s", type(error).__name__, error, signature[:80])
        return None


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


_PREPARATIONS = {"aten.mkldnn_rnn_layer_backward.default": _with_rnn_workspace}


def _measure(operator: Any, args: list[Any], kwargs: dict[str, Any], *, timed: bool) -> OperatorCost:
    if _on_cuda(args):
        operator(*args, **kwargs)  # the first call may prepare something once; on a CPU not in torch's memory
    results: list[Any] = []
    rise_bytes = _rise(lambda: results.append(operator(*args, **kwargs)), args)
    output_bytes = tuple(_fresh_bytes(results.pop(), (args, kwargs)))
    return OperatorCost(
        workspace_bytes=max(0, rise_bytes - sum(output_bytes)),
        output_bytes=output_bytes,
        time_us=_time_us(lambda: operator(*args, **kwargs), args) if timed else None,
    )


def _rise(run: Callable[[], Any], args: list[Any]) -> int:
    """How far the live bytes rise above where they started."""
    if _on_cuda(args):
        before_bytes = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        run()
        torch.cuda.synchronize()
        return torch.cuda.max_memory_allocated() - before_bytes
    live_bytes = highest_bytes = 0
    for change_bytes in memory_events(run):
        live_bytes += change_bytes
        highest_bytes = max(highest_bytes, live_bytes)
    return highest_bytes


def _time_us(run: Callable[[], Any], args: list[Any]) -> float:
    """Median time of cold runs, see Note [Cold operators]."""
    on_cuda = _on_cuda(args)
    filler = torch.empty(_CACHE_FILLER_BYTES, dtype=torch.uint8, device="cuda" if on_cuda else "cpu")
    times = []
    for _ in range(_TIMED_RUNS):
        filler.add_(1)
        if on_cuda:
            torch.cuda.synchronize()
        start = time.perf_counter_ns()
        run()
        if on_cuda:
            torch.cuda.synchronize()
        times.append((time.perf_counter_ns() - start) / 1000)
    return statistics.median(times)


def _on_cuda(args: list[Any]) -> bool:
    return any(tensor.is_cuda for tensor in tensors_in(args))


def _fresh_bytes(result: Any, arguments: Any) -> Iterator[int]:
    """Sizes of the storages a call made, in the order of its results."""
    seen = {storage_key(tensor) for tensor in tensors_in(arguments)}
    for tensor in tensors_in(result):
        if storage_key(tensor) not in seen:
            seen.add(storage_key(tensor))
            yield tensor.untyped_storage().nbytes()


def _argument_bytes(signature: str) -> int:
    with _torch.FakeTensorMode():
        _, args, kwargs = signatures.decode(signature)
        return sum(tensor.untyped_storage().nbytes() for tensor in tensors_in((args, kwargs)))
