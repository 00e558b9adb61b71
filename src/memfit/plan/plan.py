"""A plan: what one training step does under a budget, as inert data with its reasons.

Written as versioned JSON. Whoever applies it captures the model again and compares digests, so a plan for another
model, shape or dtype is refused by name. The step it was made for is part of it (`plan/captured.py`), for reports.

Note [Plans in regions]
    A model that cannot be captured whole has a plan for each of its regions and no program of its own; its
    figures are those of the whole step.

Note [Versions]
    1: a plan without the step it was made for, 2: the same in regions, 3: with that step, in regions or not, 4: with
    the peak of the process, 5: with what a loss outside of the model takes, 6: with what lives beside the step, 7: with
    the layouts of gradients that reach regions. A plan is written in the lowest version that holds it, so what came
    from an old file can be read by the memfit that wrote it.
"""

import dataclasses
import functools
import hashlib
import itertools
import json
from collections import defaultdict
from collections.abc import Iterator, Mapping
from enum import StrEnum
from pathlib import Path
from typing import Any, Self

from memfit.display import html_of
from memfit.errors import InvalidFile, first_line
from memfit.files import parse_json, write_atomically
from memfit.ir import Compute, Graph, Phase, Program
from memfit.plan.captured import CapturedStep, starts_of
from memfit.plan.reserved import ReservedMemory
from memfit.units import format_bytes

FORMAT = "memfit.plan"
VERSION = 1  # see Note [Versions]
VERSION_WITH_REGIONS = 2
VERSION_WITH_STEP = 3
VERSION_WITH_PROCESS = 4
VERSION_WITH_LOSS = 5
VERSION_WITH_EXTERNAL = 6
VERSION_WITH_STARTS = 7
NEWEST_VERSION = VERSION_WITH_STARTS

_MOVING = "offload"  # the technique that sends values out
_MOST_REASONS = 8  # lines about modules that are left eager


class Treatment(StrEnum):
    """What a plan does with a value of the forward pass that the backward pass reads."""

    KEPT = "kept"
    AGAIN = "computed again"
    REPLACED = "replaced"  # a smaller form is kept, or the backward pass does without it
    MOVED = "sent out"


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Fate:
    """What happens to one value."""

    value: str
    module: str
    size_bytes: int
    treatment: Treatment
    runs_again: int = 0  # how often its operation runs again
    technique: str = ""  # what replaces it


@dataclasses.dataclass(frozen=True, kw_only=True)
class Plan:
    """A straight-line program for a training step, and what is known about it."""

    model: str  # class of the model
    model_digest: str  # of names, shapes and dtypes of its parameters and buffers
    sample: str  # what it was planned for, in words: "x: float32[16, 3, 224, 224]"
    torch_version: str
    device: str
    optimizer: str | None
    allow: tuple[str, ...]
    rewrites: tuple[str, ...]  # changes of the graph made before planning
    outputs: str
    backward_from: str
    budget_bytes: int | None  # None: manual control alone
    peak_bytes: int  # predicted
    unplanned_peak_bytes: int
    persistent_bytes: int  # live when the step ends, whatever the plan
    optimizer_state_bytes: int  # part of that, and of the peaks
    floor_bytes: int  # no plan of these operations can be below
    floor_operation: str
    step_us: float  # predicted time of the unplanned step
    extra_us: float
    bound_us: float  # no plan under the budget adds less
    times_measured: bool  # False: estimated from a device's profile
    plan_seconds: float
    log: tuple[str, ...]
    fates: tuple[Fate, ...]
    program: Program  # empty if there are regions, but for a digest of theirs
    regions: Mapping[str, "Plan"] = dataclasses.field(default_factory=dict)  # by name of the module
    left_eager: Mapping[str, str] = dataclasses.field(default_factory=dict)  # name to reason; "" is the model itself
    step: CapturedStep | None = None  # what it was made for; None in regions and in files of old versions
    external_bytes: int = 0  # lives beside the step, as gradients of earlier batches do; part of optimizer_state_bytes
    starts: tuple[tuple[int, ...] | None, ...] = ()  # of a region: how gradients of what it returns come
    process_peak_bytes: int | None = None  # beyond a process without the model, see `measure/process.py`; None: unknown

    @functools.cached_property
    def reserved(self) -> ReservedMemory | None:
        """What CUDA's caching allocator takes for the step, by simulation; None: no CUDA device, or no step in it."""
        return None if self.step is None or self.regions else self.step.reserved(self.program)

    @property
    def slowdown(self) -> float:
        """Predicted extra time as a fraction of the unplanned step."""
        return self.extra_us / self.step_us if self.step_us else 0.0

    @property
    def lower_bound(self) -> float:
        """The slowdown no plan under this budget can be below."""
        return self.bound_us / self.step_us if self.step_us else 0.0

    @property
    def gap(self) -> float:
        """How far above the bound the plan is, in fractions of the step."""
        return max(0.0, self.slowdown - self.lower_bound)

    @property
    def was_interrupted(self) -> bool:
        """Whether Ctrl-C ended the search: this is the best that was found until then."""
        return any("interrupted" in line for line in self.log)

    @property
    def is_identity(self) -> bool:
        """Whether nothing is computed again or replaced."""
        return all(fate.treatment is Treatment.KEPT for fate in self.fates)

    def by_module(self, depth: int = 1) -> dict[str, dict[Treatment, int]]:
        """Bytes by module, to `depth` names deep, and by what happens to them."""
        sizes: dict[str, dict[Treatment, int]] = defaultdict(lambda: dict.fromkeys(Treatment, 0))
        for fate in self.fates:
            sizes[".".join(fate.module.split(".")[:depth])][fate.treatment] += fate.size_bytes
        return dict(sizes)

    def to_json(self) -> str:
        content = {"format": FORMAT, "version": _lowest_version(self)} | _to_data(self)
        return _dump(content | {"checksum": _checksum(content)})

    @classmethod
    def from_json(cls, text: str) -> Self:
        fields = _fields(text)
        try:
            plan = cls(**_from_data(fields))
            _check_types(plan)
        except (KeyError, TypeError, ValueError, AttributeError, IndexError) as error:
            raise InvalidFile(f"damaged plan: {type(error).__name__}: {first_line(error)}; plan again") from None
        return plan

    def save(self, path: str | Path) -> None:
        """Write the plan as JSON; the file is there whole or not at all."""
        write_atomically(Path(path), self.to_json())

    @classmethod
    def load(cls, path: str | Path) -> Self:
        """Read a plan that was saved; a file that is not one is refused with the reason."""
        try:
            text = Path(path).read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise InvalidFile(f"{path} cannot be read as a plan: {first_line(error)}") from None
        return cls.from_json(text)

    def diff(self, other: "Plan") -> str:
        """What `other` does differently, in lines for people."""
        return "\n".join(_differences(self, other))

    def explain(self) -> str:
        """Why this plan: what was compared with it, what lost and by how much, and how the search went."""
        return "\n".join(_reasons(self))

    @property
    def pinned_bytes(self) -> int:
        """Return what values that are sent out take of a host beside a GPU: blocks of powers of two, which stay."""
        if self.device == "cpu":
            return 0
        sent = (each.size_bytes for each in self.fates if each.treatment is Treatment.MOVED and each.size_bytes)
        return sum(1 << (size_bytes - 1).bit_length() for size_bytes in sent)

    def __str__(self) -> str:
        return "\n".join(_lines(self))

    def _repr_html_(self) -> str | None:
        return html_of(self)


def fates_of(graph: Graph, program: Program) -> tuple[Fate, ...]:
    """What a program does with every value of the forward pass that the eager backward pass reads."""
    runs = [each.operation for each in (*program.forward, *program.backward) if isinstance(each, Compute)]
    makers = {storage: index for index, each in enumerate(graph.operations) for storage in each.outputs}
    replacing = _replacing(graph, runs)
    counts: dict[int, int] = defaultdict(int)
    for operation in runs:
        counts[operation] += 1
    again = {
        storage
        for each in program.backward
        if isinstance(each, Compute) and graph.operation(each.operation).phase is Phase.FORWARD
        for storage in graph.operation(each.operation).outputs
    }
    read = _read_in_backward(graph)
    kept = _live_at_backward(graph, program)
    fates = []
    for storage in sorted(read):
        if storage not in makers or graph.operations[makers[storage]].phase is not Phase.FORWARD:
            continue
        value = graph.storages[storage]
        treatment = Treatment.KEPT
        if storage not in kept:
            treatment = _treatment(replacing.get(storage))
        elif storage in again:
            treatment = Treatment.AGAIN
        fates.append(
            Fate(
                value=value.name,
                module=value.module,
                size_bytes=value.size_bytes,
                treatment=treatment,
                runs_again=max(0, counts[makers[storage]] - 1),
                technique=replacing.get(storage, ""),
            )
        )
    return tuple(fates)


def _treatment(technique: str | None) -> Treatment:
    """Of a value that is not kept, by what stands in for it."""
    if technique is None:
        return Treatment.AGAIN
    return Treatment.MOVED if technique == _MOVING else Treatment.REPLACED


def _replacing(graph: Graph, runs: list[int]) -> dict[int, str]:
    """By value: the technique that stands in for it in a program."""
    count = len(graph.operations)
    found: dict[int, str] = {}
    by_outputs = {each.outputs: each for each in graph.operations}
    for index in runs:
        if index < count:
            continue
        alternative = graph.operation(index)
        own = by_outputs.get(alternative.outputs)
        if alternative.phase is Phase.BACKWARD and own is not None:
            found |= dict.fromkeys(set(own.inputs) - set(alternative.inputs), alternative.technique)
        elif alternative.phase is Phase.FORWARD:
            found |= dict.fromkeys(alternative.outputs, alternative.technique)
    return found


def _read_in_backward(graph: Graph) -> set[int]:
    held = {*graph.held, *graph.resident, *graph.tangents}
    return {
        storage
        for each in graph.operations
        if each.phase is Phase.BACKWARD
        for storage in each.inputs
        if storage not in held
    }


def _live_at_backward(graph: Graph, program: Program) -> set[int]:
    live: set[int] = set()
    for each in program.forward:
        if isinstance(each, Compute):
            operation = graph.operation(each.operation)
            live.update(operation.outputs)
            if each.in_place and operation.may_overwrite is not None:
                live.discard(operation.may_overwrite)
        else:
            live.discard(each.storage)
    return live


def _lowest_version(plan: Plan) -> int:
    """See Note [Versions]."""
    plans = (plan, *plan.regions.values())
    if any(each.starts for each in plans):
        return VERSION_WITH_STARTS
    if any(each.external_bytes for each in plans):
        return VERSION_WITH_EXTERNAL
    if any(each.step is not None and each.step.loss is not None for each in plans):
        return VERSION_WITH_LOSS
    if any(each.process_peak_bytes is not None for each in plans):
        return VERSION_WITH_PROCESS
    if any(each.step is not None for each in plans):
        return VERSION_WITH_STEP
    return VERSION_WITH_REGIONS if plan.regions else VERSION


def _to_data(plan: Plan) -> dict[str, Any]:
    fields = {field.name: getattr(plan, field.name) for field in dataclasses.fields(plan)}
    fields["fates"] = [dataclasses.asdict(fate) for fate in plan.fates]
    fields["program"] = json.loads(plan.program.to_json())
    regions, left_eager, step = fields.pop("regions"), fields.pop("left_eager"), fields.pop("step")
    if step is not None:
        fields["step"] = step.to_data()
    if plan.process_peak_bytes is None:
        del fields["process_peak_bytes"]
    if not plan.external_bytes:
        del fields["external_bytes"]
    if not plan.starts:
        del fields["starts"]
    if regions:
        fields["regions"] = {name: _to_data(region) for name, region in regions.items()}
        fields["left_eager"] = dict(left_eager)
    return fields


def _from_data(data: Mapping[str, Any]) -> dict[str, Any]:
    fields = dict(data)
    fields["program"] = Program.from_json(json.dumps(fields["program"]))
    fields["fates"] = tuple(Fate(**each | {"treatment": Treatment(each["treatment"])}) for each in fields["fates"])
    fields |= {name: tuple(fields[name]) for name in ("allow", "rewrites", "log")}
    fields["starts"] = starts_of(fields)
    if "step" in fields:
        fields["step"] = CapturedStep.from_data(fields["step"])
    if "regions" in fields:
        regions = {name: Plan(**_from_data(each)) for name, each in fields["regions"].items()}
        fields |= {"regions": regions, "left_eager": dict(fields["left_eager"])}
    return fields


def _fields(text: str) -> dict[str, Any]:
    try:
        fields = parse_json(text)
    except ValueError as error:
        raise InvalidFile(f"not a plan: it is not whole JSON ({first_line(error)})") from None
    if not isinstance(fields, dict) or fields.get("format") != FORMAT:
        raise InvalidFile(f"not a plan: its format is not {FORMAT!r}")
    version = fields.get("version")
    if type(version) is not int or not VERSION <= version <= NEWEST_VERSION:
        raise InvalidFile(
            f"a plan of version {version!r} was found, this memfit reads versions {VERSION} to "
            f"{NEWEST_VERSION}; plan again, or install the memfit that wrote it"
        )
    if fields.pop("checksum", None) != _checksum(fields):
        raise InvalidFile("the plan was changed after it was written: its checksum differs; plan again")
    return {name: value for name, value in fields.items() if name not in ("format", "version")}


def _dump(content: Mapping[str, Any]) -> str:
    return json.dumps(content, separators=(",", ":"), sort_keys=True)


def _checksum(content: Mapping[str, Any]) -> str:
    return hashlib.sha256(_dump(content).encode()).hexdigest()[:16]


_TEXTS = ("model", "model_digest", "sample", "torch_version", "device", "outputs", "backward_from", "floor_operation")
_NUMBERS = (
    *("peak_bytes", "unplanned_peak_bytes", "persistent_bytes", "optimizer_state_bytes", "floor_bytes"),
    *("step_us", "extra_us", "bound_us", "plan_seconds", "external_bytes"),
)


def _check_types(plan: Plan) -> None:
    for name in _TEXTS:
        if not isinstance(getattr(plan, name), str):
            raise TypeError(f"{name} is {getattr(plan, name)!r}")
    for name in _NUMBERS:
        value = getattr(plan, name)
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise TypeError(f"{name} is {value!r}")
    if plan.process_peak_bytes is not None and type(plan.process_peak_bytes) is not int:
        raise TypeError(f"process_peak_bytes is {plan.process_peak_bytes!r}")
    for name, reason in plan.left_eager.items():
        if not isinstance(reason, str):
            raise TypeError(f"the reason of {name} is {reason!r}")
    for region in plan.regions.values():
        _check_types(region)


def _lines(plan: Plan) -> Iterator[str]:
    budget = "no budget" if plan.budget_bytes is None else f"budget {format_bytes(plan.budget_bytes)}"
    yield f"{plan.model} on {plan.device}, {plan.sample}: {budget}"
    process = "" if plan.process_peak_bytes is None else f"{format_bytes(plan.process_peak_bytes)} of the process, "
    yield (
        f"predicted peak {format_bytes(plan.peak_bytes)} "
        f"({process}unplanned {format_bytes(plan.unplanned_peak_bytes)}), {plan.slowdown:+.1%} time"
        + ("" if plan.regions else f", at best {plan.lower_bound:+.1%}")
        + ("" if plan.times_measured else " (estimated)")
    )
    if plan.reserved is not None:
        yield plan.reserved.words()
    if plan.external_bytes:
        yield f"{format_bytes(plan.external_bytes)} of that live beside the step, such as gradients that a loop keeps"
    if left_out := not_counted(plan):
        yield left_out
    yield from region_lines(plan)
    if plan.is_identity:
        yield "the unplanned step fits: nothing is computed again"
        return
    if plan.pinned_bytes:
        yield f"{format_bytes(plan.pinned_bytes)} of pinned host memory for what is sent out"
    totals = plan.by_module(0)[""]
    yield ", ".join(f"{format_bytes(size)} {treatment}" for treatment, size in totals.items() if size)
    for module, sizes in plan.by_module(2).items():
        words = ", ".join(f"{format_bytes(size)} {treatment}" for treatment, size in sizes.items() if size)
        yield f"  {module or '(outside of modules)'}: {words}"


def _reasons(plan: Plan) -> Iterator[str]:
    yield from itertools.islice(_lines(plan), 2)
    over_bytes = 0 if plan.budget_bytes is None else plan.unplanned_peak_bytes - plan.budget_bytes
    verdict = f"over the budget by {format_bytes(over_bytes)}" if over_bytes > 0 else "fits"
    yield f"unplanned: {format_bytes(plan.unplanned_peak_bytes)}, {verdict}"
    yield f"any plan of these operations: at least {format_bytes(plan.floor_bytes)}, because of {plan.floor_operation}"
    if not plan.regions:
        yield f"any plan under the budget: {plan.lower_bound:+.1%} time at best, {plan.gap:.1%} less than this one"
    yield f"techniques that were allowed: {', '.join(plan.allow)}"
    yield from (f"search: {line}" for line in plan.log)


def region_lines(plan: Plan) -> Iterator[str]:
    """Which modules are planned and which are left as they are, if the model could not be captured whole."""
    if not plan.regions:
        return
    yield f"planned by regions: {', '.join(plan.regions)}"
    for name, reason in itertools.islice(plan.left_eager.items(), _MOST_REASONS):
        yield f"left eager: {name or 'the model itself'}, because {reason}"
    if len(plan.left_eager) > _MOST_REASONS:
        yield f"left eager: {len(plan.left_eager) - _MOST_REASONS} more modules"


def not_counted(plan: Plan, adamw_bytes: int | None = None) -> str:
    """Say in one line what the figures of a plan leave out; "" if that is nothing.

    `adamw_bytes` is what `optimizer="adamw"` would add; by default it is told by the step, if the plan has one.
    """
    missing = []
    if plan.optimizer is None:
        if adamw_bytes is None and plan.step is not None:
            adamw_bytes = _adamw_bytes(plan.step.eager)
        more = "" if adamw_bytes is None else f' (optimizer="adamw" would add {format_bytes(adamw_bytes)})'
        missing.append(f"an optimizer{more}")
    if plan.step is not None and plan.step.loss is None and not _returns_loss(plan.step.eager):
        missing.append("a loss computed outside of the model (give loss=)")
    if not missing:
        return ""
    counted = "parameters, gradients, batch and activations"
    counted += "" if plan.optimizer is None else f", {plan.optimizer}"
    return f"counted are {counted}; not counted: {' and '.join(missing)}"


def _adamw_bytes(graph: Graph) -> int:
    """Two values for each one of the parameters that are trained."""
    return 2 * sum(graph.storages[parameter].size_bytes for parameter, _ in graph.trained)


def _returns_loss(graph: Graph) -> bool:
    """Return whether the backward pass starts from one scalar."""
    return len(graph.tangents) == 1 and not graph.storages[graph.tangents[0]].shape


def _differences(one: Plan, other: Plan) -> Iterator[str]:
    if one.program.graph_digest != other.program.graph_digest:
        yield "the plans are for different graphs: only totals are compared"
    for label, first, second in _compared(one, other):
        if first != second:
            yield f"{label}: {first} -> {second}"
    for name in (*one.regions, *(name for name in other.regions if name not in one.regions)):
        if (name in one.regions) != (name in other.regions):
            yield f"{name}: a region in the {'first' if name in one.regions else 'second'} plan alone"
    others: Mapping[tuple[str, str], Fate] = {(fate.module, fate.value): fate for fate in other.fates}
    for fate in one.fates:
        changed = others.get((fate.module, fate.value))
        if changed is not None and changed.treatment is not fate.treatment:
            yield (
                f"{fate.module or '(outside of modules)'} {fate.value} ({format_bytes(fate.size_bytes)}): "
                f"{fate.treatment} -> {changed.treatment}"
            )


def _compared(one: Plan, other: Plan) -> Iterator[tuple[str, str, str]]:
    yield "model", one.model, other.model
    yield "sample", one.sample, other.sample
    yield "budget", _budget(one), _budget(other)
    yield "predicted peak", format_bytes(one.peak_bytes), format_bytes(other.peak_bytes)
    yield "predicted slowdown", f"{one.slowdown:.1%}", f"{other.slowdown:.1%}"
    yield "allowed", ", ".join(one.allow), ", ".join(other.allow)


def _budget(plan: Plan) -> str:
    return "none" if plan.budget_bytes is None else format_bytes(plan.budget_bytes)
