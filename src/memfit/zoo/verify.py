"""Whether stored plans still are what they say: same graph, same peak.

Note [What is checked]
    The model is built without weights and captured as it is today; plans of one step share the capture. A plan holds
    if the captured graph has the plan's digest, its instructions can be followed in it, and walking them gives the
    stored peak to the byte. On the CPU the walk counts what operators were seen to allocate inside when the plan was
    made, see Note [Stored sizes]; for other devices nothing was measured. Times are not checked.
"""

import dataclasses
import itertools
import time
from collections.abc import Callable, Iterable, Iterator
from importlib.resources.abc import Traversable

import torch
from torch import nn

from memfit.capture.sample import Sample
from memfit.describe import granularity_bytes, model_digest
from memfit.errors import InvalidFile, MemfitError, first_line
from memfit.ir import Graph, OptimizerMemory, Program
from memfit.measure.devices import find_device
from memfit.plan.plan import Plan
from memfit.plan.simulate import simulate
from memfit.plan.validate import check_program
from memfit.prepare import planned_graph, step_optimizer_memory, traced_for
from memfit.recipe import Recipe
from memfit.units import format_bytes
from memfit.zoo import store
from memfit.zoo.entry import Entry

Make = Callable[[Entry], tuple[nn.Module, Sample]]  # the step of an entry, without weights


@dataclasses.dataclass(frozen=True, kw_only=True)
class Verdict:
    """What was found about one plan."""

    name: str
    reason: str  # why it does not hold; empty: it holds
    peak_bytes: int | None  # by simulation; None: not reached
    seconds: float

    @property
    def holds(self) -> bool:
        return not self.reason


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Step:
    """A captured step, ready to walk plans through."""

    model_digest: str
    graph: Graph
    digest: str
    workspace_bytes: tuple[int, ...]
    optimizer: OptimizerMemory
    granularity_bytes: int

    def peak_bytes(self, program: Program) -> int:
        return simulate(
            self.graph,
            program,
            workspace_bytes=self.workspace_bytes,
            optimizer=self.optimizer,
            granularity_bytes=self.granularity_bytes,
        ).peak_bytes


def verify(wanted: Iterable[Entry], make: Make, *, folder: Traversable | None = None) -> Iterator[Verdict]:
    """Check plans one by one; `make` builds the model and sample of an entry without weights.

    `folder` is where the plans are, if not in the package.
    """
    place = store.own_folder() if folder is None else folder
    in_order = sorted(wanted, key=lambda each: repr(each.step))
    for _, group in itertools.groupby(in_order, key=lambda each: each.step):
        yield from _verify_step(list(group), make, place)


def _verify_step(group: list[Entry], make: Make, folder: Traversable) -> Iterator[Verdict]:
    """Plans of one captured step."""
    start = time.monotonic()
    step: _Step | None = None
    problem = ""  # that all plans of this step have
    for entry in group:
        reason, peak_bytes = problem, None
        try:
            plan = store.read_plan(folder, entry)
            if step is None and not problem:
                step = _captured(entry, plan, make, folder)
            if step is not None:
                reason, peak_bytes = _found(entry, plan, step)
        except MemfitError as error:
            reason = first_line(error)
            problem = "" if isinstance(error, InvalidFile) or step is not None else reason
        yield Verdict(name=entry.name, reason=reason, peak_bytes=peak_bytes, seconds=time.monotonic() - start)
        start = time.monotonic()


def _captured(entry: Entry, plan: Plan, make: Make, folder: Traversable) -> _Step:
    device = None if entry.device == "cpu" else find_device(entry.device)
    recipe = Recipe(
        budget=plan.budget_bytes,
        optimizer=plan.optimizer,
        allow=plan.allow,
        outputs=plan.outputs,
        backward_from=plan.backward_from,
        device=device,
    )
    model, sample = make(entry)
    with traced_for(model, sample, recipe) as joint:
        graph = planned_graph(joint, recipe)
    digest = graph.digest()
    workspaces: tuple[int, ...] = ()
    if device is None:
        sizes = store.read_sizes(folder, entry)
        if sizes.fits(graph):  # if not, the digest says so
            graph, workspaces = sizes.applied(graph), sizes.workspace_bytes
    return _Step(
        model_digest=model_digest(model),
        graph=graph,
        digest=digest,
        workspace_bytes=workspaces,
        optimizer=step_optimizer_memory(recipe.optimizer, model, graph, device),
        granularity_bytes=granularity_bytes(model, device),
    )


def _found(entry: Entry, plan: Plan, step: _Step) -> tuple[str, int | None]:
    """Why a plan does not hold, and its peak by simulation."""
    if plan.model_digest != step.model_digest:
        return "the model has other parameters or buffers today", None
    if not step.digest == plan.program.graph_digest == entry.graph_digest:
        versions = f"torch {plan.torch_version} then, {torch.__version__} now"
        return f"the model computes something else today: another graph than was planned for ({versions})", None
    check_program(step.graph, plan.program)
    peak_bytes = step.peak_bytes(plan.program)
    if not peak_bytes == plan.peak_bytes == entry.peak_bytes:
        figures = (peak_bytes, plan.peak_bytes, entry.peak_bytes)
        simulated, planned, listed = map(format_bytes, figures)
        return f"its peak is {simulated} by simulation, {planned} in the plan and {listed} in the list", peak_bytes
    return "", peak_bytes
