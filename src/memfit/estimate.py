"""The answer to "will it fit, and where does the memory go?"."""

import dataclasses
import json
from collections import Counter
from collections.abc import Mapping
from typing import Any

from memfit.display import html_of
from memfit.ir import Graph, Kind, Phase, Storage
from memfit.measure.devices import usable_bytes
from memfit.plan.reserved import ReservedMemory
from memfit.plan.simulate import Timeline
from memfit.units import format_bytes

# How far simulated steps are from recorded ones where no library is free to choose, either way: see `docs/gpu.md`.
# What is left are buffers inside kernels and what a version does otherwise; a cache makes more of small differences.
# Segments are more often too few than too many: what is live has to lie in some, and only gaps between can differ.
ALLOCATED_WITHIN = (0.01, 0.01)  # below, above
RESERVED_WITHIN = (0.03, 0.04)

_FORMAT = "memfit.estimate"
_VERSION = 1


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class ParameterCount:
    """How many parameters of one dtype there are, and how many bytes they take."""

    dtype: str
    trainable: bool
    count: int
    size_bytes: int


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class UpperEnd:
    """What a step takes at most, where no rule says what it takes."""

    peak_bytes: int
    reserved: ReservedMemory
    reason: str  # what decides where between the ends it is

    @property
    def needed_bytes(self) -> int:
        return self.reserved.least_bytes

    def to_dict(self) -> dict[str, Any]:
        return {"peak_bytes": self.peak_bytes, "reserved": self.reserved.to_dict(), "reason": self.reason}


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class OutsideBytes:
    """Memory of a step on a device beside torch's allocator and the context."""

    lowest_bytes: int
    highest_bytes: int
    reason: str


@dataclasses.dataclass(frozen=True, kw_only=True)
class Estimate:
    """The predicted memory of one training step. See Note [What a step is] in `plan/simulate.py`."""

    model: str  # class of the model
    optimizer: str | None
    device: str  # where the step would run: "cpu", "cuda:0", "A100-40GB"
    graph: Graph
    timeline: Timeline
    parameters: tuple[ParameterCount, ...]
    workspaces_measured: bool  # False: what operators allocate inside is not counted
    notes: tuple[str, ...] = ()  # what a reader should know about these figures
    process_peak_bytes: int | None = None  # beyond a process without the model, see `measure/process.py`; None: unknown
    reserved: ReservedMemory | None = None  # what CUDA's caching allocator takes for it; None: no CUDA device
    highest: UpperEnd | None = None  # None: the figures are no range
    loop_costs: Mapping[str, int] = dataclasses.field(default_factory=dict)  # of the peak, by what a loop may do
    outside: OutsideBytes | None = None  # beside torch's allocator: buffers of NCCL, where there are several ranks

    @property
    def peak_bytes(self) -> int:
        return self.timeline.peak_bytes

    @property
    def reserved_bytes(self) -> int | None:
        """The peak of what CUDA's caching allocator reserves, by simulation; None: the step is for no CUDA device."""
        return None if self.reserved is None else self.reserved.reserved_bytes

    @property
    def needed_bytes(self) -> int:
        """Return what a device must have for it, beside its context.

        On CUDA more than is allocated, for gaps, and less than is reserved where there is room, because the allocator
        gives back what it caches before it gives up. What libraries hold beside it is contained.
        """
        least_bytes = self.peak_bytes if self.reserved is None else self.reserved.least_bytes
        return least_bytes + (0 if self.outside is None else self.outside.lowest_bytes)

    @property
    def most_needed_bytes(self) -> int:
        """The upper end of `needed_bytes`, where that is a range."""
        most_bytes = self.needed_bytes + self._outside_width
        if self.highest is None or self.reserved is None:
            return most_bytes
        return most_bytes + max(0, self.highest.needed_bytes - self.reserved.least_bytes)

    @property
    def reason(self) -> str:
        """Say what decides where between its ends a range is; "" where nothing is a range."""
        moves = self.highest is not None and self.most_needed_bytes > self.needed_bytes + self._outside_width
        parts = (self.highest if moves else None, self.outside)
        return " and ".join(each.reason for each in parts if each is not None)

    @property
    def _outside_width(self) -> int:
        return 0 if self.outside is None else self.outside.highest_bytes - self.outside.lowest_bytes

    def ranges(self) -> dict[str, tuple[int, int]]:
        """Return between what bytes the allocated and the reserved peak are expected; nothing for no CUDA device.

        The ends contain what libraries may choose, and how far simulated steps have been from recorded ones.
        """
        if self.reserved is None:
            return {}
        most = self.reserved if self.highest is None else self.highest.reserved
        ranges = {
            "allocated": widened(self.reserved.allocated_bytes, most.allocated_bytes, ALLOCATED_WITHIN),
            "reserved": widened(self.reserved.reserved_bytes, most.reserved_bytes, RESERVED_WITHIN),
        }
        if self.outside is not None:
            ranges["outside"] = (self.outside.lowest_bytes, self.outside.highest_bytes)
        return ranges

    @property
    def passes(self) -> str:
        """Which passes are counted, in words."""
        both = any(each.phase is Phase.BACKWARD for each in self.graph.operations)
        return "forward and backward" if both else "forward"

    @property
    def peak_phase(self) -> str:
        return self.timeline.peak.phase

    def by_kind(self) -> dict[Kind, int]:
        """What the peak is made of, biggest first; kinds that are not live then are left out."""
        live = {kind: size for kind, size in self.timeline.peak.by_kind.items() if size}
        return dict(sorted(live.items(), key=lambda item: -item[1]))

    def by_module(self, depth: int = 1) -> dict[str, int]:
        """Live bytes at the peak by owning module, to `depth` names deep, biggest first.

        `""` stands for what belongs to no module: the batch, optimizer state, workspaces.
        """
        sizes: Counter[str] = Counter()
        for storage in self._live():
            sizes[".".join(storage.module.split(".")[:depth])] += storage.size_bytes
        sizes[""] += self.peak_bytes - sizes.total()
        return {module: size for module, size in sizes.most_common() if size}

    def biggest(self, count: int = 10) -> list[Storage]:
        """The biggest values that are live at the peak."""
        return self._live()[:count]

    def fits(self, device: str | int | float) -> bool:
        """Tell whether the step fits a device, given by name ("A100-40GB") or by its memory ("24GiB").

        A step that was estimated for a CUDA device goes by the least with which its allocator serves all requests, any
        other by what is allocated.
        Where the figure is a range, its upper end has to fit; `verdict` tells where it depends.
        """
        return self.most_needed_bytes <= usable_bytes(device)

    def verdict(self, device: str | int | float) -> str:
        """Answer "yes", "no", or what it depends on whether the step fits a device, given as for `fits`."""
        if self.fits(device):
            return "yes"
        return "no" if self.needed_bytes > usable_bytes(device) else f"depends on {self.reason}"

    def to_dict(self, *, depth: int = 1, top: int = 10) -> dict[str, Any]:
        """Everything for machines; `depth` and `top` as in `by_module` and `biggest`."""
        return {
            "format": _FORMAT,
            "version": _VERSION,
            "model": self.model,
            "optimizer": self.optimizer,
            "device": self.device,
            "peak_bytes": self.peak_bytes,
            "process_peak_bytes": self.process_peak_bytes,
            "reserved": None if self.reserved is None else self.reserved.to_dict(),
            "highest": None if self.highest is None else self.highest.to_dict(),
            "loop_costs": dict(self.loop_costs),
            "outside": None if self.outside is None else dataclasses.asdict(self.outside),
            "ranges": {name: list(ends) for name, ends in self.ranges().items()},
            "peak_phase": self.peak_phase,
            "peak_operation": self.timeline.peak.label,
            "peak_module": self.timeline.peak.module,
            "resident_bytes": self.timeline.resident_bytes,
            "by_kind": {str(kind): size for kind, size in self.by_kind().items()},
            "by_module": self.by_module(depth),
            "biggest": [dataclasses.asdict(storage) for storage in self.biggest(top)],
            "parameters": [dataclasses.asdict(each) for each in self.parameters],
            "workspaces_measured": self.workspaces_measured,
            "notes": list(self.notes),
        }

    def to_json(self) -> str:
        return json.dumps(self.to_dict(), indent=2)

    def __str__(self) -> str:
        parts = ", ".join(f"{format_bytes(size)} {kind}" for kind, size in self.by_kind().items())
        step = f"a training step with {self.optimizer}" if self.optimizer else self.passes
        notes = "".join(f"; {note}" for note in self.notes)
        process = ""
        if self.process_peak_bytes is not None:
            process = f", {format_bytes(self.process_peak_bytes)} of the process"
        if self.reserved is not None:
            low, high = (format_bytes(each) for each in self.ranges()["reserved"])
            process += f", {format_bytes(self.reserved.reserved_bytes)} reserved, between {low} and {high}"
        if (
            self.highest is not None
            and self.reserved is not None
            and self.highest.needed_bytes > self.reserved.least_bytes
        ):
            process += f" depending on {self.highest.reason}"
        if self.outside is not None:
            low, high = (format_bytes(each) for each in self.ranges()["outside"])
            process += f", {low} to {high} beside it depending on {self.outside.reason}"
        return f"{self.model} on {self.device}, {step}: peak {format_bytes(self.peak_bytes)} ({parts}){process}{notes}"

    def _repr_html_(self) -> str | None:
        return html_of(self)

    def _live(self) -> list[Storage]:
        return [self.graph.storages[index] for index in self.timeline.peak_storages]


def widened(low_bytes: int, high_bytes: int, shares: tuple[float, float]) -> tuple[int, int]:
    """Return the ends of a range with a margin below and above.

    >>> widened(1000, 900, (0.01, 0.02))
    (990, 1020)
    """
    return int(low_bytes * (1 - shares[0])), int(max(low_bytes, high_bytes) * (1 + shares[1]))
