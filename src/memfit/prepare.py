"""A traced call made ready for planning: lowered, with the sizes, workspaces and times of its operations."""

import contextlib
import dataclasses
import math
import time
from collections.abc import Collection, Iterator, Mapping
from typing import Any

import psutil
from torch import fx, nn

from memfit.capture.alternatives import extend
from memfit.capture.fuse import alternatives_in, stretches_in
from memfit.capture.lower import lower
from memfit.capture.sample import Sample
from memfit.capture.trace import Joint, traced
from memfit.collecting import collected_later
from memfit.describe import device_of, granularity_bytes, is_fake, is_for_cuda
from memfit.execute.timing import is_slow, operation_times, own_times
from memfit.ir import Compute, Graph, OptimizerMemory, Program
from memfit.measure.allocations import Quiet, operator_costs, with_real_sizes, workspace_bytes
from memfit.measure.cost import OperatorCost
from memfit.measure.devices import Device
from memfit.measure.optimizer import OptimizerLike, optimizer_memory
from memfit.measure.probe import measured_costs
from memfit.measure.roofline import roofline_times
from memfit.measure.signature import with_operator
from memfit.ops.likeness import Likenesses, likenesses
from memfit.ops.registry import LEAN_OPERATORS, find_function, find_lean_operator, name_of
from memfit.ops.stretch import STRETCH, Stretch, compile_all
from memfit.plan.captured import CapturedStep
from memfit.plan.identity import identity_program
from memfit.plan.problem import Costs, handed_out_together
from memfit.plan.simulate import simulate
from memfit.recipe import Recipe, without_channels_last

_FEW_GONE = 20  # operations that do not look alike and are run alone rather than in a step
_PLAIN_STEPS_S = 2.0  # for steps as they are before the graph is rewritten


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
    times_measured: bool
    rewrites: tuple[str, ...]
    seconds: float  # that tracing and measuring took
    quiet: Quiet
    put_off: frozenset[str] = frozenset()  # stretches that are not compiled yet, and whose workspace is not known

    def peak_bytes(self, program: Program) -> int:
        return simulate(
            self.graph,
            program,
            workspace_bytes=self.costs.workspace_bytes,
            optimizer=self.optimizer,
            granularity_bytes=self.granularity_bytes,
        ).peak_bytes

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
        )

    @property
    def persistent_bytes(self) -> int:
        """Live when the step ends: parameters, buffers, gradients, batch, outputs, optimizer state."""
        ending = {*self.graph.resident, *self.graph.held}
        return sum(self.graph.storages[each].size_bytes for each in ending) + self.optimizer.state_bytes


def traced_for(
    model: nn.Module, sample: Sample, recipe: Recipe, *, with_hooks: bool = True
) -> contextlib.AbstractContextManager[Joint]:
    """Trace as a recipe wants it."""
    return traced(
        model,
        sample,
        backward_from=recipe.backward_from,
        outputs=recipe.outputs,
        with_hooks=with_hooks,
        channels_last=recipe.channels_last,
    )


def traced_as_eager(model: nn.Module, sample: Sample, recipe: Recipe, *, with_hooks: bool = True) -> "Traced | None":
    """The step in the layout that the eager run has, to compare with; None if a recipe keeps to that."""
    if not recipe.channels_last:
        return None
    with traced_for(model, sample, without_channels_last(recipe), with_hooks=with_hooks) as joint:
        return Traced.of(joint)


def planned_graph(joint: Joint, recipe: Recipe) -> Graph:
    """The graph that programs of a recipe are written for. Changes the traced graph: once for a trace."""
    with collected_later():
        extend(joint, recipe.allow)
        return handed_out_together(lower(joint))


def prepare(
    model: nn.Module,
    joint: Joint,
    sample: Sample,
    recipe: Recipe,
    *,
    before: "Traced | None" = None,
    timed: bool = True,
    known: Quiet | None = None,
    may_put_off: bool = False,
    unplanned: "Traced | None" = None,
) -> Prepared:
    """Lower a traced call and measure what its operations cost.

    `before` is the trace as it was, if `planned_graph` has been called since, `unplanned` what the eager run does, if
    that is something else. `timed=False` estimates times, so that the step itself is not run. `known` is what is known
    of a call of other sizes. `may_put_off` is for callers that ask for `with_compiled_costs` before they believe a
    program.
    """
    start = time.monotonic()
    plain = unplanned or before or Traced.of(joint)
    if before is None:
        with collected_later():
            extend(joint, recipe.allow)
    memory = with_beside(step_optimizer_memory(recipe.optimizer, model, plain.graph, recipe.device), recipe)
    measured = recipe.device is None and could_run_here(plain.graph, memory)
    runs_here = timed and measured and not is_fake(model, sample)
    like = _put_off(joint.graph_module.graph) if runs_here and may_put_off else {}
    if measured:
        stretches = stretches_in(joint.graph_module.graph, alternatives=timed)
        over = _likely_over(lower(joint)) if stretches and runs_here and may_put_off else frozenset()
        now = [each for each in stretches if each not in like]
        compile_all([each.in_place or each if each in over else each for each in now], recipe.progress)
        compile_all([each for each in now if each.stand_in is None])  # whose other form was rejected
    eager = lower(joint)
    device = device_of(model)
    granularity = granularity_bytes(model, recipe.device)
    quiet = frozenset() if known is None else known.in_graph(eager)
    stretched = [each for each in eager.alternatives if each.technique == STRETCH.name]
    put_off = frozenset(name_of(stretch) for stretch in like)
    quiet |= {each.name for each in stretched if not timed or each.target in put_off}  # not compiled yet
    costs = operator_costs(eager, device, recipe.progress, quiet) if measured else {}
    sized, workspaces = _with_costs(eager, costs)
    fresh_us, in_place_us = _times(joint.graph_module, sized, model, sample, recipe, like, runs_here=runs_here)
    step_us: float | None = None
    if plain.is_rewritten_as(eager):
        plain_costs = operator_costs(plain.graph, device, recipe.progress, quiet) if measured else {}
        sized_plain, plain_workspaces = _with_costs(plain.graph, plain_costs)
        if plain.step_us is not None:
            step_us = plain.step_us
        else:
            rewritten = None if unplanned else eager
            plain_us = _step_us(plain, sized_plain, rewritten, model, sample, recipe, runs_here=runs_here)
            own_us = _own_us(sized, fresh_us, in_place_us)
            step_us = sum(plain_us.values()) if unplanned else _before_rewriting(plain.graph, plain_us, own_us)
    else:
        sized_plain, plain_workspaces = sized, workspaces
    unplanned_step = simulate(
        sized_plain,
        identity_program(sized_plain),
        workspace_bytes=plain_workspaces,
        optimizer=memory,
        granularity_bytes=granularity,
    )
    graph = handed_out_together(sized)
    workspace_by_name = dict(zip(_names(sized), workspaces, strict=True))
    return Prepared(
        graph=graph,
        costs=Costs(
            time_us=[fresh_us.get(name, in_place_us.get(name, 0.0)) for name in _names(graph)],
            in_place_us=[in_place_us.get(name, fresh_us.get(name, 0.0)) for name in _names(graph)],
            workspace_bytes=[workspace_by_name[name] for name in _names(graph)],
        ),
        eager=sized_plain,
        eager_workspace_bytes=tuple(plain_workspaces),
        optimizer=memory,
        granularity_bytes=granularity,
        unplanned_peak_bytes=unplanned_step.peak_bytes,
        unplanned_step_us=step_us,
        is_measured=measured,
        times_measured=runs_here,
        rewrites=_rewrites(plain.graph, graph),
        seconds=joint.seconds + time.monotonic() - start,
        quiet=Quiet.of(eager, costs),
        put_off=put_off,
    )


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


def _with_costs(graph: Graph, costs: Mapping[str, OperatorCost]) -> tuple[Graph, list[int]]:
    """A graph with the sizes its operators were seen to make, and the workspace of each."""
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


def _times(
    module: fx.GraphModule,
    graph: Graph,
    model: nn.Module,
    sample: Sample,
    recipe: Recipe,
    like: Likenesses,
    *,
    runs_here: bool,
) -> tuple[Mapping[str, float], Mapping[str, float]]:
    """Microseconds by name, of runs into new memory and of runs in place."""
    if runs_here:
        times = operation_times(module, graph, model, sample, like=like)
        return times.fresh_us, times.in_place_us
    estimated = {**roofline_times(graph, recipe.device), **dict.fromkeys(_uncertain(graph), math.inf)}
    return estimated, estimated


def _step_us(
    plain: Traced,
    graph: Graph,
    rewritten: Graph | None,
    model: nn.Module,
    sample: Sample,
    recipe: Recipe,
    *,
    runs_here: bool,
) -> Mapping[str, float]:
    """Microseconds of the operations of a step before the graph is rewritten, by name.

    Where a step takes seconds, only of those few that are not in the rewritten graph, each run alone; of all if none
    was rewritten into another.
    """
    if not runs_here:
        return roofline_times(graph, recipe.device)
    kept = set() if rewritten is None else {each.name for each in rewritten.operations}
    gone = [each for each in graph.operations if each.signature and each.name not in kept]
    signatures = {each.name: each.signature for each in gone}
    if rewritten is None or len(set(signatures.values())) > _FEW_GONE or not is_slow(graph, _PLAIN_STEPS_S):
        return own_times(plain.module, graph, model, sample, steps=3, time_limit_s=_PLAIN_STEPS_S)
    costs = measured_costs(signatures.values(), device=device_of(model), timed=True)
    times_us = {name: costs[signature].time_us for name, signature in signatures.items() if signature in costs}
    return {name: time_us for name, time_us in times_us.items() if time_us is not None}


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


def _uncertain(graph: Graph) -> list[str]:
    """Alternatives that may be used only where they were seen to make the same bits."""
    return [each.name for each in graph.alternatives if not find_lean_operator(each.technique).certain]


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
        for_cuda=is_for_cuda(model, target),
        without_gradient=[parameter for name, parameter in model.named_parameters() if name not in trained],
    )


def with_beside(memory: OptimizerMemory, recipe: Recipe) -> OptimizerMemory:
    """What lives beside the model all along counts as optimizer state does."""
    return dataclasses.replace(memory, state_bytes=memory.state_bytes + recipe.beside_bytes)


def could_run_here(graph: Graph, optimizer: OptimizerMemory) -> bool:
    """Whether this machine has the memory for the step itself, and so for its operators."""
    least_bytes = simulate(graph, identity_program(graph), optimizer=optimizer).peak_bytes
    return least_bytes < int(psutil.virtual_memory().available)
