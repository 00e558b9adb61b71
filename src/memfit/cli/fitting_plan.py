"""Which plan of a model would have fitted the memory that a snapshot or a message tells of."""

import dataclasses

from memfit import api
from memfit.cli.options import FloatType, optimizer_of
from memfit.cli.progress import display
from memfit.cli.streams import only_results_on_stdout
from memfit.cli.subject import Subject
from memfit.errors import InfeasibleBudget, InvalidInput
from memfit.measure.devices import find_device
from memfit.units import format_bytes

_PLANNING_S = 20.0  # a first answer; `memfit plan` searches for as long as one likes


@dataclasses.dataclass(frozen=True, kw_only=True)
class Trained:
    """The model that was trained when memory ran out, and its device."""

    subject: Subject
    optimizer: str
    device: str

    def advice(self, capacity_bytes: int | None) -> str:
        """Say which plan fits the device, or the less of it that was there."""
        room_bytes = find_device(self.device).usable_bytes
        if capacity_bytes is not None:
            room_bytes = min(room_bytes, capacity_bytes)
        with only_results_on_stdout(), display() as shown:
            shown.doing("building the model")
            model, sample = self.subject.without_weights()
            shown.doing("planning")
            try:
                plan = api.plan(
                    model,
                    sample,
                    reserved=room_bytes,
                    optimizer=optimizer_of(self.optimizer),
                    device=self.device,
                    time_limit=_PLANNING_S,
                )
            except InfeasibleBudget as error:
                return f"No plan of this model and sample fits the {format_bytes(room_bytes)} there were: {error}"
        assert plan.reserved is not None
        reserved = f"{format_bytes(plan.reserved.reserved_bytes)} of the {format_bytes(room_bytes)} there were"
        if plan.is_identity:
            return f"The step of this model and sample fits without a plan: it reserves {reserved}."
        return (
            f"A plan fits: the step reserves {reserved}, by simulation, "
            f"{plan.slowdown:+.1%} slower as estimated; memfit plan makes it a file."
        )


def trained(
    model: str | None,
    inputs: list[str] | None,
    sample: str | None,
    optimizer: str,
    dtype: FloatType | None,
    device: str | None,
) -> Trained | None:
    """Read the options that name what was trained; None where none is given."""
    if model is None:
        if inputs or sample or device or dtype:
            raise InvalidInput("--input, --sample, --dtype and --device say how a model was trained; give --model too")
        return None
    if device is None:
        raise InvalidInput('--model needs the GPU it was trained on; write for example --device "RTX 4090"')
    find_device(device)
    return Trained(subject=Subject.of(model, inputs, sample, dtype), optimizer=optimizer, device=device)
