"""How long every operation of a captured step takes, seen in real steps (`execute/timed_step.py`).

Note [Equal calls]
    Calls of one signature take the same time, up to what else happens on the machine, which makes some slower and none
    faster. What a quarter of them, over all steps, stay below is what each is said to take: with few calls that is
    nearly the fastest, with many a time that is often seen.

Note [Disturbed steps]
    Other programs on the machine make some steps slower than others, and with them everything in them. What a plan
    needs is how operators compare, so the times of every step are scaled to those of the fastest, by what the forms
    take together that run in all of them.

Note [Not seen]
    A program runs every operation of the model at least once, but not every variant of it. What no step has run is
    estimated from its sizes, and the estimate is scaled by what others of its kind took beyond theirs. A plan that
    takes such a variant is run and timed in its turn.

Note [Warm steps]
    In the first step of a process memory is new, and libraries choose their algorithms. What runs beside it takes
    several times as long as later, so nothing of it counts, unless a step takes very long or others ran before.
"""

import dataclasses
import math
import statistics
import time
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from torch import fx, nn

from memfit.capture.sample import Sample
from memfit.execute.partition import unplanned_program
from memfit.execute.timed_step import Limit, TimedStep, Times, is_fused
from memfit.ir import Compute, Graph, Operation, Program
from memfit.measure.cost import CostCache, StepCost
from memfit.measure.roofline import roofline_times
from memfit.ops.likeness import Likenesses
from memfit.ops.registry import find_function
from memfit.ops.stretch import Stretch

_AGREE = 0.08  # of a step: so near each other are two that nothing disturbed
_LONGEST_WARM_UP_S = 6.0  # steps that take longer are run once, and the first is believed
_SLOW_STEP_S = 0.7  # then what an extra run leaves in the cache is little beside the step, and every step has them

_MUCH = 0.3  # of what all forms take: so much in common tells how two runs compare

Form = tuple[str, bool]  # a signature, and whether it runs in place
Seen = Mapping[Form, float]  # microseconds


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class OperationTimes:
    """Microseconds by the name of an operation or variant."""

    fresh_us: Mapping[str, float]  # of a run into new memory
    in_place_us: Mapping[str, float]  # of the run that overwrites its `may_overwrite`, where it has one

    def step_us(self, graph: Graph) -> float:
        """What the operators of one step of the eager run take."""
        return sum(
            (self.fresh_us if operation.overwrites is None else self.in_place_us)[operation.name]
            for operation in graph.operations
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class SeenTimes:
    """What steps have shown so far."""

    times_us: Seen = dataclasses.field(default_factory=dict)
    equal: frozenset[str] = frozenset()  # signatures of variants that were seen to make the same bits
    unequal: frozenset[str] = frozenset()  # that were seen to make others

    @classmethod
    def kept(cls, graph: Graph, cache: CostCache) -> "SeenTimes":
        """Return what earlier runs saw of the operations of a graph."""
        signatures = {each.signature for each in (*graph.operations, *graph.alternatives)}
        known = {each: cost for each, cost in cache.load_steps().items() if each in signatures}
        fresh = {(each, False): cost.fresh_us for each, cost in known.items()}
        in_place = {(each, True): cost.in_place_us for each, cost in known.items()}
        return cls(
            times_us={form: time_us for form, time_us in {**fresh, **in_place}.items() if time_us is not None},
            equal=frozenset(each for each, cost in known.items() if cost.is_equal),
            unequal=frozenset(each for each, cost in known.items() if cost.is_equal is False),
        )

    def keep(self, cache: CostCache) -> None:
        """Keep them for later runs."""
        compared = {**dict.fromkeys(self.equal, True), **dict.fromkeys(self.unequal, False)}
        signatures = {*(signature for signature, _ in self.times_us), *compared}
        cache.save_steps(
            {
                each: StepCost(
                    fresh_us=self.times_us.get((each, False)),
                    in_place_us=self.times_us.get((each, True)),
                    is_equal=compared.get(each),
                )
                for each in signatures
            }
        )

    def covers(self, graph: Graph, program: Program) -> bool:
        """Return whether every form that a program runs was timed."""
        return all(form in self.times_us for form in _forms(graph, program))

    def with_others(self, others: "SeenTimes") -> "SeenTimes":
        """These and those of later steps, scaled to these, see Note [Disturbed steps]."""
        common = self.times_us.keys() & others.times_us.keys()
        own_us, theirs_us = (sum(each.times_us[form] for form in common) for each in (self, others))
        # A few small calls say little of how busy the machine was: then later times are believed as they are.
        is_much = theirs_us > _MUCH * sum(others.times_us.values()) and own_us > _MUCH * sum(self.times_us.values())
        scale = own_us / theirs_us if is_much else 1.0
        scaled = {form: time_us * scale for form, time_us in others.times_us.items()}
        both = {form: min(scaled[form], self.times_us[form]) for form in common}
        return SeenTimes(
            times_us={**self.times_us, **scaled, **both},
            equal=self.equal | others.equal,
            unequal=self.unequal | others.unequal,
        )


def step_times(
    module: fx.GraphModule,
    graph: Graph,
    program: Program,
    model: nn.Module,
    sample: Sample,
    *,
    limit: Limit | None = None,
    steps: int = 4,
    time_limit_s: float = 1.5,
    like: Likenesses | None = None,
    with_extras: bool = True,
    is_warm: bool = False,
) -> SeenTimes:
    """Run steps of a program of `graph` on `sample` and tell what every operation took, inside the limit.

    `graph` is what the traced graph in `module` was lowered to, and that was not compiled yet. The time limit may be
    exceeded by one step, after one that warms up, unless `is_warm`: steps of the model ran just before. Fused kernels
    in `like` are not run, see Note [Like others] in `ops/likeness.py`.
    """
    left_out = _left_out(graph, like or {})
    step = TimedStep(module, graph, program, model, sample, limit=limit, left_out=left_out, with_extras=with_extras)
    runs = _timed_steps(step, steps, time_limit_s, with_extras=with_extras, is_warm=is_warm)
    operation = graph.operation
    return SeenTimes(
        times_us=_typical(graph, _undisturbed(runs)),
        equal=frozenset(operation(each).signature for each in step.equal),
        unequal=frozenset(operation(each).signature for each in step.unequal),
    )


def operation_times(
    module: fx.GraphModule,
    graph: Graph,
    model: nn.Module,
    sample: Sample,
    *,
    steps: int = 4,
    time_limit_s: float = 1.5,
    like: Likenesses | None = None,
) -> OperationTimes:
    """Return what every operation and variant takes, seen in steps of the unplanned program, which must fit."""
    program = unplanned_program(graph)
    seen = step_times(module, graph, program, model, sample, steps=steps, time_limit_s=time_limit_s, like=like)
    return with_estimates(graph, seen, like)


def own_times(
    module: fx.GraphModule, graph: Graph, model: nn.Module, sample: Sample, *, steps: int, time_limit_s: float
) -> SeenTimes:
    """Run unplanned steps, in which every operation has the form that the eager run has."""
    program = unplanned_program(graph)
    options: dict[str, Any] = {"steps": steps, "time_limit_s": time_limit_s}
    return step_times(module, graph, program, model, sample, with_extras=False, **options)


def own_times_of(graph: Graph, seen: SeenTimes) -> Mapping[str, float]:
    """Microseconds of the model's own operations in the form in which the eager run has them, by name."""
    times = with_estimates(graph, seen)
    return {
        each.name: (times.fresh_us if each.overwrites is None else times.in_place_us)[each.name]
        for each in graph.operations
    }


def with_estimates(graph: Graph, seen: SeenTimes, like: Likenesses | None = None) -> OperationTimes:
    """Times of all operations and variants: what was seen, and estimates of the rest, see Note [Not seen]."""
    typical = _Typical(graph, seen, like or {})
    fresh_us: dict[str, float] = {}
    in_place_us: dict[str, float] = {}
    for operation in (*graph.operations, *graph.alternatives):
        possible = typical.is_possible(operation)
        if operation.may_overwrite is not None:
            in_place_us[operation.name] = typical.in_place_us(operation) if possible else math.inf
        fresh_us[operation.name] = typical.fresh_us(operation) if possible else math.inf
    return OperationTimes(fresh_us=fresh_us, in_place_us=in_place_us)


class _Typical:
    """What a call takes that looks like those that were seen, see Note [Equal calls] and Note [Not seen]."""

    def __init__(self, graph: Graph, seen: SeenTimes, like: Likenesses) -> None:
        self._graph = graph
        self._seen = seen
        self._like = like
        self._estimated_us = roofline_times(graph)
        self._ratios = _ratios(graph, seen.times_us, self._estimated_us)
        self._makers = {index: each for each in graph.operations for index in each.outputs}
        self._longer = self._longer_than_own()

    def is_possible(self, operation: Operation) -> bool:
        return operation.signature not in self._seen.unequal

    def fresh_us(self, operation: Operation) -> float:
        if not operation.signature:  # what autograd itself does is not in the captured graph
            return self._per_byte_us * _bytes(self._graph, operation)
        fused = find_function(operation.target) if is_fused(operation) else None
        if fused in self._like and operation.name not in {each.name for each in self._graph.operations}:
            return self._like_others_us(operation)
        form_us = self._seen.times_us.get((operation.signature, False))
        if form_us is not None:
            return form_us
        in_place_us = self._seen.times_us.get((operation.signature, True))
        if in_place_us is not None:  # into new memory it moves as much as a copy on top
            copied_bytes = 2 * self._graph.storages[operation.outputs[0]].size_bytes
            return in_place_us + self._per_byte_us * copied_bytes
        return self._estimate_us(operation)

    def in_place_us(self, operation: Operation) -> float:
        in_place = bool(operation.signature) and not is_fused(operation)
        form_us = self._seen.times_us.get((operation.signature, in_place))
        return self.fresh_us(operation) if form_us is None else form_us

    def _estimate_us(self, operation: Operation) -> float:
        ratio = self._ratios.get(operation.target, self._ratios.get("", 1.0))
        return self._estimated_us[operation.name] * ratio

    @property
    def _per_byte_us(self) -> float:
        """What reading and writing takes: of operators that have an in-place form, which read all and write all."""
        seen = self._seen.times_us
        moving = [
            each
            for each in self._graph.operations
            if each.may_overwrite is not None and (each.signature, False) in seen
        ]
        moved_bytes = sum(_bytes(self._graph, each) for each in moving)
        if not moved_bytes:
            return self._ratios.get("", 1.0) / 2e4  # of what the roofline says of a CPU
        return sum(seen[each.signature, False] for each in moving) / moved_bytes

    def _longer_than_own(self) -> dict[Stretch, float]:
        """By fused kernel that was run: its time to that of what it stands for."""
        longer: dict[Stretch, float] = {}
        for variant in self._graph.alternatives:
            fused = find_function(variant.target)
            if isinstance(fused, Stretch) and (variant.signature, False) in self._seen.times_us:
                ratio = self._seen.times_us[variant.signature, False] / max(self._own_us(variant), 1e-9)
                longer[fused] = max(ratio, longer.get(fused, ratio))
        return longer

    def _own_us(self, variant: Operation) -> float:
        """Of the operation that a variant stands for."""
        own = self._makers[variant.outputs[0]]
        return self._seen.times_us.get((own.signature, False), self._estimated_us[own.name])

    def _like_others_us(self, variant: Operation) -> float:
        """See Note [Like others] in `ops/likeness.py`."""
        fused = find_function(variant.target)
        assert isinstance(fused, Stretch)
        longer = self._longer.get(self._like[fused])
        return self._estimate_us(variant) if longer is None else self._own_us(variant) * longer


def _ratios(graph: Graph, seen: Seen, estimated_us: Mapping[str, float]) -> dict[str, float]:
    """By operator, and "" for all: what its calls take to what was estimated of them."""
    ratios: dict[str, list[float]] = defaultdict(list)
    for operation in (*graph.operations, *graph.alternatives):
        time_us = seen.get((operation.signature, False), seen.get((operation.signature, True)))
        if time_us is not None and operation.signature:
            ratio = time_us / estimated_us[operation.name]
            ratios[operation.target].append(ratio)
            ratios[""].append(ratio)
    return {target: statistics.median(each) for target, each in ratios.items()}


def _left_out(graph: Graph, like: Likenesses) -> set[int]:
    return {
        number
        for number, each in enumerate(graph.alternatives, start=len(graph.operations))
        if find_function(each.target) in like
    }


def _forms(graph: Graph, program: Program) -> set[Form]:
    """The forms that a program runs, without what autograd does."""
    runs = [each for each in (*program.forward, *program.backward) if isinstance(each, Compute)]
    operations = [(graph.operation(run.operation), run.in_place) for run in runs]
    return {(each.signature, in_place and not is_fused(each)) for each, in_place in operations if each.signature}


def _undisturbed(runs: Sequence[tuple[Times, Times]]) -> list[Times]:
    """Times of steps and of what ran beside each, see Note [Disturbed steps]."""
    common = set.intersection(*(set(own) for own, _ in runs if own))
    together_us = [sum(sum(own.get(form, ())) for form in common) for own, _ in runs]
    least_us = min(each for each in together_us if each)
    return [
        {form: [each * least_us / (total_us or least_us) for each in times] for form, times in seen.items()}
        for run, total_us in zip(runs, together_us, strict=True)
        for seen in run
    ]


def _typical(graph: Graph, runs: Iterable[Times]) -> dict[Form, float]:
    """See Note [Equal calls]."""
    samples: dict[Form, list[float]] = defaultdict(list)
    for run in runs:
        for (index, in_place), times in run.items():
            operation = graph.operation(index)
            if operation.signature:
                samples[operation.signature, in_place and not is_fused(operation)] += times
    return {form: sorted(times)[len(times) // 4] for form, times in samples.items()}


def _bytes(graph: Graph, operation: Operation) -> int:
    return sum(graph.storages[index].size_bytes for index in (*operation.inputs, *operation.outputs))


def _timed_steps(
    step: TimedStep, steps: int, time_limit_s: float, *, with_extras: bool, is_warm: bool = False
) -> list[tuple[Times, Times]]:
    """Return times of steps, and of the extra runs beside each, see Note [Warm steps].

    Where steps are short, the extra runs have a step of their own, the last, so that they disturb no other; where they
    are long, all steps have them, and two that agree are enough. The time limit ends steps in between, not that one.
    """
    start = time.perf_counter()
    with step.running():
        runs = [step.run(with_extras=with_extras)]
        is_slow = _are_slow(runs)
        counts_first = is_warm or steps == 1 or _step_us(runs[0]) > _LONGEST_WARM_UP_S * 1e6
        has_last = with_extras and not is_slow and not counts_first
        while len(runs) < steps - has_last and time.perf_counter() < start + time_limit_s and not _agree(runs):
            runs.append(step.run(with_extras=with_extras and is_slow))
        if counts_first:
            return runs
        if has_last or len(runs) == 1:
            runs.append(step.run(with_extras=with_extras))
    return runs[1:]


def _are_slow(runs: Sequence[tuple[Times, Times]]) -> bool:
    return _step_us(runs[0]) > _SLOW_STEP_S * 1e6


def _agree(runs: Sequence[tuple[Times, Times]]) -> bool:
    """Return whether nothing disturbed the last two of long steps, so that more would say the same."""
    if len(runs) < 2 or not _are_slow(runs):
        return False
    last = [_step_us(run) for run in runs[-2:]]
    return max(last) <= (1 + _AGREE) * min(last)


def _step_us(run: tuple[Times, Times]) -> float:
    return sum(sum(times) for times in run[0].values())
