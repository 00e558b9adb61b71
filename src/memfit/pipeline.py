"""From a traced call to a plan: lower, measure, solve. The order of composition, in one place."""

import contextlib
import dataclasses
import hashlib
import math
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Protocol

import psutil
import torch
from torch import fx, nn
from torch.utils import _pytree as pytree

from memfit import _torch
from memfit.capture.alternatives import extend
from memfit.capture.lower import lower
from memfit.capture.sample import Sample
from memfit.capture.trace import Joint, traced
from memfit.errors import InfeasibleBudget, InvalidBudget, InvalidInput
from memfit.execute.timing import operation_times, own_times
from memfit.ir import Compute, Graph, Operation, OptimizerMemory, Program
from memfit.measure.cost import OperatorCost
from memfit.measure.devices import CUDA_GRANULARITY_BYTES, Device
from memfit.measure.optimizer import OptimizerLike, is_optimizer_name, optimizer_memory, optimizer_name
from memfit.measure.probe import Progress, measured_costs
from memfit.measure.roofline import roofline_times
from memfit.ops.registry import LEAN_OPERATORS, find_lean_operator, name_of
from memfit.plan.captured import CapturedStep
from memfit.plan.expand import program_of
from memfit.plan.identity import identity_program
from memfit.plan.plan import Plan, fates_of
from memfit.plan.problem import Costs, Problem, handed_out_together
from memfit.plan.select import Selection, selected_values
from memfit.plan.simulate import simulate
from memfit.plan.solve import Planner, Report, Solution
from memfit.spelling import suggestion
from memfit.units import format_bytes, parse_bytes

Budget = int | float | str | None

EXACT = ("recompute", "lean")  # what plans may do unless told otherwise: the numbers stay the same bit for bit
TECHNIQUES = {
    "recompute": "compute values of the forward pass again",
    "lean": "operators that keep less and give the same bits",
    "chunk": "linear and cross-entropy in chunks: rounds differently, as closely",
    "offload": "kept activations in the next memory tier, host memory for a GPU, a file in TMPDIR for a CPU: exact",
    "16-bit": "kept activations in 16 bits: lossy",
    "8-bit": "kept activations in 8 bits: lossy",
    "4-bit": "kept activations in 4 bits: lossy",
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Recipe:
    """Everything that decides a plan but the model and the sample."""

    budget: Budget = None
    optimizer: OptimizerLike | None = None
    allow: tuple[str, ...] = EXACT
    recompute: tuple[Selection, ...] = ()
    keep: tuple[Selection, ...] = ()
    backward_from: str = "auto"
    outputs: str = "all"
    device: Device | None = None  # None: where the model is
    beside_bytes: int = 0  # live all along and not the model's: gradients of earlier batches, other models
    time_limit_s: float = 8.0
    report: Report | None = None
    progress: Progress | None = None

    @property
    def is_unplanned(self) -> bool:
        return self.budget is None and not self.recompute and not self.rewrites

    @property
    def rewrites(self) -> tuple[str, ...]:
        """Techniques that change the graph before it is planned."""
        return tuple(each for each in self.allow if each == "chunk")

    def __post_init__(self) -> None:
        check_techniques(self.allow)
        check_budget(self.budget)


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
    unplanned_step_us: float | None  # of its operators; None: those of the graph, which was not rewritten
    times_measured: bool
    rewrites: tuple[str, ...]
    seconds: float
    quiet: "Quiet"

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


@dataclasses.dataclass(frozen=True, kw_only=True)
class Quiet:
    """Operations that were seen to allocate nothing but their results.

    In a call of other sizes with the same operations they are not run to learn it again: what allocates nothing inside
    at one size does not at another. Those that do are run at every size.
    """

    structure: tuple[tuple[str, str], ...]  # names and targets of all operations and alternatives
    names: frozenset[str]

    @classmethod
    def of(cls, traced: Graph, costs: Mapping[str, OperatorCost]) -> "Quiet":
        return cls(
            structure=_structure(traced),
            names=frozenset(each.name for each in _all(traced) if _is_quiet(traced, each, costs.get(each.signature))),
        )

    def in_graph(self, graph: Graph) -> frozenset[str]:
        return self.names if _structure(graph) == self.structure else frozenset()


def _is_quiet(graph: Graph, operation: Operation, cost: OperatorCost | None) -> bool:
    sizes = tuple(graph.storages[index].size_bytes for index in operation.outputs)
    return cost is not None and not cost.workspace_bytes and tuple(cost.output_bytes) == sizes


def _structure(graph: Graph) -> tuple[tuple[str, str], ...]:
    return tuple((each.name, each.target) for each in _all(graph))


def _all(graph: Graph) -> tuple[Operation, ...]:
    return (*graph.operations, *graph.alternatives)


def check_techniques(names: Sequence[str]) -> None:
    """Refuse a technique that does not exist, and say what the others mean."""
    unknown = [each for each in names if each not in TECHNIQUES]
    if unknown:
        known = "; ".join(f"{name!r} ({meaning})" for name, meaning in TECHNIQUES.items())
        near = suggestion(unknown[0], TECHNIQUES)
        raise InvalidInput(f"unknown technique {unknown[0]!r}{near}; known are {known}")


def check_budget(budget: Budget) -> None:
    """Refuse what cannot be a budget before anything is captured."""
    if budget is None or budget == "smallest":
        return
    if isinstance(budget, float) and budget <= 1:
        if not budget > 0:
            raise InvalidBudget(f"a budget is a positive number of bytes or a fraction up to 1, {budget!r} was given")
        return
    parse_bytes(budget)


def check_fractions(fractions: Sequence[float]) -> None:
    """Refuse what cannot be a part of the activations."""
    for fraction in fractions:
        if not 0 < fraction <= 1:
            raise InvalidBudget(f"a fraction of the activation part is above 0 and at most 1, {fraction!r} was given")


def budget_bytes(budget: Budget, unplanned_peak_bytes: int) -> int:
    """A budget in bytes: a fraction is one of the unplanned peak."""
    assert budget is not None
    if isinstance(budget, float) and budget <= 1:
        return int(budget * unplanned_peak_bytes)
    return parse_bytes(budget)


def traced_for(
    model: nn.Module, sample: Sample, recipe: Recipe, *, with_hooks: bool = True
) -> contextlib.AbstractContextManager[Joint]:
    """Trace as a recipe wants it."""
    return traced(model, sample, backward_from=recipe.backward_from, outputs=recipe.outputs, with_hooks=with_hooks)


def planned_graph(joint: Joint, recipe: Recipe) -> Graph:
    """The graph that programs of a recipe are written for. Changes the traced graph: once for a trace."""
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
    like: Quiet | None = None,
) -> Prepared:
    """Lower a traced call and measure what its operations cost.

    `before` is the trace as it was, if `planned_graph` has been called since. `timed=False` estimates times, so that
    the step itself is not run. `like` is what is known of a call of other sizes.
    """
    start = time.monotonic()
    plain = before or Traced.of(joint)
    if before is None:
        extend(joint, recipe.allow)
    eager = lower(joint)
    memory = with_beside(step_optimizer_memory(recipe.optimizer, model, plain.graph, recipe.device), recipe)
    measured = recipe.device is None and could_run_here(plain.graph, memory)
    device = device_of(model)
    granularity = granularity_bytes(model, recipe.device)
    quiet = frozenset() if like is None else like.in_graph(eager)
    costs = operator_costs(eager, device, recipe.progress, quiet) if measured else {}
    sized, workspaces = _with_costs(eager, costs)
    runs_here = timed and measured and not is_fake(model, sample)
    fresh_us, in_place_us = _times(joint.graph_module, sized, model, sample, recipe, runs_here=runs_here)
    step_us: float | None = None
    if plain.is_rewritten_as(eager):
        plain_costs = operator_costs(plain.graph, device, recipe.progress, quiet) if measured else {}
        sized_plain, plain_workspaces = _with_costs(plain.graph, plain_costs)
        plain_us = _step_us(plain, sized_plain, model, sample, recipe, runs_here=runs_here)
        step_us = _before_rewriting(plain_us, _own_us(sized, fresh_us, in_place_us))
    else:
        sized_plain, plain_workspaces = sized, workspaces
    unplanned = simulate(
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
        unplanned_peak_bytes=unplanned.peak_bytes,
        unplanned_step_us=step_us,
        times_measured=runs_here,
        rewrites=_rewrites(plain.graph, graph),
        seconds=time.monotonic() - start,
        quiet=Quiet.of(eager, costs),
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Traced:
    """A trace as the eager run computes it, before techniques rewrite it."""

    module: fx.GraphModule
    graph: Graph

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
    return graph, [workspace_bytes(graph, each, costs) for each in _all(graph)]


def _times(
    module: fx.GraphModule, graph: Graph, model: nn.Module, sample: Sample, recipe: Recipe, *, runs_here: bool
) -> tuple[Mapping[str, float], Mapping[str, float]]:
    """Microseconds by name, of runs into new memory and of runs in place."""
    if runs_here:
        times = operation_times(module, graph, model, sample)
        return times.fresh_us, times.in_place_us
    estimated = {**roofline_times(graph, recipe.device), **dict.fromkeys(_uncertain(graph), math.inf)}
    return estimated, estimated


def _step_us(
    plain: Traced, graph: Graph, model: nn.Module, sample: Sample, recipe: Recipe, *, runs_here: bool
) -> Mapping[str, float]:
    """Microseconds of the operations of a step before the graph is rewritten, by name."""
    if runs_here:
        return own_times(plain.module, graph, model, sample, steps=3, time_limit_s=2.0)
    return roofline_times(graph, recipe.device)


def _own_us(graph: Graph, fresh_us: Mapping[str, float], in_place_us: Mapping[str, float]) -> dict[str, float]:
    """Microseconds of the model's own operations as the eager run does them, by name."""
    return {
        each.name: fresh_us[each.name] if each.overwrites is None else in_place_us[each.name]
        for each in graph.operations
    }


def _before_rewriting(plain_us: Mapping[str, float], own_us: Mapping[str, float]) -> float:
    """What a step takes before it is rewritten: what both have as after, the rest scaled as what both have is.

    The two were measured at different moments, when other programs may have left more or less of the machine.
    """
    common = plain_us.keys() & own_us.keys()
    common_us = sum(own_us[name] for name in common)
    scale = common_us / max(sum(plain_us[name] for name in common), 1e-9)
    return common_us + scale * sum(time_us for name, time_us in plain_us.items() if name not in common)


def _rewrites(plain: Graph, graph: Graph) -> tuple[str, ...]:
    """Lean operators that stand among the model's own operations."""
    own = {name_of(function): each.name for each in LEAN_OPERATORS for function in each.functions}
    found = {own[each.target] for each in graph.operations if each.target in own}
    return tuple(sorted(found - {own.get(each.target) for each in plain.operations}))


def make_planner(model: nn.Module, prepared: Prepared, recipe: Recipe) -> Planner:
    """A planner for all budgets of one captured step."""
    problem = Problem(
        prepared.graph,
        prepared.costs,
        optimizer=prepared.optimizer,
        granularity_bytes=prepared.granularity_bytes,
        runs_again="recompute" in recipe.allow,
    )
    modules = dict(model.named_modules())
    dropped = selected_values(problem, recipe.recompute, modules, "recompute")
    kept = selected_values(problem, recipe.keep, modules, "keep") & ~dropped | problem.not_made_again
    return Planner(problem, kept=kept, dropped=dropped)


def solve(planner: Planner, prepared: Prepared, recipe: Recipe) -> tuple[Solution, int | None]:
    """The plan for the recipe's budget, and that budget in bytes."""
    if recipe.budget is None:
        return planner.by_hand(), None
    if recipe.budget == "smallest":
        return _smallest(planner, prepared, recipe)
    limit = budget_bytes(recipe.budget, prepared.unplanned_peak_bytes)
    try:
        return planner.solve(limit, time_limit_s=recipe.time_limit_s, report=recipe.report), limit
    except InfeasibleBudget:
        smallest, smallest_bytes = _smallest(planner, prepared, recipe)
        if smallest_bytes <= limit:
            return smallest, limit
        raise _infeasible(planner, recipe, limit, smallest, smallest_bytes) from None


def _smallest(planner: Planner, prepared: Prepared, recipe: Recipe) -> tuple[Solution, int]:
    """The lowest peak that can be found, in half of the time, and then the fastest plan of that peak in the rest."""
    end = time.monotonic() + recipe.time_limit_s
    lowest = planner.smallest(time_limit_s=recipe.time_limit_s / 2)
    simulated_bytes = prepared.peak_bytes(program_of(planner.problem, lowest.expansion))
    limit = max(simulated_bytes, lowest.expansion.peak_bytes)  # the search counts small values a little longer
    if lowest.interrupted:
        return lowest, limit
    planner.found.append(lowest.expansion)  # a start for the search
    try:
        return planner.solve(limit, time_limit_s=end - time.monotonic(), report=recipe.report), limit
    except InfeasibleBudget:  # what was asked for by hand has no plan under the unplanned peak
        return lowest, limit


def make_plan(model: nn.Module, sample: Sample, planner: Planner, prepared: Prepared, recipe: Recipe) -> Plan:
    """Solve, and write down what was found and what is known about it."""
    start = time.monotonic()
    solution, limit = solve(planner, prepared, recipe)
    seconds = prepared.seconds + time.monotonic() - start
    return write_plan(model, sample, planner, prepared, recipe, solution, limit, seconds)


def write_plan(
    model: nn.Module,
    sample: Sample,
    planner: Planner,
    prepared: Prepared,
    recipe: Recipe,
    solution: Solution,
    limit: int | None,
    seconds: float,
) -> Plan:
    """A solution and what is known about it, as a plan."""
    own_us = planner.problem.own_time_us
    step_us = own_us if prepared.unplanned_step_us is None else prepared.unplanned_step_us
    program = program_of(planner.problem, solution.expansion)
    return Plan(
        model=type(model).__name__,
        model_digest=model_digest(model),
        sample=describe_sample(sample),
        torch_version=torch.__version__,
        device=device_of(model) if recipe.device is None else recipe.device.name,
        optimizer=None if recipe.optimizer is None else optimizer_name(recipe.optimizer),
        allow=recipe.allow,
        rewrites=prepared.rewrites,
        outputs=recipe.outputs,
        backward_from=recipe.backward_from,
        budget_bytes=limit,
        peak_bytes=prepared.peak_bytes(program),
        unplanned_peak_bytes=prepared.unplanned_peak_bytes,
        persistent_bytes=prepared.persistent_bytes,
        optimizer_state_bytes=prepared.optimizer.state_bytes,
        floor_bytes=planner.floor_bytes(),
        floor_operation=floor_name(planner),
        step_us=step_us,
        extra_us=solution.expansion.extra_us + own_us - step_us,
        bound_us=solution.bound_us + own_us - step_us,
        times_measured=prepared.times_measured,
        plan_seconds=seconds,
        log=solution.log,
        fates=fates_of(prepared.graph, program),
        program=program,
        step=prepared.captured_step(),
    )


def recipe_of(plan: Plan) -> Recipe:
    """What a plan was made by, as far as it is written down."""
    named = plan.optimizer if is_optimizer_name(plan.optimizer) else None
    limit = plan.budget_bytes if plan.budget_bytes is not None else plan.peak_bytes
    return Recipe(
        budget=limit if named else limit - plan.optimizer_state_bytes,  # what cannot be named cannot be counted again
        optimizer=named,
        allow=plan.allow,
        outputs=plan.outputs,
        backward_from=plan.backward_from,
    )


class Known(Protocol):
    """What is known of a step before it is planned."""

    @property
    def unplanned_peak_bytes(self) -> int: ...

    @property
    def persistent_bytes(self) -> int: ...


def frontier_recipes(recipe: Recipe, known: Known, fractions: Sequence[float]) -> Iterator[Recipe]:
    """One recipe a point of the curve, biggest budget first: what is found at one is a start for the next."""
    part_bytes = known.unplanned_peak_bytes - known.persistent_bytes
    for fraction in sorted(fractions, reverse=True):
        yield dataclasses.replace(recipe, budget=known.persistent_bytes + int(fraction * part_bytes))
    yield dataclasses.replace(recipe, budget="smallest")


def floor_name(planner: Planner) -> str:
    """The operator whose working set no plan can be below, in words."""
    index = planner.floor_operation()
    if index < 0:
        return "the optimizer's step"
    operation = planner.problem.graph.operation(index)
    return f"{operation.target} in {operation.module}" if operation.module else operation.target


def _infeasible(
    planner: Planner, recipe: Recipe, limit: int, smallest: Solution, smallest_bytes: int
) -> InfeasibleBudget:
    share = smallest.expansion.extra_us / planner.problem.own_time_us
    lowering = ", ".join(repr(each) for each in TECHNIQUES if each not in recipe.allow)
    advice = f"give a bigger budget, a smaller batch, or allow more ({lowering})"
    if planner.floor_operation() < 0:  # a smaller batch does not help
        advice = "give a bigger budget, or an optimizer that keeps less"
    return InfeasibleBudget(
        f"no plan of {format_bytes(limit)} was found: the smallest that was needs {format_bytes(smallest_bytes)} "
        f"({share:+.0%} time), and {floor_name(planner)} alone needs {format_bytes(planner.floor_bytes())}; "
        f"{advice}",
        smallest_bytes=smallest_bytes,
        floor_bytes=planner.floor_bytes(),
        operation=floor_name(planner),
    )


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


def is_for_cuda(model: nn.Module, target: Device | None) -> bool:
    """Whether the step would run on a CUDA device."""
    return torch.device(device_of(model)).type == "cuda" if target is None else target.is_cuda


def operator_costs(
    graph: Graph, device: str, progress: Progress | None, quiet: frozenset[str] = frozenset()
) -> dict[str, OperatorCost]:
    """Workspaces and real sizes of all operations that can be run here, but of those that are known to be quiet."""
    wanted = (each.signature for each in _all(graph) if each.signature and each.name not in quiet)
    return measured_costs(wanted, device=device, progress=progress)


def with_real_sizes(graph: Graph, costs: Mapping[str, OperatorCost]) -> Graph:
    """Believe what operators were seen to make more than what the trace says they make."""
    storages = list(graph.storages)
    for operation in graph.operations:
        cost = costs.get(operation.signature)
        if cost is None or len(cost.output_bytes) != len(operation.outputs):
            continue
        for index, size_bytes in zip(operation.outputs, cost.output_bytes, strict=True):
            storages[index] = dataclasses.replace(storages[index], size_bytes=size_bytes)
    return dataclasses.replace(graph, storages=tuple(storages))


def workspace_bytes(graph: Graph, operation: Operation, costs: Mapping[str, OperatorCost]) -> int:
    """What an operation allocates beyond the values in the graph; results nobody asked for included."""
    cost = costs.get(operation.signature)
    if cost is None:
        return 0
    wanted_bytes = sum(graph.storages[index].size_bytes for index in operation.outputs)
    return cost.workspace_bytes + max(0, sum(cost.output_bytes) - wanted_bytes)


def could_run_here(graph: Graph, optimizer: OptimizerMemory) -> bool:
    """Whether this machine has the memory for the step itself, and so for its operators."""
    least_bytes = simulate(graph, identity_program(graph), optimizer=optimizer).peak_bytes
    return least_bytes < int(psutil.virtual_memory().available)


def device_of(model: nn.Module) -> str:
    """Where the model is; one without tensors is on the CPU."""
    tensors = [*model.parameters(), *model.buffers()]
    return str(tensors[0].device) if tensors else "cpu"


def granularity_bytes(model: nn.Module, target: Device | None) -> int:
    """What the allocator rounds every storage up to."""
    return CUDA_GRANULARITY_BYTES if is_for_cuda(model, target) else 1


def is_fake(model: nn.Module, sample: Sample) -> bool:
    """Whether model or sample has no memory."""
    # Not by `detect_fake_mode`: it also finds the mode that is on while a call is traced.
    return any(
        isinstance(each, _torch.FakeTensor) for each in (*model.parameters(), *model.buffers(), *sample.tensors())
    )


def model_digest(model: nn.Module) -> str:
    """A short hash of what a model is made of."""
    described = "\n".join([type(model).__name__, *describe_states(model)])
    return hashlib.sha256(described.encode()).hexdigest()[:16]


def describe_states(model: nn.Module) -> list[str]:
    """Names, dtypes and shapes of all parameters and buffers, and which are trained."""
    states = [*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)]
    return [f"{name}: {_described(state)}{' trained' if state.requires_grad else ''}" for name, state in states]


def describe_sample(sample: Sample) -> str:
    """The arguments of a call, in words."""
    leaves = [each for each in _leaves(sample) if isinstance(each, torch.Tensor)]
    names = sample.leaf_names()
    tensors = [name for name, leaf in zip(names, _leaves(sample), strict=True) if isinstance(leaf, torch.Tensor)]
    named = zip(tensors, leaves, strict=True)
    return ", ".join(_described(leaf) if name.isdigit() else f"{name}: {_described(leaf)}" for name, leaf in named)


def _leaves(sample: Sample) -> list[Any]:
    return pytree.tree_leaves((sample.args, dict(sample.kwargs)))


def _described(tensor: torch.Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)}"
