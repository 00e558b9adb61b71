"""The findings of a memory history: the peak and who holds it, what stays, how memory is cut up, what would help."""

import dataclasses
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

from memfit.doctor.ledger import BEFORE_FIRST, Held, Ledger
from memfit.doctor.stacks import BEFORE, NO_STACK, Owner, owner_of
from memfit.plan.allocator.history import Action, MemoryHistory
from memfit.plan.allocator.replay import Replay, replay
from memfit.plan.allocator.requests import USUAL_SETTINGS, AllocatorRun, compare_settings, requests_of
from memfit.plan.allocator.settings import AllocatorSettings

_MANY_EVENTS = 200_000  # above, few settings are tried: each takes a pass over all of them


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class OwnerRow:
    """What one line of code holds."""

    line: str
    operators: str  # those that asked for most of it
    size_bytes: int
    count: int
    first_position: int  # of its oldest block; BEFORE_FIRST: before the recording


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Part:
    """A piece of a segment."""

    size_bytes: int
    line: str  # who holds it; "": nobody


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class SegmentMap:
    """How one segment is cut up."""

    address: int
    size_bytes: int
    is_small: bool
    stream: int
    parts: tuple[Part, ...]  # by address

    @property
    def free_bytes(self) -> int:
        return sum(part.size_bytes for part in self.parts if not part.line)

    @property
    def largest_free_bytes(self) -> int:
        return max((part.size_bytes for part in self.parts if not part.line), default=0)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Refusal:
    """One time that memory ran out."""

    position: int
    requested_bytes: int
    device_free_bytes: int
    allocated_bytes: int
    reserved_bytes: int
    line: str

    @property
    def capacity_bytes(self) -> int:
        """Bytes that this process could have reserved."""
        return self.reserved_bytes + self.device_free_bytes


@dataclasses.dataclass(frozen=True, kw_only=True)
class Diagnosis:
    """Everything that there is to say about a history."""

    history: MemoryHistory
    replay: Replay
    allocated_bytes: Sequence[int]  # after every event
    reserved_bytes: Sequence[int]
    peak_position: int  # index into these, or BEFORE_FIRST
    owners: tuple[OwnerRow, ...]  # at the peak, biggest first
    never_freed: tuple[OwnerRow, ...]  # asked for in the recording and there at its end
    segments: tuple[SegmentMap, ...]  # at the peak, by address
    refusals: tuple[Refusal, ...]
    runs: tuple[AllocatorRun, ...]  # the same requests from an empty allocator on; the first under its own settings
    advice: tuple[str, ...] = ()  # beyond what the recording shows

    @property
    def peak_bytes(self) -> int:
        return max(self.replay.start_allocated_bytes, max(self.allocated_bytes, default=0))

    @property
    def peak_reserved_bytes(self) -> int:
        return max(self.replay.start_reserved_bytes, max(self.reserved_bytes, default=0))

    @property
    def reserved_at_peak_bytes(self) -> int:
        return sum(each.size_bytes for each in self.segments)

    @property
    def idle_at_peak_bytes(self) -> int:
        """Bytes reserved at the peak that nobody holds."""
        return sum(each.free_bytes for each in self.segments)

    @property
    def before_bytes(self) -> int:
        """Bytes held at the peak by blocks that are older than the recording."""
        return sum(row.size_bytes for row in self.owners if row.first_position == BEFORE_FIRST)


def diagnose(history: MemoryHistory, candidates: Sequence[AllocatorSettings] = USUAL_SETTINGS) -> Diagnosis:
    """Find out what a history says."""
    played = replay(history)
    ledger = Ledger(history, played)
    allocated, reserved, refusals = [], [], []
    for _ in ledger.changes():
        allocated.append(ledger.allocated_bytes)
        reserved.append(ledger.reserved_bytes)
        if history.events[ledger.position].action is Action.OUT_OF_MEMORY:
            refusals.append(_refusal(history, ledger))
    peak_position = _peak_position(played.start_allocated_bytes, allocated)
    at_peak = ledger_at(history, played, peak_position)
    newer = [held for held in ledger.blocks.values() if held.position != BEFORE_FIRST and held.is_allocated]
    return Diagnosis(
        history=history,
        replay=played,
        allocated_bytes=allocated,
        reserved_bytes=reserved,
        peak_position=peak_position,
        owners=_rows(history, (held for held in at_peak.blocks.values() if held.is_allocated)),
        never_freed=_rows(history, newer),
        segments=tuple(_maps(history, at_peak)),
        refusals=tuple(refusals),
        runs=tuple(compare_settings(requests_of(history, played.start), _tried(history, candidates))),
    )


def ledger_at(history: MemoryHistory, played: Replay, position: int) -> Ledger:
    """Go to the moment after an event."""
    ledger = Ledger(history, played)
    for _ in ledger.changes(until=position):
        pass
    return ledger


def line_of(history: MemoryHistory, held: Held) -> str:
    """Name who asked for a block."""
    return _owner(history, held).line


def _owner(history: MemoryHistory, held: Held) -> Owner:
    if held.frame < 0:
        return Owner(BEFORE if held.position == BEFORE_FIRST else NO_STACK, "")
    return owner_of(history.frames[held.frame])


def _rows(history: MemoryHistory, blocks: Iterable[Held]) -> tuple[OwnerRow, ...]:
    sizes: Counter[str] = Counter()
    counts: Counter[str] = Counter()
    operators: dict[str, Counter[str]] = {}
    first: dict[str, int] = {}
    for held in blocks:
        line, operator = _owner(history, held)
        sizes[line] += held.size_bytes
        counts[line] += 1
        operators.setdefault(line, Counter())[operator] += held.size_bytes
        first[line] = min(first.get(line, held.position), held.position)
    return tuple(
        OwnerRow(
            line=line,
            operators=", ".join(name for name, _ in operators[line].most_common(3) if name),
            size_bytes=size_bytes,
            count=counts[line],
            first_position=first[line],
        )
        for line, size_bytes in sizes.most_common()
    )


def _maps(history: MemoryHistory, ledger: Ledger) -> Iterable[SegmentMap]:
    addresses = sorted(ledger.blocks)
    index = 0
    for start, segment in sorted(ledger.segments.items()):
        end = start + segment.size_bytes
        while index < len(addresses) and addresses[index] < start:
            index += 1
        inside = []
        while index < len(addresses) and addresses[index] < end:
            inside.append(addresses[index])
            index += 1
        yield SegmentMap(
            address=start,
            size_bytes=segment.size_bytes,
            is_small=segment.is_small,
            stream=segment.stream,
            parts=tuple(_parts(history, ledger.blocks, inside, start, end)),
        )


def _parts(
    history: MemoryHistory, blocks: Mapping[int, Held], inside: Sequence[int], start: int, end: int
) -> Iterable[Part]:
    for address in inside:
        if start < address:
            yield Part(size_bytes=address - start, line="")
        held = blocks[address]
        start = min(end, address + held.size_bytes)
        yield Part(size_bytes=start - address, line=line_of(history, held))
    if start < end:
        yield Part(size_bytes=end - start, line="")


def _peak_position(start_bytes: int, allocated: Sequence[int]) -> int:
    highest = max(range(len(allocated)), key=allocated.__getitem__, default=BEFORE_FIRST)
    return highest if highest != BEFORE_FIRST and allocated[highest] >= start_bytes else BEFORE_FIRST


def _refusal(history: MemoryHistory, ledger: Ledger) -> Refusal:
    event = history.events[ledger.position]
    return Refusal(
        position=ledger.position,
        requested_bytes=event.size_bytes,
        device_free_bytes=event.address,  # what torch records in its place
        allocated_bytes=ledger.allocated_bytes,
        reserved_bytes=ledger.reserved_bytes,
        line=owner_of(history.frames[event.frame]).line if event.frame >= 0 else NO_STACK,
    )


def _tried(history: MemoryHistory, candidates: Sequence[AllocatorSettings]) -> list[AllocatorSettings]:
    others = [each for each in candidates if each != history.settings]
    return [history.settings, *(others[:1] if len(history.events) > _MANY_EVENTS else others)]
