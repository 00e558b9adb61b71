"""The peers: `torch.utils.checkpoint` and torch.compile's memory budget, at several settings each.

Every setting gives one point: the measured peak of a whole forward and backward, and the time as a ratio to
plain eager from interleaved runs. What fails or takes too long gives its reason instead.
"""

import contextlib
import copy
import functools
import signal
import time
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any, TypeVar, cast

import torch
import torch._functorch.config
from torch import nn

from benchmarks.frontier_record import AOT_EAGER, CHECKPOINT, INDUCTOR, SAME_GRAPHS, PeerPoint
from benchmarks.measuring import Subject, interleaved, peak_bytes
from benchmarks.segments import checkpointed, find_runs, segment_sizes, segments, square_root_size

PAIRS = 3
BUDGETS = tuple(tenths / 10 for tenths in range(10, 0, -1))
ESTIMATORS = ("flops", "profile")  # of what computing again costs, torch.compile's own; the first is its default
_ONLY_ON_CUDA = {"profile"}  # it runs operators with a clock that is CUDA's
QUICK_BUDGETS = (1.0, 0.5, 0.2)

Setting = TypeVar("Setting")


def peer_points(name: str, subject: Subject, *, quick: bool, limit_s: float, pairs_s: float) -> Iterator[PeerPoint]:
    """All points of a peer, one after the other as they are measured, `pairs_s` seconds of steps each."""
    if name == CHECKPOINT:
        return _checkpoint_points(subject, quick=quick, limit_s=limit_s, pairs_s=pairs_s)
    if name in (AOT_EAGER, INDUCTOR):
        return _compile_points(name, subject, quick=quick, limit_s=limit_s, pairs_s=pairs_s)
    raise ValueError(f"no peer is named {name!r}; there are {CHECKPOINT}, {AOT_EAGER} and {INDUCTOR}")


def point_count(*, quick: bool) -> int:
    """At most so many points does a peer have, for progress and time limits."""
    return len(_compile_settings(quick=quick))


def _compile_settings(*, quick: bool) -> list[tuple[float, str]]:
    """Budgets and estimators of torch.compile; with all of the memory nothing is estimated."""
    if quick:
        return [(budget, ESTIMATORS[0]) for budget in QUICK_BUDGETS]
    run_here = [each for each in ESTIMATORS if torch.cuda.is_available() or each not in _ONLY_ON_CUDA]
    return [(budget, each) for budget in BUDGETS for each in (run_here if budget < 1 else ESTIMATORS[:1])]


def _checkpoint_points(subject: Subject, *, quick: bool, limit_s: float, pairs_s: float) -> Iterator[PeerPoint]:
    model = copy.deepcopy(subject.model)
    runs = find_runs(model, lambda: subject.case.loss(model, subject.batch))
    for size in [square_root_size(runs)] if quick else segment_sizes(runs):
        wrapped = segments(runs, size)
        setting = f"{len(wrapped) + 1} segments of {size} block{'s' if size > 1 else ''}"
        with checkpointed(wrapped):
            yield _measured(CHECKPOINT, setting, subject, lambda: model, limit_s, pairs_s)


def _compile_points(
    backend: str, subject: Subject, *, quick: bool, limit_s: float, pairs_s: float
) -> Iterator[PeerPoint]:
    model = copy.deepcopy(subject.model)

    def compiled() -> nn.Module:
        return cast(nn.Module, torch.compile(model, backend=backend))

    known: dict[frozenset[str], str] = {}  # settings by what was compiled for them
    for budget, estimator in _compile_settings(quick=quick):
        torch.compiler.reset()
        setting = f"budget {budget:.1f}" + (f", {estimator}" if estimator != ESTIMATORS[0] else "")
        with compile_budget(budget, estimator), graphs_compiled() as graphs:
            same_as = functools.partial(same_graphs, setting, graphs, known)
            yield _measured(backend, setting, subject, compiled, limit_s, pairs_s, same_as)


def compile_budget(budget: float, estimator: str = ESTIMATORS[0]) -> contextlib.AbstractContextManager[None]:
    """torch.compile's memory budget, for what is compiled meanwhile."""
    patched: contextlib.AbstractContextManager[None] = torch._functorch.config.patch(
        activation_memory_budget=budget,
        activation_memory_budget_solver="dp",
        activation_memory_budget_runtime_estimator=estimator,
        enable_autograd_cache=False,  # it does not tell estimators apart
    )
    return patched


def same_graphs(setting: Setting, graphs: set[str], known: dict[frozenset[str], Setting]) -> Setting | None:
    """The setting before for which the same was compiled, None if there is none, or nothing was compiled."""
    before = known.setdefault(frozenset(graphs), setting) if graphs else setting
    return None if before == setting else before


@contextlib.contextmanager
def graphs_compiled() -> Iterator[set[str]]:
    """Collects the hashes of what Inductor is given meanwhile."""
    from torch._inductor import codecache

    own, found = codecache.compiled_fx_graph_hash, set[str]()

    def note(*args: Any) -> tuple[str, list[str]]:
        key, lines = own(*args)
        found.add(key)
        return key, lines

    codecache.compiled_fx_graph_hash = note  # type: ignore[assignment]
    try:
        yield found
    finally:
        codecache.compiled_fx_graph_hash = own


def _measured(
    peer: str,
    setting: str,
    subject: Subject,
    make_model: Callable[[], nn.Module],
    limit_s: float,
    pairs_s: float,
    same_as: Callable[[], str | None] = lambda: None,
) -> PeerPoint:
    """One point; of a setting that is the same as one before, which `same_as` says after its first step, only that."""
    try:
        with _time_limit(limit_s):
            start = time.perf_counter()
            model = make_model()
            subject.step(model)  # compiles, and warms up
            first_step_s = time.perf_counter() - start
            if before := same_as():
                return PeerPoint(peer=peer, setting=setting, reason=f"{SAME_GRAPHS} as at {before}")
            peak = peak_bytes(subject, model)
            times = interleaved(subject, model, pairs=PAIRS, seconds=pairs_s)
    except _TooLong:
        return PeerPoint(peer=peer, setting=setting, reason=f"not done after {limit_s:.0f} s")
    except Exception as error:  # a peer may fail in any way; it must not end the benchmark
        return PeerPoint(peer=peer, setting=setting, reason=_reason(error))
    finally:
        subject.model.zero_grad()
    return PeerPoint(
        peer=peer,
        setting=setting,
        peak_bytes=peak,
        time_ratio=times.ratio,
        first_step_s=first_step_s,
        error=times.error,
    )


def _reason(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {' '.join(lines[:2])[:300]}"  # the first often only says who raised the second


class _TooLong(BaseException):
    """Not an Exception: compilers catch those and go on."""


@contextlib.contextmanager
def _time_limit(seconds: float) -> Iterator[None]:
    def stop(_number: int, _frame: FrameType | None) -> None:
        raise _TooLong

    before = signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
