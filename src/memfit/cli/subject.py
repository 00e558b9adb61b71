"""What a command is about: a model and a sample, named on the command line and made when they are needed."""

import dataclasses
from typing import Any, Self

import psutil
import torch
from torch import nn

from memfit.capture.fakes import without_weights
from memfit.capture.sample import Sample
from memfit.cli import reference as references
from memfit.cli.models import find_model, parse_model
from memfit.cli.options import FloatType
from memfit.cli.reference import Reference
from memfit.cli.samples import Input, build_sample, call_sample, parse_inputs, parse_sample
from memfit.errors import InvalidModel, InvalidSample
from memfit.units import format_bytes

_LARGEST_SHARE = 0.5  # of the memory that is free, for parameters and their gradients


@dataclasses.dataclass(frozen=True, kw_only=True)
class Subject:
    """A model and a sample by name; nothing is imported before one of the verbs is called."""

    model: Reference
    sample: tuple[Input, ...] | Reference
    dtype: torch.dtype | None

    @classmethod
    def of(cls, model: str, inputs: list[str] | None, sample: str | None, dtype: FloatType | None) -> Self:
        """Read the options that name model and sample."""
        return cls(
            model=parse_model(model),
            sample=_parse_sample(inputs or [], sample),
            dtype=None if dtype is None else getattr(torch, dtype.value),
        )

    def without_weights(self) -> tuple[nn.Module, Sample]:
        """Model and sample that take no memory."""
        factory, make_sample = find_model(self.model), self._sample_function()
        with without_weights():  # one context for both: tensors of two cannot meet
            return factory.build(self.dtype), self._build_sample(make_sample)

    def with_weights(self, seed: int) -> tuple[nn.Module, Sample]:
        """Model and sample as they are trained, from a seed; refused where the model does not fit."""
        needed_bytes = self._state_bytes()
        if not _is_room_for(needed_bytes):
            raise InvalidModel(
                f"{self.model.text!r}: parameters and gradients take {format_bytes(needed_bytes)}, too much for what "
                f"is free here ({format_bytes(psutil.virtual_memory().available)}); take a smaller model"
            )
        return self._built(seed)

    def where_it_fits(self, seed: int) -> tuple[nn.Module, Sample]:
        """With weights, so that operators can be timed, where there is room for them; else without."""
        return self._built(seed) if _is_room_for(self._state_bytes()) else self.without_weights()

    def _built(self, seed: int) -> tuple[nn.Module, Sample]:
        factory, make_sample = find_model(self.model), self._sample_function()
        torch.manual_seed(seed)
        return factory.build(self.dtype), self._build_sample(make_sample)

    def _state_bytes(self) -> int:
        model, _ = self.without_weights()
        return 2 * sum(parameter.numel() * parameter.element_size() for parameter in model.parameters())

    def _sample_function(self) -> Any:
        return references.load(self.sample) if isinstance(self.sample, Reference) else None

    def _build_sample(self, make_sample: Any) -> Sample:
        if isinstance(self.sample, Reference):
            return call_sample(self.sample, make_sample, self.dtype)
        return build_sample(self.sample, self.dtype)


def _is_room_for(size_bytes: int) -> bool:
    return size_bytes <= _LARGEST_SHARE * psutil.virtual_memory().available


def _parse_sample(inputs: list[str], sample: str | None) -> tuple[Input, ...] | Reference:
    if inputs and sample is not None:
        raise InvalidSample("both --input and --sample are given; give the shapes or the function, not both")
    if sample is not None:
        return parse_sample(sample)
    if not inputs:
        raise InvalidSample(
            "there is no sample; give the shapes the model's forward takes, such as --input 16x3x224x224, "
            "or a function that makes them, such as --sample ./file.py:make_batch"
        )
    return parse_inputs(inputs)
