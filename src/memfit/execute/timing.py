"""How long every operation of a captured step takes, seen in real steps (`execute/timed_step.py`).

Note [Equal calls]
    Calls of one signature take the same time, up to what else happens on the machine, which makes some
    slower and none faster. What a quarter of them, over all steps, stay below is what each is said to take:
    with few calls that is nearly the fastest, with many a time that is often seen.

Note [Disturbed steps]
    Other programs on the machine make some steps slower than others, and with them everything in them. What a
    plan needs is how operators compare, so the times of every step are scaled to those of the fastest, by what the
    operators take together that run in one form only, and so in every step alike.
"""

import dataclasses
import logging
import math
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence

from torch import fx, nn

from memfit.capture.sample import Sample
from memfit.execute.timed_step import TimedStep, Times, is_stretch
from memfit.ir import Graph, Operation
from memfit.measure.roofline import roofline_times
from memfit.ops.likeness import Likenesses
from memfit.ops.registry import find_function
from memfit.ops.stretch import Stretch

log = logging.getLogger(__name__)

_FEW = 8  # steps or fewer in the time there is: each counts then
_AGREE = 0.08  # of a step: so near each other are two that nothing disturbed

_Typical = dict[tuple[str, bool], float]  # microseconds by signature and whether it ran in place


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class OperationTimes:
    """Microseconds by the name of an operation or alternative."""

    fresh_us: Mapping[str, float]  # of a run into new memory
    in_place_us: Mapping[str, float]  # of the run that overwrites its `may_overwrite`, where it has one

    def step_us(self, graph: Graph) -> float:
        """What the operators of one step of the eager run take."""
        return sum(
            (self.fresh_us if operation.overwrites is None else self.in_place_us)[operation.name]
            for operation in graph.operations
        )


def operation_times(
    module: fx.GraphModule,
    graph: Graph,
    model: nn.Module,
    sample: Sample,
    *,
    steps: int = 5,
    time_limit_s: float = 4.0,
    like: Likenesses | None = None,
) -> OperationTimes:
    """Run steps of `model` on `sample` and tell what every operation and alternative of `graph` took.

    `graph` is what the traced graph in `module` was lowered to, and that was not compiled yet. No step is begun after
    the time limit, but one of each kind is run, see Note [Other forms] in `timed_step.py`. Stretches in `like` are not
    run, see Note [Like others] in `ops/likeness.py`.
    """
    left_out = [each for each in graph.alternatives if find_function(each.target) in (like or {})]
    step = TimedStep(module, graph, model, sample, [each.name for each in left_out])
    if is_slow(graph, time_limit_s):
        times = _timed_slow_steps(step, steps, time.perf_counter() + time_limit_s)
    else:
        times = _timed_steps(step, steps, time_limit_s)
    plain, other = _undisturbed(graph, *times)
    typical = _typical(graph, plain, other)
    typical |= _typical_like(graph, typical, left_out, like or {})
    per_byte_us = _per_byte_us(graph, typical)
    fresh_us: Times = {}
    in_place_us: Times = {}
    for operation in (*graph.operations, *graph.alternatives):
        if not operation.signature:  # what autograd itself does is not in the captured graph
            fresh_us[operation.name] = per_byte_us * _bytes(graph, operation)
            continue
        if operation.may_overwrite is not None:
            in_place_us[operation.name] = typical[operation.signature, not is_stretch(operation)]
        if (operation.signature, False) in typical:
            fresh_us[operation.name] = typical[operation.signature, False]
        else:  # an alternative that overwrites, which into new memory moves as much as a copy on top
            copied_bytes = 2 * graph.storages[operation.outputs[0]].size_bytes
            fresh_us[operation.name] = typical[operation.signature, True] + per_byte_us * copied_bytes
    unequal = {each.signature for each in graph.alternatives if each.name in step.unequal}
    for alternative in graph.alternatives:
        if alternative.signature in unequal:
            log.info("%s does not make the same bits as the model's own operator here", alternative.name)
            fresh_us[alternative.name] = in_place_us[alternative.name] = math.inf
    return OperationTimes(fresh_us=fresh_us, in_place_us=in_place_us)


def own_times(
    module: fx.GraphModule, graph: Graph, model: nn.Module, sample: Sample, *, steps: int, time_limit_s: float
) -> Mapping[str, float]:
    """Microseconds of the model's own operations in the form in which the eager run has them, by name."""
    step = TimedStep(module, graph, model, sample)
    start = time.perf_counter()
    plain: list[Times] = []
    with step.running():
        plain.append(step.run())
        is_long = time.perf_counter() > start + time_limit_s / 4  # then what warms up is little
        while not is_long and len(plain) < steps and time.perf_counter() < start + time_limit_s:
            plain.append(step.run())
    plain, _ = _undisturbed(graph, plain[1:] or plain, [])
    typical = _typical(graph, plain, [])
    per_byte_us = sum(typical.values()) / max(1, sum(_bytes(graph, each) for each in graph.operations))
    return {
        each.name: typical[each.signature, each.overwrites is not None]
        if each.signature
        else per_byte_us * _bytes(graph, each)  # what autograd itself does is not in the captured graph
        for each in graph.operations
    }


def _undisturbed(graph: Graph, plain: Sequence[Times], other: Sequence[Times]) -> tuple[list[Times], list[Times]]:
    """See Note [Disturbed steps]."""
    alike = [each.name for each in graph.operations if each.signature and each.may_overwrite is None]
    together_us = [sum(run.get(name, 0.0) for name in alike) for run in (*plain, *other)]
    least_us = min((each for each in together_us if each), default=0.0)
    scaled = [
        {name: time_us * least_us / total_us for name, time_us in run.items()} if total_us > 0 else run
        for run, total_us in zip((*plain, *other), together_us, strict=True)
    ]
    return scaled[: len(plain)], scaled[len(plain) :]


def _typical(graph: Graph, plain: Sequence[Times], other: Sequence[Times]) -> _Typical:
    """See Note [Equal calls]."""
    samples: dict[tuple[str, bool], list[float]] = defaultdict(list)
    for operation in graph.operations:
        if not operation.signature:
            continue
        in_place = operation.overwrites is not None
        samples[operation.signature, in_place] += [run[operation.name] for run in plain]
        if operation.may_overwrite is not None and not is_stretch(operation):
            samples[operation.signature, not in_place] += _seen(operation, other)
    samples = defaultdict(list, {form: times for form, times in samples.items() if times})
    for alternative in graph.alternatives:
        in_place = alternative.may_overwrite is not None and not is_stretch(alternative)
        samples[alternative.signature, in_place] += _seen(alternative, other)
    samples = defaultdict(list, {form: times for form, times in samples.items() if times})
    return {form: sorted(times)[len(times) // 4] for form, times in samples.items()}


def _typical_like(graph: Graph, typical: _Typical, left_out: Sequence[Operation], like: Likenesses) -> _Typical:
    """What stretches take that were not run, see Note [Like others] in `ops/likeness.py`."""
    makers = {index: each for each in graph.operations for index in each.outputs}

    def own_us(alternative: Operation) -> float:
        """Of the operation that an alternative stands for."""
        return typical[makers[alternative.outputs[0]].signature, False]

    longer: dict[Stretch, float] = {}  # by stretch that was run: its time to that of what it stands for
    for alternative in graph.alternatives:
        stretch = find_function(alternative.target)
        if isinstance(stretch, Stretch) and (alternative.signature, False) in typical:
            ratio = typical[alternative.signature, False] / own_us(alternative)
            longer[stretch] = max(ratio, longer.get(stretch, ratio))
    found: _Typical = {}
    for alternative in left_out:
        stretch = find_function(alternative.target)
        assert isinstance(stretch, Stretch)
        found[alternative.signature, False] = own_us(alternative) * longer[like[stretch]]
    return found


def _seen(operation: Operation, runs: Sequence[Times]) -> list[float]:
    return [run[operation.name] for run in runs if operation.name in run]


def _per_byte_us(graph: Graph, typical: _Typical) -> float:
    """What reading and writing takes: of operators that have an in-place form, which read all and write all once."""
    moving = [each for each in graph.operations if each.may_overwrite is not None]
    moved_bytes = sum(_bytes(graph, each) for each in moving)
    return sum(typical[each.signature, False] for each in moving) / moved_bytes if moved_bytes else 0.0


def _bytes(graph: Graph, operation: Operation) -> int:
    return sum(graph.storages[index].size_bytes for index in (*operation.inputs, *operation.outputs))


def _timed_steps(step: TimedStep, steps: int, time_limit_s: float) -> tuple[list[Times], list[Times]]:
    """Plain steps and steps in other forms in turns; the first ones warm up and are left out if there are more."""
    start = time.perf_counter()
    deadline = start + time_limit_s
    plain: list[Times] = []
    other: list[Times] = []
    with step.running():
        while not other or (len(plain) < steps and time.perf_counter() < deadline):
            plain.append(step.run())
            if not other and time.perf_counter() > start + time_limit_s / _FEW:
                return _timed_slow_steps(step, steps, deadline, plain)
            if not other or time.perf_counter() < deadline:
                other.append(step.run(other_forms=True))
    return plain[1:] or plain, other[1:] or other


def is_slow(graph: Graph, time_limit_s: float) -> bool:
    """Whether few steps fit into the time, see Note [Slow steps] in `timed_step.py`; real ones are slower."""
    estimated_us = roofline_times(graph)
    return sum(estimated_us[each.name] for each in graph.operations) > time_limit_s * 1e6 / 4


def _timed_slow_steps(
    step: TimedStep, steps: int, deadline: float, before: Sequence[Times] = ()
) -> tuple[list[Times], list[Times]]:
    """Times in the plain form and in others, seen in the same steps, see Note [Slow steps] in `timed_step.py`.

    Plain steps that were run `before` have warmed up. Of the others those are left out that are slower than the rest.
    """
    runs: list[tuple[Times, Times]] = []
    with step.running():
        while not runs or (len(runs) < steps and time.perf_counter() < deadline and not _agree(before, runs)):
            runs.append(step.run_both())
    alike = _alike_us(before, runs)[len(before) :]
    kept = [run for run, total_us in zip(runs, alike, strict=True) if total_us <= (1 + _AGREE) * min(alike)]
    return [plain for plain, _ in kept], [other for _, other in kept]


def _agree(before: Sequence[Times], runs: Sequence[tuple[Times, Times]]) -> bool:
    """Whether nothing disturbed the last two, so that more would say the same."""
    last = _alike_us(before, runs)[-2:]
    return len(last) == 2 and max(last) <= (1 + _AGREE) * min(last)


def _alike_us(before: Sequence[Times], runs: Sequence[tuple[Times, Times]]) -> list[float]:
    """What operations took together that are in all of some steps."""
    plain = [*before, *(own for own, _ in runs)]
    common = set.intersection(*(set(each) for each in plain))
    return [sum(each[name] for name in common) for each in plain]
