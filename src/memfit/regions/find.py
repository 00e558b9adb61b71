"""The largest parts of a model that can be captured, where the model itself cannot.

Note [Which parts]
    From the top down, in the order of the model: a part that is called in one way only, trains, returns nothing
    that gradients do not reach, and can be captured, is a region. Otherwise its own parts are looked at. What runs
    inside a region is not looked at, and neither is what keeps too little to matter.
"""

import contextlib
import dataclasses
import hashlib
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import nn

from memfit.capture.autocast import autocast_state
from memfit.capture.calls import NotedCall, noted_calls
from memfit.capture.gradient_layouts import Starts
from memfit.capture.hooks import check_no_inner_hooks
from memfit.capture.sample import Sample
from memfit.capture.spilled import SpillFile
from memfit.capture.trace import Joint, traced
from memfit.errors import CaptureError, MemfitError
from memfit.execute.kinds import kind_of_arguments
from memfit.internal import internal_errors
from memfit.ir import Graph, Program
from memfit.measure.peak import held_bytes
from memfit.pipeline import make_planner, with_times_within
from memfit.plan.expand import program_of
from memfit.plan.identity import identity_program
from memfit.plan.regions import kept_bytes
from memfit.plan.solve import Planner, Solution
from memfit.prepare import Prepared, Traced, planned_graph, prepare
from memfit.recipe import Recipe, without_channels_last
from memfit.regions.marked import MarkedCall
from memfit.runner import check_equal_to_eager
from memfit.tensors import storage_bytes
from memfit.trees import map_tensors
from memfit.units import format_bytes

Holders = Mapping[nn.Parameter, set[nn.Module]]

KEEPS_LITTLE = "it keeps only"  # begins the reason of a part that is not worth planning


@dataclasses.dataclass(frozen=True, kw_only=True)
class Kind:
    """What structurally equal regions have in common: their costs and their planner."""

    prepared: Prepared
    planner: Planner
    unplanned: Program
    baseline: Program  # what they run while the step around them is measured
    baseline_us: float = 0.0  # what that takes more than the unplanned program


@dataclasses.dataclass(frozen=True, kw_only=True)
class Region:
    """A part of a model that is captured and planned by itself."""

    name: str  # path in the model
    module: nn.Module
    sample: Sample  # what it is called with, without its memory
    calls: int  # in one step
    graph: Graph
    starts: Starts  # how gradients of what it returns come
    kind: Kind
    marked: MarkedCall  # runs the baseline, and tells when


@dataclasses.dataclass(frozen=True, kw_only=True)
class Regions:
    """The regions of a model, and why the rest of it is left as it is."""

    found: tuple[Region, ...]
    left_eager: dict[str, str]  # name to reason


def find_regions(
    model: nn.Module,
    sample: Sample,
    recipe: Recipe,
    error: CaptureError,
    *,
    least_bytes: int,
    limit_bytes: int | None = None,
    spills: bool = False,
) -> Regions:
    """Look for regions, see Note [Which parts]. `error` says why the model itself is none.

    Nothing that is run takes more than `limit_bytes` in memory; with `spills` what calls are given is in a file.
    """
    rest = None if limit_bytes is None else Rest.of(model, sample, limit_bytes)
    with SpillFile() if spills else contextlib.nullcontext() as file:
        loss = known_loss(recipe)
        options: dict[str, Any] = {"seed": recipe.seed, "backward_from": recipe.backward_from, "loss": loss}
        calls = noted_calls(model, sample, file=file, **options)
        search = RegionSearch(model, calls, region_recipe(recipe), least_bytes, rest=rest, must_fit=spills)
        search.left_eager[""] = str(error)
        search.look_into("", model)
    return Regions(found=tuple(search.found), left_eager=search.left_eager)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Rest:
    """Count the memory beside a region, and how much there may be together."""

    limit_bytes: int
    held_bytes: int  # of the whole model and the batch
    gradient_bytes: int  # of the whole model, at the end of a step

    @classmethod
    def of(cls, model: nn.Module, sample: Sample, limit_bytes: int) -> "Rest":
        trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
        return cls(
            limit_bytes=limit_bytes,
            held_bytes=held_bytes([model, sample.args, dict(sample.kwargs)]),
            gradient_bytes=storage_bytes(trained),
        )

    def limit_of(self, module: nn.Module) -> int:
        """Return what a region may take with its parameters and what it is given."""
        return self.limit_bytes - self.held_bytes + held_bytes([module])


def region_recipe(recipe: Recipe) -> Recipe:
    """How regions are captured: every result may get a gradient, and the step's memory is not theirs to count."""
    return dataclasses.replace(
        without_channels_last(recipe),
        optimizer=None,
        loss=None,
        beside_bytes=0,
        backward_from="all",
        outputs="all",
        recompute=(),
        keep=(),
        report=None,
    )


def known_loss(recipe: Recipe) -> tuple[Callable[[Any, Any], Any], Any] | None:
    """Return the loss outside of the model with its batch, if it can be run."""
    loss = recipe.loss
    return None if loss is None or loss.function is None else (loss.function, loss.batch)


def regions_digest(digests: dict[str, str]) -> str:
    """A short hash of the graphs of all regions, by name."""
    described = "\n".join(f"{name} {digest}" for name, digest in sorted(digests.items()))
    return hashlib.sha256(described.encode()).hexdigest()[:16]


class RegionSearch:
    """Looks for regions, see Note [Which parts]."""

    def __init__(
        self,
        model: nn.Module,
        calls: dict[str, list[NotedCall]],
        recipe: Recipe,
        least_bytes: int,
        *,
        timed: bool = True,
        keeps_nothing: bool = False,
        rest: Rest | None = None,
        must_fit: bool = False,
    ) -> None:
        """Store what is looked into and how.

        Regions are run and timed if `timed`, where there is a `rest`. `keeps_nothing` measures the step with every
        value made again, `must_fit` with programs that fit beside the `rest`.
        """
        self.found: list[Region] = []
        self.left_eager: dict[str, str] = {}
        self._calls = calls
        self._recipe = recipe
        self._least_bytes = least_bytes
        self._timed = timed
        self._keeps_nothing = keeps_nothing
        self._rest = rest
        self._must_fit = must_fit
        self._kinds: dict[str, Kind] = {}
        self._seen = {model}
        self._shared = _holders(model)

    def look_into(self, path: str, module: nn.Module) -> None:
        for name, part in module.named_children():
            if part not in self._seen:
                self._seen.add(part)
                self.look_at(f"{path}.{name}".removeprefix("."), part)

    def look_at(self, path: str, module: nn.Module) -> None:
        calls = self._calls.get(path, [])
        if not calls:  # a list of modules, or not part of this step
            self.look_into(path, module)
            return
        try:
            with internal_errors(f"planning {path}"):
                reason = next(_refusals(module, calls, self._shared), "") or self._captured(path, module, calls)
        except MemfitError as error:
            reason = str(error)
        if reason:
            if reason != self.left_eager.get(path.rpartition(".")[0]):  # said of the whole, it is true of its parts
                self.left_eager[path] = reason
            self.look_into(path, module)

    def _captured(self, path: str, module: nn.Module, calls: list[NotedCall]) -> str:
        """Add a region, or say why not."""
        sample, starts = calls[0].sample, calls[0].starts
        check_no_inner_hooks(module)
        with traced(module, sample, backward_from="all", with_hooks=False, starts=starts) as joint:
            reason = next(_inexact(module, joint), "")
            if reason:
                return reason
            before = Traced.of(joint)
            graph = planned_graph(joint, self._recipe)
            small_bytes = kept_bytes(graph, identity_program(graph))
            if small_bytes < self._least_bytes:
                self._seen.update(module.modules())  # its parts keep less
                return f"{KEEPS_LITTLE} {format_bytes(small_bytes)} for its backward pass"
            kind = self._kind(module, joint, before, graph, sample)
            marked = MarkedCall(len(self.found), joint, graph, kind.baseline, sample)
        self.found.append(
            Region(
                name=path,
                module=module,
                sample=_without_memory(sample),
                calls=len(calls),
                graph=graph,
                starts=starts,
                kind=kind,
                marked=marked,
            )
        )
        return ""

    def _kind(self, module: nn.Module, joint: Joint, before: Traced, graph: Graph, sample: Sample) -> Kind:
        digest = graph.digest()
        if digest not in self._kinds:
            limit_bytes = None if self._rest is None else self._rest.limit_of(module)
            options: dict[str, Any] = {"before": before, "timed": self._timed, "limit_bytes": limit_bytes}
            prepared = prepare(module, joint, sample, self._recipe, **options)
            if self._timed and limit_bytes is not None:  # without one nobody knows what may be run
                prepared = with_times_within(module, joint, sample, prepared, self._recipe, limit_bytes)
            planner = make_planner(module, prepared, self._recipe)
            solution = self._baseline(module, prepared, planner)
            self._kinds[digest] = Kind(
                prepared=prepared,
                planner=planner,
                unplanned=program_of(planner.problem, planner.unplanned),
                baseline=program_of(planner.problem, solution.expansion),
                baseline_us=solution.expansion.extra_us,
            )
        return self._kinds[digest]

    def _baseline(self, module: nn.Module, prepared: Prepared, planner: Planner) -> Solution:
        """Return what a region runs while the step around it is measured."""
        if self._keeps_nothing:
            return planner.all_again()
        unplanned = planner.unplanned_solution()
        if self._rest is None or not self._must_fit:
            return unplanned
        room_bytes = self._rest.limit_of(module) - self._rest.gradient_bytes
        if prepared.peak_bytes(program_of(planner.problem, unplanned.expansion)) <= room_bytes:
            return unplanned
        return planner.smallest(time_limit_s=self._recipe.time_limit_s / 8)


def _without_memory(sample: Sample) -> Sample:
    args, kwargs = map_tensors(
        lambda tensor: torch.empty_like(tensor, device="meta"), (sample.args, dict(sample.kwargs))
    )
    return Sample(args, kwargs)


def _refusals(module: nn.Module, calls: list[NotedCall], shared: Holders) -> Iterator[str]:
    """Why a part cannot be a region, whatever it computes; `shared` tells which modules have which parameters."""
    if not module.training:
        yield "it is in eval mode, in which its own forward runs"
    if not all(call.with_gradients for call in calls):
        yield "it runs without gradients, or again in the backward pass (by torch.utils.checkpoint)"
    if any(call.autocast != autocast_state() for call in calls):
        yield "it is called in an autocast block of the model"
    if autocast_state() and torch.is_autocast_cache_enabled():
        if len(calls) > 1 and [*_cast(module)]:
            yield "it is called more than once under autocast, which casts its parameters once"
        inside = {*module.modules()}
        if any(not shared.get(each, set()) <= inside for each in _cast(module)):
            yield "it shares a parameter with another part under autocast, which casts that once for both"
    if any(call.overwritten for call in calls):
        yield "what it is given or returns is changed in place"
    if any(call.adds_otherwise for call in calls):
        yield "what it is given, or a parameter of it, is used several times inside and later outside"
    if any(call.reached < call.returned for call in calls):
        yield "no gradient reaches some of what it returns"
    if any(call.starts != calls[0].starts for call in calls):
        yield "gradients of what it returns are laid out in different ways from call to call"
    if len({kind_of_arguments(call.sample.args, dict(call.sample.kwargs)) for call in calls}) > 1:
        yield "it is called with arguments of different kinds in one step"


def _holders(model: nn.Module) -> Holders:
    """Return by parameter the modules that have it and may cast it; lookups do not."""
    holders: dict[nn.Parameter, set[nn.Module]] = defaultdict(set)
    for module in model.modules():
        if isinstance(module, nn.Embedding | nn.EmbeddingBag):
            continue
        for each in module.parameters(recurse=False):
            holders[each].add(module)
    return holders


def _cast(module: nn.Module) -> Iterator[nn.Parameter]:
    """Parameters that autocast casts, and keeps the casts of."""
    return (each for each in module.parameters() if each.requires_grad and each.dtype is torch.float32)


def _inexact(module: nn.Module, joint: Joint) -> Iterator[str]:
    """Why a captured call would not do all that the eager one does."""
    check_equal_to_eager(type(module).__name__, joint, warn=False)
    if joint.avoided_values:
        yield "it looks at values of the batch"
    if joint.changes_arguments:
        yield "it writes into its arguments"
