"""A traced call made ready for planning: lowered, with the sizes, workspaces and times of its operations."""

import contextlib
import dataclasses
import math
import time
from collections.abc import Collection, Iterator, Mapping
from typing import Any

from torch import fx, nn

from memfit.capture.alternatives import extend
from memfit.capture.cuda.capability import Capability
from memfit.capture.cuda.operators import operators_of
from memfit.capture.fuse import alternatives_in, stretches_in
from memfit.capture.hooks import check_no_inner_hooks
from memfit.capture.lower import lower
from memfit.capture.sample import Sample
from memfit.capture.trace import Joint, traced
from memfit.collecting import collected_later
from memfit.describe import capability_elsewhere, device_of, granularity_bytes, is_fake, is_for_accelerator
from memfit.execute.partition import unplanned_program
from memfit.execute.timed_step import Limit
from memfit.execute.timing import SeenTimes, own_times, own_times_of, step_times, with_estimates
from memfit.ir import Compute, Graph, LossMemory, Operation, OptimizerMemory, Program
from memfit.measure.allocations import Quiet, operator_costs, with_real_sizes, workspace_bytes
from memfit.measure.available import available
from memfit.measure.cost import CostCache, OperatorCost
from memfit.measure.cuda_libraries import library_bytes
from memfit.measure.devices import Device
from memfit.measure.optimizer import OptimizerLike, optimizer_memory
from memfit.measure.probe import device_name, measured_costs
from memfit.measure.roofline import roofline_times
from memfit.measure.signature import with_operator
from memfit.ops.likeness import Likenesses, likenesses
from memfit.ops.registry import LEAN_OPERATORS, find_function, find_lean_operator, name_of
from memfit.ops.stretch import STRETCH, Stretch, compile_all
from memfit.outside_loss import loss_memory, starts_of_backward
from memfit.plan.captured import CapturedStep
from memfit.plan.identity import identity_program
from memfit.plan.problem import Costs, handed_out_together
from memfit.plan.simulate import Timeline, simulate
from memfit.recipe import AVAILABLE, Recipe, budget_bytes, is_fraction, without_channels_last
from memfit.tensors import storage_bytes

_PLAIN_STEPS_S = 2.0  # for steps as they are before the graph is rewritten
_LONGEST_PROBING_S = 20.0  # for operators of a model that has no weights, and may be far too big for this machine
_LEAST_ROOM_BYTES = 2**20  # for a probe
_FREE_SHARE = 0.9  # of the memory that is free: what steps that are run to be timed may take of it


@dataclasses.dataclass(frozen=True, kw_only=True)
class Prepared:
    """A captured step with its costs: all a planner needs, at any budget."""

    graph: Graph
    costs: Costs
    eager: Graph  # as the plain eager run computes it
    eager_workspace_bytes: tuple[int, ...]  # by operation of that
    optimizer: OptimizerMemory
    granularity_bytes: int
    unplanned_peak_bytes: int  # of the plain eager run
    unplanned_step_us: float | None  # of its operators, or of a long step; None: those of the graph, not rewritten
    is_measured: bool  # whether operators were run, to learn what they allocate
    may_be_timed: bool  # whether steps can be run here
    seen: SeenTimes  # what steps have shown
    rewrites: tuple[str, ...]
    seconds: float  # that tracing and measuring took
    quiet: Quiet
    loss: LossMemory | None = None  # None: inside the model, or not counted
    plain: "Traced | None" = None  # the trace of the eager run, if the graph is another one
    is_reference_timed: bool = True  # whether what a plan is compared with was timed, where that is another graph
    like: Likenesses = dataclasses.field(default_factory=dict)
    put_off: frozenset[str] = frozenset()  # stretches that are not compiled yet, and whose workspace is not known
    bounded: frozenset[str] = frozenset()  # operators whose workspace is bounded from above: too big to be run here

    def peak_bytes(self, program: Program) -> int:
        return self.timeline(program).peak_bytes

    def timeline(self, program: Program) -> Timeline:
        return simulate(
            self.graph,
            program,
            workspace_bytes=self.costs.workspace_bytes,
            optimizer=self.optimizer,
            loss=self.loss,
            granularity_bytes=self.granularity_bytes,
        )

    def are_timed(self, program: Program) -> bool:
        """Return whether steps have shown what everything takes that a program runs, and what it is compared with."""
        return self.seen.covers(self.graph, program) and self.is_reference_timed

    def can_run(self, program: Program) -> bool:
        """Whether no instruction of a program goes a way that was not seen to be exact here."""
        runs = [each.operation for each in (*program.forward, *program.backward) if isinstance(each, Compute)]
        return all(self.costs.time_us[run] < math.inf for run in runs)

    def captured_step(self) -> CapturedStep:
        """What a plan carries along, so that its step can be walked without the model."""
        return CapturedStep.of(
            eager=self.eager,
            eager_workspace_bytes=self.eager_workspace_bytes,
            graph=self.graph,
            costs=self.costs,
            optimizer=self.optimizer,
            granularity_bytes=self.granularity_bytes,
            loss=self.loss,
        )

    @property
    def resident_bytes(self) -> int:
        """Live before the step, without the optimizer's state."""
        return sum(self.graph.storages[each].size_bytes for each in self.graph.resident)

    @property
    def persistent_bytes(self) -> int:
        """Live when the step ends: parameters, buffers, gradients, batch, outputs, optimizer state."""
        ending = {*self.graph.resident, *self.graph.held}
        if self.loss is not None:
            ending -= {*self.graph.returned_alone}
        loss_bytes = 0 if self.loss is None else self.loss.batch_bytes + self.loss.lasting_bytes
        own_bytes = sum(self.graph.storages[each].size_bytes for each in ending)
        return own_bytes + self.optimizer.state_bytes + loss_bytes


@contextlib.contextmanager
def traced_for(model: nn.Module, sample: Sample, recipe: Recipe, *, with_hooks: bool = True) -> Iterator[Joint]:
    """Trace as a recipe wants it, for a call that will run in the place of the model's forward.

    Twice where its loss uses outputs that are not those of the first trace, or gives gradients in another layout, see
    Note [Gradients of outputs] in `capture/gradient_layouts.py`.
    """
    check_no_inner_hooks(model)
    options: dict[str, Any] = {
        "backward_from": recipe.backward_from,
        "outputs": recipe.outputs,
        "with_hooks": with_hooks,
        "channels_last": recipe.channels_last,
    }
    elsewhere = capability_elsewhere(model, recipe.device)
    with operators_of(elsewhere), traced(model, sample, **options, starts=recipe.starts) as joint:
        backward_from, starts = starts_of_backward(recipe.loss, model, sample, joint)
        starts = recipe.starts or starts
        if (backward_from, starts) == (joint.backward_from, joint.starts):
            yield joint
            return
    options["backward_from"] = backward_from
    with operators_of(elsewhere), traced(model, sample, **options, starts=starts) as joint:
        yield joint


def as_traced(recipe: Recipe, joint: Joint) -> Recipe:
    """Settle what a trace has found out for later ones."""
    return dataclasses.replace(recipe, backward_from=joint.backward_from)


def traced_as_eager(model: nn.Module, sample: Sample, recipe: Recipe, *, with_hooks: bool = True) -> "Traced | None":
    """The step in the layout that the eager run has, to compare with; None if a recipe keeps to that."""
    if not recipe.channels_last:
        return None
    with traced_for(model, sample, without_channels_last(recipe), with_hooks=with_hooks) as joint:
        return Traced.of(joint)


def planned_graph(joint: Joint, recipe: Recipe) -> Graph:
    """The graph that programs of a recipe are written for. Changes the traced graph: once for a trace."""
    return handed_out_together(extended_graph(joint, recipe))


def extended_graph(joint: Joint, recipe: Recipe) -> Graph:
    """The same with gradients handed out as the eager run does. Changes the traced graph: once for a trace."""
    with collected_later():
        extend(joint, recipe.allow)
        return lower(joint)


def prepare(
    model: nn.Module,
    joint: Joint,
    sample: Sample,
    recipe: Recipe,
    *,
    before: "Traced | None" = None,
    extended: Graph | None = None,
    timed: bool = True,
    known: Quiet | None = None,
    may_put_off: bool = False,
    unplanned: "Traced | None" = None,
    limit_bytes: int | None = None,
) -> Prepared:
    """Lower a traced call and measure what its operations allocate; times are those of earlier runs, or estimated.

    Args:
        model: The model that was traced.
        joint: The trace.
        sample: What it was traced with.
        recipe: What is asked for.
        before: The trace as it was, if `planned_graph` or `extended_graph` has been called since.
        extended: What `extended_graph` has returned, which is the same until kernels are compiled.
        timed: Whether steps are to be run later, see `with_step_times`.
        known: What is known of a call of other sizes.
        may_put_off: Whether the caller asks for `with_compiled_costs` before it believes a program.
        unplanned: What the eager run does, if that is something else.
        limit_bytes: What no probe may exceed, if that is not the recipe's budget.

    """
    start = time.monotonic()
    plain = unplanned or before or Traced.of(joint)
    if before is None:
        with collected_later():
            extend(joint, recipe.allow)
    memory = with_beside(step_optimizer_memory(recipe.optimizer, model, plain.graph, recipe.device), recipe)
    measured = recipe.device is None and may_be_probed(model, sample, plain.graph)
    runs_here = timed and measured and not is_fake(model, sample)
    like = _put_off(joint.graph_module.graph) if runs_here and may_put_off else {}
    if measured:
        _compile_now(joint, like, recipe, timed=timed, likely_in_place=runs_here and may_put_off)
    eager = lower(joint) if extended is None or recipe.compiles else extended
    loss = step_loss_memory(model, joint, sample, eager, memory, recipe)
    device = device_of(model)
    granularity = granularity_bytes(model, recipe.device)
    put_off = frozenset(name_of(stretch) for stretch in like)
    quiet = frozenset() if known is None else known.in_graph(eager)
    stretched = [each for each in eager.alternatives if each.technique == STRETCH.name]
    quiet |= {each.name for each in stretched if not timed or each.target in put_off}  # not compiled yet
    room_bytes = _probing_room(model, plain.graph, memory, recipe, limit_bytes)
    costs = operator_costs(eager, device, recipe.progress, quiet, room_bytes=room_bytes) if measured else {}
    elsewhere = capability_elsewhere(model, recipe.device)
    sized, workspaces = _with_costs(eager, costs, elsewhere)
    sized_plain, plain_workspaces = sized, workspaces
    is_rewritten = plain.is_rewritten_as(eager)
    if is_rewritten:
        plain_costs = (
            operator_costs(plain.graph, device, recipe.progress, quiet, room_bytes=room_bytes) if measured else {}
        )
        sized_plain, plain_workspaces = _with_costs(plain.graph, plain_costs, elsewhere)
    unplanned_step = simulate(
        sized_plain,
        identity_program(sized_plain),
        workspace_bytes=plain_workspaces,
        optimizer=memory,
        loss=loss,
        granularity_bytes=granularity,
    )
    graph = handed_out_together(sized)
    workspace_by_name = dict(zip(_names(sized), workspaces, strict=True))
    prepared = Prepared(
        graph=graph,
        costs=Costs(time_us=[], in_place_us=[], workspace_bytes=[workspace_by_name[name] for name in _names(graph)]),
        eager=sized_plain,
        eager_workspace_bytes=tuple(plain_workspaces),
        optimizer=memory,
        granularity_bytes=granularity,
        unplanned_peak_bytes=unplanned_step.peak_bytes,
        unplanned_step_us=None,
        is_measured=measured,
        may_be_timed=runs_here,
        seen=SeenTimes.kept(graph, CostCache(device_name(device))) if runs_here else SeenTimes(),
        rewrites=_rewrites(plain.graph, graph),
        seconds=joint.seconds + time.monotonic() - start,
        quiet=Quiet.of(eager, costs),
        loss=loss,
        plain=dataclasses.replace(plain, is_other=unplanned is not None) if is_rewritten else None,
        like=like,
        put_off=put_off,
        bounded=frozenset(
            each.target for each in _all(eager) if each.signature in costs and costs[each.signature].is_bound
        ),
    )
    prepared = _with_times(prepared, recipe)
    if not is_rewritten:
        return prepared
    estimated_us = _plain_step_us(prepared, roofline_times(sized_plain, recipe.device))
    return dataclasses.replace(prepared, unplanned_step_us=estimated_us, is_reference_timed=plain.step_us is not None)


def may_be_probed(model: nn.Module, sample: Sample, graph: Graph) -> bool:
    """Return whether operators are run one by one: those of a model without weights only if its step could run here."""
    if not is_fake(model, sample):
        return True
    if simulate(graph, identity_program(graph)).peak_bytes > available(device_of(model)).free_bytes:
        return False
    estimated_us = roofline_times(graph)
    by_signature = {each.signature: estimated_us[each.name] for each in graph.operations if each.signature}
    return sum(by_signature.values()) < _LONGEST_PROBING_S * 1e6


def _all(graph: Graph) -> tuple[Operation, ...]:
    return (*graph.operations, *graph.alternatives)


def _compile_now(joint: Joint, like: Likenesses, recipe: Recipe, *, timed: bool, likely_in_place: bool) -> None:
    """Compile the fused kernels whose costs are measured before there is a plan."""
    stretches = stretches_in(joint.graph_module.graph, alternatives=timed)
    over = _likely_over(lower(joint)) if stretches and likely_in_place else frozenset()
    now = [each for each in stretches if each not in like]
    compile_all([each.in_place or each if each in over else each for each in now], recipe.progress)
    compile_all([each for each in now if each.stand_in is None])  # whose other form was rejected


def _probing_room(
    model: nn.Module, graph: Graph, memory: OptimizerMemory, recipe: Recipe, limit_bytes: int | None
) -> int | None:
    """How much a probe may allocate, so that it stays inside the budget with what is live already; None: no budget.

    A megabyte in any case: libraries take fixed amounts for the smallest calls, which no guess from their size bounds.
    """
    if limit_bytes is None:
        if recipe.budget is None or recipe.is_for_process or recipe.device is not None:
            return None
        limit_bytes = _least_limit_bytes(graph, memory, recipe)
    present = {*graph.resident}
    resident_bytes = sum(graph.storages[each].size_bytes for each in present)
    left_bytes = limit_bytes - resident_bytes - held_gradient_bytes(model) - memory.state_bytes
    return max(_LEAST_ROOM_BYTES, left_bytes)


def held_gradient_bytes(model: nn.Module) -> int:
    """Return what gradients of an earlier step take: they stay while a step is run to be timed."""
    return storage_bytes([each.grad for each in model.parameters() if each.grad is not None])


def _least_limit_bytes(graph: Graph, memory: OptimizerMemory, recipe: Recipe) -> int:
    """A budget in bytes, or what it is at the least while no workspace is known."""
    if recipe.budget != "smallest":
        peak_bytes = simulate(graph, identity_program(graph), optimizer=memory).peak_bytes
        return budget_bytes(recipe.budget, peak_bytes)
    ending = {*graph.resident, *graph.held}
    held_bytes = sum(graph.storages[each].size_bytes for each in ending)
    resident = set(graph.resident)
    working_sets = (
        sum(graph.storages[index].size_bytes for index in {*each.inputs, *each.outputs} - resident)
        for each in graph.operations
    )
    resident_bytes = sum(graph.storages[each].size_bytes for each in resident)
    return memory.state_bytes + max(held_bytes, resident_bytes + max(working_sets, default=0))


def with_step_times(
    model: nn.Module,
    joint: Joint,
    sample: Sample,
    prepared: Prepared,
    recipe: Recipe,
    program: Program,
    limit_bytes: int | None = None,
    *,
    is_warm: bool = False,
) -> Prepared:
    """Run steps of a program and time its operators, inside the limit, see `execute/timed_step.py`.

    Without a limit, the peak of the program is one. Where the memory is not there, nothing is run. `is_warm` says that
    steps of the model ran just before.
    """
    peak_bytes = prepared.peak_bytes(program)
    gradient_bytes = held_gradient_bytes(model)
    more_bytes = peak_bytes - prepared.resident_bytes - prepared.optimizer.state_bytes
    if not prepared.may_be_timed or more_bytes > _FREE_SHARE * available(device_of(model)).free_bytes:
        return prepared
    start = time.monotonic()
    limit = Limit(
        limit_bytes=max(peak_bytes, limit_bytes or 0),
        external_bytes=prepared.optimizer.state_bytes + gradient_bytes,
        workspace_bytes=prepared.costs.workspace_bytes,
    )
    if not prepared.seen.covers(prepared.graph, program):
        options: dict[str, Any] = {"limit": limit, "like": prepared.like, "is_warm": is_warm}
        seen = step_times(joint.graph_module, prepared.graph, program, model, sample, **options)
        seen = prepared.seen.with_others(seen) if prepared.seen.times_us else seen
        seen.keep(CostCache(device_name(device_of(model))))
        prepared = _with_times(dataclasses.replace(prepared, seen=seen), recipe)
    plain_us = _plain_us(prepared, model, sample, limit.limit_bytes)
    return dataclasses.replace(
        prepared,
        unplanned_step_us=None if plain_us is None else _plain_step_us(prepared, plain_us),
        is_reference_timed=True,
        seconds=prepared.seconds + time.monotonic() - start,
    )


def _with_times(prepared: Prepared, recipe: Recipe) -> Prepared:
    """The same with times of all operations, as far as steps have shown them."""
    graph, seen = prepared.graph, prepared.seen
    if recipe.device is not None or not seen.times_us:
        fresh_us: Mapping[str, float] = roofline_times(graph, recipe.device)
        in_place_us = fresh_us
    else:
        times = with_estimates(graph, seen, prepared.like)
        fresh_us, in_place_us = times.fresh_us, times.in_place_us
    impossible = {each.name for each in graph.alternatives if not _may_be_used(each, prepared)}
    fresh_us = {**fresh_us, **dict.fromkeys(impossible, math.inf)}
    in_place_us = {**in_place_us, **dict.fromkeys(impossible & in_place_us.keys(), math.inf)}
    costs = Costs(
        time_us=[fresh_us.get(name, in_place_us.get(name, 0.0)) for name in _names(graph)],
        in_place_us=[in_place_us.get(name, fresh_us.get(name, 0.0)) for name in _names(graph)],
        workspace_bytes=prepared.costs.workspace_bytes,
    )
    return dataclasses.replace(prepared, costs=costs)


def _may_be_used(variant: Operation, prepared: Prepared) -> bool:
    """Return whether a variant is certain to be exact, or was seen to be; kernels only where they are compiled."""
    operator = find_lean_operator(variant.technique)
    if variant.signature in prepared.seen.unequal:
        return False
    if operator.certain or variant.signature in prepared.seen.equal:
        return True
    return not operator.exact and prepared.may_be_timed


def _plain_us(
    prepared: Prepared, model: nn.Module, sample: Sample, limit_bytes: int | None
) -> Mapping[str, float] | None:
    """Microseconds of the eager run's operations before the graph was rewritten, by name; None if it was not.

    Where the unplanned step fits the limit it is run; otherwise operators that are not in the rewritten graph are run
    alone, each by itself.
    """
    plain = prepared.plain
    if plain is None:
        return None
    if plain.step_us is not None:
        return {}
    graph = prepared.eager
    cache = CostCache(device_name(device_of(model)))
    kept = SeenTimes.kept(graph, cache)
    if kept.covers(graph, unplanned_program(graph)):
        return own_times_of(graph, kept)
    if limit_bytes is None or prepared.unplanned_peak_bytes <= limit_bytes:
        seen = own_times(plain.module, graph, model, sample, steps=3, time_limit_s=_PLAIN_STEPS_S)
        seen.keep(cache)
        return own_times_of(graph, seen)
    common = set() if plain.is_other else {each.name for each in prepared.graph.operations}
    gone = [each for each in graph.operations if each.signature and each.name not in common]
    room_bytes = max(0, limit_bytes - prepared.resident_bytes - prepared.optimizer.state_bytes)
    wanted = [each.signature for each in gone]
    costs = measured_costs(wanted, device=device_of(model), timed=True, room_bytes=room_bytes)
    estimated_us = roofline_times(graph)
    return {
        each.name: estimated_us[each.name]
        if (cost := costs.get(each.signature)) is None or cost.time_us is None
        else cost.time_us
        for each in gone
    }


def _plain_step_us(prepared: Prepared, plain_us: Mapping[str, float]) -> float:
    """Return what a step takes before it is rewritten."""
    assert prepared.plain is not None
    if prepared.plain.step_us is not None:
        return prepared.plain.step_us
    if prepared.plain.is_other:
        return sum(plain_us.values())
    names = _names(prepared.graph)
    own_us = _own_us(
        prepared.graph,
        dict(zip(names, prepared.costs.time_us, strict=True)),
        dict(zip(names, prepared.costs.in_place_us, strict=True)),
    )
    return _before_rewriting(prepared.eager, plain_us, own_us)


def with_compiled_costs(
    model: nn.Module, prepared: Prepared, program: Program, *, everything: bool = False
) -> Prepared | None:
    """The same where stretches take more memory than was assumed, in the form in which a program has them.

    None if nothing is new. Compiled and measured here are the forms that the program runs of stretches, see Note [Over
    the first] in `ops/stretch.py`, and of what was put off, see Note [Like others] in `ops/likeness.py`, everything if
    that is asked for.
    """
    operations = (*prepared.graph.operations, *prepared.graph.alternatives)
    runs = {each for each in (*program.forward, *program.backward) if isinstance(each, Compute)}
    ran = {(operations[run.operation].target, run.in_place) for run in runs}
    known = prepared.put_off if everything else prepared.put_off & {target for target, _ in ran}
    ran |= {(target, False) for target in known if (target, True) not in ran}
    stretches = [(place, form) for place, each in enumerate(operations) for form in _forms_of(each.target, ran)]
    if not stretches or not prepared.is_measured:
        return None
    compile_all(form for _, form in stretches)
    signatures = [(place, with_operator(operations[place].signature, form)) for place, form in stretches]
    costs = measured_costs({signature for _, signature in signatures}, device=device_of(model))
    workspaces = list(prepared.costs.workspace_bytes)
    for place, signature in signatures:
        if signature in costs:
            workspaces[place] = max(workspaces[place], costs[signature].workspace_bytes)
    if not known and workspaces == list(prepared.costs.workspace_bytes):
        return None
    changed = dataclasses.replace(prepared.costs, workspace_bytes=workspaces)
    return dataclasses.replace(prepared, costs=changed, put_off=prepared.put_off - known)


def _forms_of(target: str, ran: Collection[tuple[str, bool]]) -> Iterator[Stretch]:
    """The forms of a stretch that are run; `ran` has targets, and whether in place."""
    own = find_function(target)
    if not isinstance(own, Stretch):
        return
    if (target, True) in ran and own.in_place is not None:
        yield own.in_place
    if (target, False) in ran:
        yield own


@dataclasses.dataclass(frozen=True, kw_only=True)
class Traced:
    """A trace as the eager run computes it, before techniques rewrite it."""

    module: fx.GraphModule
    graph: Graph
    step_us: float | None = None  # of a real step, if some were run and little of them was around the operators
    is_other: bool = False  # another trace than the one that is planned, as that of another layout

    @classmethod
    def of(cls, joint: Joint) -> "Traced":
        graph = fx.Graph()
        copied: dict[fx.Node, fx.Node] = {}
        output: Any = graph.graph_copy(joint.graph_module.graph, copied)
        own = joint.graph_module.graph.output_node()
        graph.output(output).meta.update(own.meta)
        return cls(module=fx.GraphModule(joint.graph_module, graph), graph=lower(joint))

    def is_rewritten_as(self, graph: Graph) -> bool:
        """Whether a graph has other operations of the model's own."""
        return [each.name for each in self.graph.operations] != [each.name for each in graph.operations]


def _with_costs(
    graph: Graph, costs: Mapping[str, OperatorCost], elsewhere: Capability | None
) -> tuple[Graph, list[int]]:
    """A graph with the sizes its operators were seen to make, and the workspace of each; elsewhere, by its rules."""
    if elsewhere is not None:
        return graph, [*library_bytes(graph, elsewhere.version).lowest, *[0] * len(graph.alternatives)]
    graph = with_real_sizes(graph, costs)
    return graph, [workspace_bytes(graph, each, costs) for each in (*graph.operations, *graph.alternatives)]


def _put_off(graph: fx.Graph) -> Likenesses:
    """Stretches that are compiled where a plan has them, see Note [Like others] in `ops/likeness.py`."""
    return {each: like for each, like in likenesses(alternatives_in(graph)).items() if not each.is_ready_here}


def _likely_over(graph: Graph) -> frozenset[Stretch]:
    """Stretches that a plan is likely to run in nothing but the form that overwrites: what they read dies there."""
    overwritable = graph.overwritable()
    fresh: set[Stretch] = set()
    over: set[Stretch] = set()
    for operation in (*graph.operations, *graph.alternatives):
        stretch = find_function(operation.target)
        if isinstance(stretch, Stretch) and not stretch.is_ready_here:
            (over if operation.name in overwritable else fresh).add(stretch)
    return frozenset(over - fresh)


def _own_us(graph: Graph, fresh_us: Mapping[str, float], in_place_us: Mapping[str, float]) -> dict[str, float]:
    """Microseconds of the model's own operations as the eager run does them, by name."""
    return {
        each.name: fresh_us[each.name] if each.overwrites is None else in_place_us[each.name]
        for each in graph.operations
    }


def _before_rewriting(plain: Graph, plain_us: Mapping[str, float], own_us: Mapping[str, float]) -> float:
    """What a step takes before it is rewritten: what both have as after, the rest scaled as what both have is.

    The two were measured at different moments, when other programs may have left more or less of the machine.
    """
    common_us = sum(own_us[each.name] for each in plain.operations if each.name in own_us)
    twice = plain_us.keys() & own_us.keys()
    scale = sum(own_us[name] for name in twice) / max(sum(plain_us[name] for name in twice), 1e-9) if twice else 1.0
    return common_us + scale * sum(time_us for name, time_us in plain_us.items() if name not in own_us)


def _rewrites(plain: Graph, graph: Graph) -> tuple[str, ...]:
    """Lean operators that stand among the model's own operations."""
    own = {name_of(function): each.name for each in LEAN_OPERATORS for function in each.functions}
    found = {own[each.target] for each in graph.operations if each.target in own}
    return tuple(sorted(found - {own.get(each.target) for each in plain.operations}))


def _names(graph: Graph) -> list[str]:
    return [each.name for each in (*graph.operations, *graph.alternatives)]


def step_optimizer_memory(
    optimizer: OptimizerLike | None, model: nn.Module, graph: Graph, target: Device | None
) -> OptimizerMemory:
    """What an optimizer keeps and needs for the parameters that get a gradient."""
    if optimizer is None:
        return OptimizerMemory()
    trained = {graph.storages[parameter].name for parameter, _ in graph.trained}
    return optimizer_memory(
        optimizer,
        list(model.parameters()),
        for_cuda=is_for_accelerator(model, target),
        without_gradient=[parameter for name, parameter in model.named_parameters() if name not in trained],
    )


def step_loss_memory(
    model: nn.Module, joint: Joint, sample: Sample, graph: Graph, memory: OptimizerMemory, recipe: Recipe
) -> LossMemory | None:
    """Return the memory of a loss outside of the model; None if there is none, or none that is counted."""
    if recipe.loss is None:
        return None
    room_bytes = None
    if recipe.budget not in (None, "smallest", AVAILABLE) and not is_fraction(recipe.budget):
        room_bytes = _probing_room(model, graph, memory, recipe, budget_bytes(recipe.budget, 0))
    return loss_memory(recipe.loss, model, sample, joint, graph, device=recipe.device, room_bytes=room_bytes)


def with_beside(memory: OptimizerMemory, recipe: Recipe) -> OptimizerMemory:
    """What lives beside the model all along counts as optimizer state does."""
    return dataclasses.replace(memory, state_bytes=memory.state_bytes + recipe.external_bytes)
