"""What an estimate says, as rows of plain text and numbers; how they look is decided elsewhere."""

import dataclasses
from collections.abc import Iterable

from memfit.estimate import Estimate, ParameterCount
from memfit.ir import Kind, Storage
from memfit.report.blocks import equal_blocks_as_one
from memfit.report.limit import Limit
from memfit.units import format_bytes

NO_MODULE = "(no submodule: batch, optimizer state, other)"
_ENOUGH_MODULES = 5  # rows from which on a table by module tells something
_NAMED_INPUTS = 4  # tensors of the batch that are written out
_WHOLE_MOMENTS = {"optimizer": "optimizer step", "step": "somewhere in a measured step"}  # by phase
_LARGEST_SHARE = 0.5  # of the modules' bytes in one row: above, the row wants to be taken apart


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    """A part of the peak."""

    label: str
    size_bytes: int
    share: float  # of the peak


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class ValueRow:
    """One value that is live at the peak."""

    size_bytes: int
    kind: str
    shape: str  # "512x512x3x3"
    dtype: str
    place: str  # the parameter's name, or the path of the module that made the value
    source: str  # the line that made it, or ""


def range_words(estimate: Estimate) -> str:
    """Say between what ends the peaks on a CUDA device lie, and why; nothing where it is for another one."""
    ranges = estimate.ranges()
    if not ranges:
        return ""
    said = ", ".join(f"{name} {format_bytes(low)} to {format_bytes(high)}" for name, (low, high) in ranges.items())
    if estimate.most_needed_bytes == estimate.needed_bytes:
        return f"{said}: as far as simulated steps were from recorded ones"
    return f"{said}: depends on {estimate.reason}"


def loop_words(estimate: Estimate) -> str:
    """Say what a loop that does otherwise would cost; nothing where it makes no difference."""
    costs = {words: size_bytes for words, size_bytes in estimate.loop_costs.items() if size_bytes}
    said = [f"{words} {'+' if size > 0 else '-'}{format_bytes(abs(size))}" for words, size in costs.items()]
    return f"in another loop: {', '.join(said)}" if said else ""


def verdict(estimate: Estimate, limit: Limit) -> str:
    """Say whether a step fits a limit, or what that depends on."""
    return limit.verdict(estimate.needed_bytes, estimate.most_needed_bytes, estimate.reason)


def printable(text: str) -> str:
    r"""Names come from the user's code: nothing in them may steer a terminal.

    >>> printable("layer\x1b[31m\n1")
    'layer?[31m?1'
    """
    return "".join(letter if letter.isprintable() else "?" for letter in text)


def peak_place(estimate: Estimate) -> str:
    """Where the peak is: pass, module and operation."""
    peak = estimate.timeline.peak
    if peak.phase in _WHOLE_MOMENTS:
        return _WHOLE_MOMENTS[peak.phase]
    module = printable(peak.module) or "the model itself"
    return f"{peak.phase} of {module}, operation {printable(peak.label)}"


def batch_words(estimate: Estimate) -> str:
    """The sample the figures are for: shapes and dtypes."""
    storages = [estimate.graph.storages[index] for index in estimate.graph.resident]
    batch = [f"{_shape(storage)} {storage.dtype}" for storage in storages if storage.kind is Kind.BATCH]
    others = f" and {len(batch) - _NAMED_INPUTS} more" if len(batch) > _NAMED_INPUTS else ""
    return ", ".join(batch[:_NAMED_INPUTS]) + others


def step_words(estimate: Estimate) -> str:
    """What is counted: with an optimizer or without."""
    return f"training step with {estimate.optimizer}" if estimate.optimizer else estimate.passes


def kind_rows(estimate: Estimate) -> list[Row]:
    """The peak by kind, biggest first."""
    return [_row(estimate, str(kind), size_bytes) for kind, size_bytes in estimate.by_kind().items()]


def module_rows(estimate: Estimate, *, depth: int | None = None, limit: int = 10) -> list[Row]:
    """The biggest modules at the peak, equal blocks in one row, and one row for the others."""
    sizes = estimate.by_module(automatic_depth(estimate) if depth is None else depth)
    parts = equal_blocks_as_one({printable(module) or NO_MODULE: size_bytes for module, size_bytes in sizes.items()})
    rows = [_row(estimate, label, size_bytes) for label, size_bytes in parts]
    others = rows[limit:]
    if len(others) < 2:
        return rows
    return [*rows[:limit], _row(estimate, f"({len(others)} others)", sum(row.size_bytes for row in others))]


def automatic_depth(estimate: Estimate) -> int:
    """How many names deep the modules of this model begin to tell something.

    `layer1` to `layer4` do. `model.layers` does not: it is nearly everything, and its blocks
    are one name deeper.
    """
    deepest = max((_depth(storage) for storage in estimate.graph.storages), default=1)
    fallback = None
    for depth in range(1, deepest + 1):
        sizes = [size_bytes for module, size_bytes in estimate.by_module(depth).items() if module]
        if len(sizes) < _ENOUGH_MODULES:
            continue
        if max(sizes) <= _LARGEST_SHARE * sum(sizes):
            return depth
        fallback = fallback or depth
    return fallback or deepest


def value_rows(estimate: Estimate, count: int) -> list[ValueRow]:
    """The biggest values that are live at the peak."""
    return [_value_row(storage) for storage in estimate.biggest(count)]


def parameter_rows(estimate: Estimate) -> list[tuple[str, int, int]]:
    """Words, count and bytes: one row for each dtype, trainable or frozen, and the total."""
    rows = [
        (f"{each.dtype}, {'trainable' if each.trainable else 'frozen'}", each.count, each.size_bytes)
        for each in estimate.parameters
    ]
    if len(rows) < 2:
        return rows
    return [*rows, ("total", *_totals(estimate.parameters))]


def note_lines(estimate: Estimate) -> list[str]:
    """What a reader should know about the figures."""
    return [printable(note) for note in estimate.notes]


def _row(estimate: Estimate, label: str, size_bytes: int) -> Row:
    return Row(label=label, size_bytes=size_bytes, share=size_bytes / max(1, estimate.peak_bytes))


def _depth(storage: Storage) -> int:
    return storage.module.count(".") + 1


def _value_row(storage: Storage) -> ValueRow:
    is_named = not storage.source  # what the step makes has a source line; what it starts from has a name
    return ValueRow(
        size_bytes=storage.size_bytes,
        kind=str(storage.kind),
        shape=_shape(storage),
        dtype=storage.dtype,
        place=printable((is_named and storage.name) or storage.module or storage.name),
        source=printable(storage.source),
    )


def _shape(storage: Storage) -> str:
    return "x".join(map(str, storage.shape)) or "scalar"


def _totals(parameters: Iterable[ParameterCount]) -> tuple[int, int]:
    counts = list(parameters)
    return sum(each.count for each in counts), sum(each.size_bytes for each in counts)
