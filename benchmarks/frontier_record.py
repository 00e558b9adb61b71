"""What the frontier benchmark has found so far, and its file.

A case is measured in parts: the eager run, memfit, and one part a peer. Every point is kept as soon
as there is one, and a part that ended is marked, so that an interrupted run goes on where it stood.
"""

import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Self

from memfit.errors import InvalidFile
from memfit.files import write_atomically

FORMAT = "memfit.frontier"
VERSION = 1

EAGER = "eager"
MEMFIT = "memfit"
CHECKPOINT = "checkpoint"
AOT_EAGER = "aot_eager_decomp_partition"
INDUCTOR = "inductor"
COMPILED = "memfit, inductor"  # memfit's own plans with compiled kernels, beside which they race
PEERS = (CHECKPOINT, AOT_EAGER, INDUCTOR)
PARTS = (EAGER, MEMFIT, *PEERS)
SAME_GRAPHS = "the same graphs"  # begins the reason why a setting was not measured


@dataclasses.dataclass(frozen=True, kw_only=True)
class EagerRun:
    """The plain run that everything is compared with."""

    peak_bytes: int
    persistent_bytes: int  # live when the backward pass ends: parameters, buffers, gradients, batch, loss
    step_s: float

    @property
    def activation_bytes(self) -> int:
        """The part of the peak that a plan can do something about."""
        return self.peak_bytes - self.persistent_bytes

    def budget_bytes(self, fraction: float) -> int:
        return self.persistent_bytes + round(fraction * self.activation_bytes)

    def fraction(self, peak_bytes: int) -> float:
        """Of the activation part, what a peak leaves."""
        return (peak_bytes - self.persistent_bytes) / self.activation_bytes


@dataclasses.dataclass(frozen=True, kw_only=True)
class Measured:
    """A plan, what it promised and what was seen."""

    budget_bytes: int  # of the smallest plan: what it predicts
    predicted_bytes: int
    measured_bytes: int
    predicted_slowdown: float  # 0.05: five hundredths slower than eager
    measured_slowdown: float
    lower_bound: float  # no plan under this budget is less slow
    gap: float
    plan_s: float
    differing: list[str]  # what does not equal eager bit for bit
    largest_difference: float  # relative, 0.0 if all is equal
    measured_error: float = 0.0  # standard error of the measured slowdown; 0.0 where it was not recorded


@dataclasses.dataclass(frozen=True, kw_only=True)
class MemfitPoint:
    """One budget: a plan and its figures, or the reason why there are none."""

    fraction: float | None  # None: the smallest feasible budget
    measured: Measured | None = None
    reason: str = ""
    is_infeasible: bool = False  # the reason is that the budget is below the floor

    @property
    def label(self) -> str:
        return "smallest" if self.fraction is None else f"{self.fraction:.2f}"

    @classmethod
    def from_dict(cls, fields: dict[str, Any]) -> Self:
        measured = fields["measured"]
        return cls(**fields | {"measured": None if measured is None else Measured(**measured)})


@dataclasses.dataclass(frozen=True, kw_only=True)
class PeerPoint:
    """One setting of a peer: its figures, or the reason why there are none."""

    peer: str
    setting: str
    peak_bytes: int | None = None
    time_ratio: float | None = None  # to plain eager
    reason: str = ""
    budget_bytes: int | None = None  # that it was given, if it was given bytes
    first_step_s: float | None = None  # until the first step has run: capture, plan, compilation
    error: float = 0.0  # standard error of the ratio
    largest_difference: float | None = None  # of gradients from eager's, relative
    eager_kernels: bool = False  # memfit's own choice, where compiled ones were allowed


Point = EagerRun | MemfitPoint | PeerPoint


def point_from_dict(part: str, fields: dict[str, Any]) -> Point:
    if part == EAGER:
        return EagerRun(**fields)
    return MemfitPoint.from_dict(fields) if part == MEMFIT else PeerPoint(**fields)


@dataclasses.dataclass(frozen=True, kw_only=True)
class CaseRecord:
    """All points of one case."""

    case: str
    eager: EagerRun | None = None
    memfit: tuple[MemfitPoint, ...] = ()
    peers: tuple[PeerPoint, ...] = ()
    finished: Mapping[str, str] = dataclasses.field(default_factory=dict)  # part -> "quick" or "full"

    def is_finished(self, part: str, *, quick: bool) -> bool:
        return self.finished.get(part) in (("quick", "full") if quick else ("full",))

    def without(self, part: str) -> Self:
        """Ready to measure a part anew."""
        return dataclasses.replace(
            self,
            eager=None if part == EAGER else self.eager,
            memfit=() if part == MEMFIT else self.memfit,
            peers=tuple(point for point in self.peers if point.peer != part),
            finished={name: mode for name, mode in self.finished.items() if name != part},
        )

    def with_point(self, point: Point) -> Self:
        if isinstance(point, EagerRun):
            return dataclasses.replace(self, eager=point)
        if isinstance(point, MemfitPoint):
            return dataclasses.replace(self, memfit=(*self.memfit, point))
        return dataclasses.replace(self, peers=(*self.peers, point))

    def with_finished(self, part: str, *, quick: bool) -> Self:
        return dataclasses.replace(self, finished={**self.finished, part: "quick" if quick else "full"})

    @classmethod
    def from_dict(cls, fields: dict[str, Any]) -> Self:
        return cls(
            case=fields["case"],
            eager=None if fields["eager"] is None else EagerRun(**fields["eager"]),
            memfit=tuple(MemfitPoint.from_dict(each) for each in fields["memfit"]),
            peers=tuple(PeerPoint(**each) for each in fields["peers"]),
            finished=fields["finished"],
        )


def load(path: Path) -> dict[str, CaseRecord]:
    """The records of a file by case; none if there is no file yet."""
    if not path.exists():
        return {}
    try:
        fields = json.loads(path.read_text(encoding="utf-8"))
        if (fields["format"], fields["version"]) != (FORMAT, VERSION):
            raise ValueError(f"format {fields['format']!r}, version {fields['version']!r}")
        records = [CaseRecord.from_dict(each) for each in fields["cases"]]
    except (KeyError, TypeError, ValueError) as error:
        raise InvalidFile(
            f"{path} holds no figures of this benchmark: {type(error).__name__}: {error}; "
            "move it away, or name another file with --results"
        ) from None
    return {record.case: record for record in records}


def save(path: Path, records: Mapping[str, CaseRecord], setting: Mapping[str, Any]) -> None:
    """Write all records; `setting` says under what circumstances they were measured."""
    cases = [dataclasses.asdict(record) for record in records.values()]
    fields = {"format": FORMAT, "version": VERSION, **setting, "cases": cases}
    write_atomically(path, json.dumps(fields, indent=1) + "\n")
