"""Say why no plan fits a budget, and what would help."""

import dataclasses
from collections.abc import Mapping, Sequence

from memfit.errors import InfeasibleBudget
from memfit.ir import Graph, Kind, LossMemory, OptimizerMemory
from memfit.units import format_bytes

_IN_CHUNKS = ("aten.mm", "aten.addmm", "log_softmax", "nll_loss")  # what "chunk" runs in parts


@dataclasses.dataclass(frozen=True, kw_only=True)
class Shortage:
    """Split the least a step takes: into what lives whatever is planned, and what comes on top of it."""

    limit_bytes: int
    smallest_bytes: int  # of the plans that were found
    slowdown: float  # of that plan
    always: Mapping[str, int]  # live from the start to the end of every step, by name
    at_end: Mapping[str, int]  # live when every step ends, beside that
    floor_bytes: int  # no plan can be below
    operation: str  # that sets the floor, in words
    on_top_bytes: int  # that it takes on top of `always`, and of `at_end` if it comes last
    comes_last: bool = False
    is_bound: bool = False  # it was not run, and what it takes inside is bounded from above
    not_allowed: Sequence[str] = ()  # techniques that would keep less

    def error(self) -> InfeasibleBudget:
        """Say all that in a sentence, and advise what would lower the part that matters."""
        parts = {**self.always, **self.at_end}
        total_bytes = sum(parts.values())
        named = ", ".join(f"{name} {format_bytes(size)}" for name, size in parts.items() if size)
        return InfeasibleBudget(
            f"no plan of {format_bytes(self.limit_bytes)} was found: the smallest that was needs "
            f"{format_bytes(self.smallest_bytes)} ({self.slowdown:+.0%} time). {format_bytes(total_bytes)} live "
            f"whatever is planned ({named}), and {self._top()}; {self._advice()}",
            smallest_bytes=self.smallest_bytes,
            floor_bytes=self.floor_bytes,
            operation=self.operation,
        )

    def _top(self) -> str:
        parts = {**self.always, **(self.at_end if self.comes_last else {})}
        *names, last = [name for name, size in parts.items() if size] or ["nothing"]
        beside = f"{', '.join(names)} and {last}" if names else last
        if self.is_bound:
            return (
                f"{self.operation}, which does not fit the budget to be run here and seen, may need up to "
                f"{format_bytes(self.on_top_bytes)} on top of {beside}, by what calls of its kind took"
            )
        return f"{self.operation} needs {format_bytes(self.on_top_bytes)} on top of {beside}"

    def _advice(self) -> str:
        lasting_bytes = sum({**self.always, **self.at_end}.values())
        batch_bytes = self.always.get("batch", 0)
        if lasting_bytes - batch_bytes > self.limit_bytes:  # neither a batch nor a technique changes that
            has_optimizer = bool(self.always.get("optimizer state"))
            less = "an optimizer that keeps less" if has_optimizer else "train fewer parameters"
            return f"give a bigger budget, or {less}"
        helping = self.not_allowed
        if self.floor_bytes > self.limit_bytes:  # what is kept less of does not make an operator smaller
            in_parts = any(name in self.operation for name in _IN_CHUNKS)
            helping = [each for each in self.not_allowed if each == "chunk" and in_parts]
        if not helping:
            return "give a bigger budget, or a smaller batch"
        return f"give a bigger budget, a smaller batch, or allow more ({', '.join(map(repr, helping))})"


def always_live(
    graph: Graph, optimizer: OptimizerMemory, loss: LossMemory | None, external_bytes: int
) -> dict[str, int]:
    """Count what lives from the start of a step to its end, in bytes by name; `external_bytes` count as state."""
    sizes = dict.fromkeys((Kind.PARAMETER, Kind.BUFFER, Kind.BATCH), 0)
    for index in graph.resident:
        storage = graph.storages[index]
        sizes[storage.kind] = sizes.get(storage.kind, 0) + storage.size_bytes
    sizes[Kind.BATCH] += 0 if loss is None else loss.batch_bytes
    return {
        "parameters": sizes[Kind.PARAMETER],
        "buffers": sizes[Kind.BUFFER],
        "optimizer state": optimizer.state_bytes - external_bytes,
        "what stays beside the step": external_bytes,
        "batch": sizes[Kind.BATCH],
    }


def gradients_of(graph: Graph) -> dict[str, int]:
    """Count the gradients that parameters get by the end of a step."""
    gradients = {gradient for _, gradient in graph.trained}
    return {"gradients": sum(graph.storages[each].size_bytes for each in gradients)}
