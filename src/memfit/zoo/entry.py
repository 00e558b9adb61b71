"""What the zoo knows about one of its plans without opening it."""

import dataclasses
from typing import Any, Self

from memfit.plan.plan import Plan
from memfit.zoo.catalog import Case


@dataclasses.dataclass(frozen=True, kw_only=True)
class Entry:
    """One plan of the zoo: the step it is for, and its figures."""

    name: str  # of the plan: "resnet50-x184-t4-0.50"
    model: str  # short name: "resnet50"
    reference: str  # what makes the model, as `--model` takes it
    inputs: tuple[str, ...]  # as `--input` takes them
    dtype: str | None
    optimizer: str
    outputs: str
    batch_size: int
    device: str
    budget_bytes: int
    peak_bytes: int  # predicted
    unplanned_peak_bytes: int
    slowdown: float  # predicted
    lower_bound: float
    times_measured: bool  # False: estimated from the device's published figures
    graph_digest: str
    torch_version: str

    @classmethod
    def of(cls, name: str, case: Case, plan: Plan) -> Self:
        assert plan.budget_bytes is not None
        return cls(
            name=name,
            model=case.name,
            reference=case.reference,
            inputs=case.inputs,
            dtype=case.dtype,
            optimizer=case.optimizer,
            outputs=case.outputs,
            batch_size=case.batch_size,
            device=plan.device,
            budget_bytes=plan.budget_bytes,
            peak_bytes=plan.peak_bytes,
            unplanned_peak_bytes=plan.unplanned_peak_bytes,
            slowdown=plan.slowdown,
            lower_bound=plan.lower_bound,
            times_measured=plan.times_measured,
            graph_digest=plan.program.graph_digest,
            torch_version=plan.torch_version,
        )

    @classmethod
    def from_dict(cls, fields: dict[str, Any]) -> Self:
        return cls(**fields | {"inputs": tuple(fields["inputs"])})

    @property
    def saved(self) -> float:
        """The part of the unplanned peak that the plan does without."""
        return 1 - self.peak_bytes / self.unplanned_peak_bytes

    @property
    def step_name(self) -> str:
        """The name without the share: "resnet50-x184-t4"."""
        return self.name.rpartition("-")[0]

    @property
    def step(self) -> tuple[Any, ...]:
        """What plans of one captured step have in common."""
        is_here = self.device == "cpu"
        return self.reference, self.inputs, self.dtype, self.optimizer, self.outputs, is_here

    def command(self) -> str:
        """The options that name the step on the command line."""
        words = [f'--model "{self.reference}"', *(f"--input {each}" for each in self.inputs)]
        words += [f"--optimizer {self.optimizer}"]
        words += [f"--outputs {self.outputs}"] if self.outputs != "all" else []
        words += [f"--dtype {self.dtype}"] if self.dtype is not None else []
        return " ".join(words)
