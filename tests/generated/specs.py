"""A generated training run as plain data, so that it can be stored, printed and shrunk."""

import dataclasses
import json
from typing import Any


@dataclasses.dataclass(frozen=True)
class LayerSpec:
    """One building block: its kind in `layer.LAYERS`, its options, and the layers inside it."""

    kind: str
    options: dict[str, Any] = dataclasses.field(default_factory=dict)
    inner: tuple["LayerSpec", ...] = ()


@dataclasses.dataclass(frozen=True, kw_only=True)
class ModelSpec:
    """A model from its batch to its outputs."""

    domain: str = "rows"  # of the batch: "rows", "sequence", "signal", "image", "volume" or "tokens"
    batch: int = 2
    size: int = 8  # of each axis that is neither batch nor channels
    channels: int = 8
    layers: tuple[LayerSpec, ...] = ()
    dtype: str = "float32"
    channels_last: bool = False
    inputs: str = "tensor"  # how the forward is called: one of `build.INPUTS`
    outputs: str = "tensor"  # what the forward returns: one of `build.OUTPUTS`
    tied: bool = False  # the head has the weight of the embedding


@dataclasses.dataclass(frozen=True, kw_only=True)
class LoopSpec:
    """What the loop around a model does."""

    loss: str = "square"  # "square", "cross entropy", "smooth", "sum" or one of `losses.LOSSES`, if the model has none
    forwards: int = 1  # calls of the model for one backward
    accumulated: int = 1  # backwards before the gradients are compared
    set_to_none: bool = True
    autocast: bool = False
    partial: bool = False  # the second batch is smaller
    evaluated: bool = False  # between two steps the model is called in `eval()`
    one_output: bool = False  # the loss reads the first output alone
    skips: bool = False  # the loss reads every second output alone
    draws: bool = False  # the loss draws before it calls the model


@dataclasses.dataclass(frozen=True, kw_only=True)
class FitSpec:
    """What `memfit.fit` is asked for."""

    budget: float = 0.0  # a fraction of the unplanned peak; 0: the smallest there is
    allow: tuple[str, ...] = ("recompute", "lean")
    kernels: str = "eager"
    outside_loss: bool = True  # tell `fit` of the loss
    in_autocast: bool = True  # call `fit` under the autocast of the loop, not only where the loss does


@dataclasses.dataclass(frozen=True, kw_only=True)
class Spec:
    """Everything about one run; `seed` makes weights, batches and draws."""

    seed: int
    model: ModelSpec = ModelSpec()
    loop: LoopSpec = LoopSpec()
    fit: FitSpec = FitSpec()

    def to_json(self) -> str:
        return json.dumps(dataclasses.asdict(self))

    @classmethod
    def from_json(cls, text: str) -> "Spec":
        content = json.loads(text)
        model = content["model"]
        model["layers"] = _layers(model["layers"])
        content["fit"]["allow"] = tuple(content["fit"]["allow"])
        return cls(
            seed=content["seed"],
            model=ModelSpec(**model),
            loop=LoopSpec(**content["loop"]),
            fit=FitSpec(**content["fit"]),
        )


def _layers(content: list[dict[str, Any]]) -> tuple[LayerSpec, ...]:
    return tuple(LayerSpec(each["kind"], each["options"], _layers(each["inner"])) for each in content)
