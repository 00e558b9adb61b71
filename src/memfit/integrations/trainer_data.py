"""What a transformers Trainer feeds its model: its longest batch, and buckets for the lengths of its data."""

import dataclasses
import logging
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from memfit.errors import InvalidInput, InvalidSample
from memfit.integrations.data_state import data_put_back
from memfit.integrations.within import generators_put_back
from memfit.step.buckets import PAD_VALUES, Buckets

log = logging.getLogger(__name__)

_LOOKED_AT = 20_000  # samples; of more, every so many-th
_LOOKED_AT_WITHOUT = 64  # samples that say nothing about their length
_CAPTURE_STEPS = 5  # what a capture takes, in steps of a small model: a bucket must save that
_SHORTEST_SEARCH_S, _LONGEST_SEARCH_S, _SEARCH_S_A_STEP = 1.0, 6.0, 0.01
LENGTHS_OF = "input_ids"


@dataclasses.dataclass(frozen=True, kw_only=True)
class TrainerData:
    """A batch to plan for, and how batches are padded."""

    batch: Mapping[str, Any]  # as long as batches get
    buckets: Buckets | None


class BucketCollator:
    """The trainer's own collator, and then padding to the bucket."""

    def __init__(self, collator: Any, buckets: Buckets, values: Mapping[str, float], side: str) -> None:
        self.collator = collator
        self.buckets = buckets
        self.values = dict(values)
        self.side = side

    def __call__(self, samples: Any) -> dict[str, Any]:
        return self.buckets.pad(self.collator(samples), values=self.values, of=LENGTHS_OF, side=self.side)


def look_at_data(trainer: Any, wanted: Buckets | int | None) -> TrainerData:
    """Make the longest batch from the trainer's own dataset and collator, and choose buckets if lengths differ."""
    if trainer.train_dataset is None:
        raise InvalidInput("the trainer has no train_dataset to take a batch from; give it one before it is fitted")
    with generators_put_back(), data_put_back(trainer.train_dataset, trainer.data_collator):
        loader = trainer.get_train_dataloader()
        dataset: Any = getattr(loader, "dataset", None)
        if not hasattr(dataset, "__getitem__") or not hasattr(dataset, "__len__"):
            return TrainerData(
                batch=_checked(next(iter(loader))), buckets=wanted if isinstance(wanted, Buckets) else None
            )
        has_lengths = len(dataset) > 0 and _length(dataset[0]) > 0  # else the collator makes tokens, or there are none
        places = _places(len(dataset)) if has_lengths else range(min(len(dataset), _LOOKED_AT_WITHOUT))
        lengths = [_length(dataset[place]) for place in places]
        by_length = [place for _, place in sorted(zip(lengths, places, strict=True), reverse=True)]
        size = min(trainer.args.train_batch_size, len(by_length))
        longest = _checked(loader.collate_fn([dataset[place] for place in by_length[:size]]))
        shortest = _checked(loader.collate_fn([dataset[place] for place in by_length[-size:]]))
    _check_alike(longest, shortest)
    if not wanted or not _varies(longest, shortest):
        return TrainerData(batch=longest, buckets=None)
    if isinstance(wanted, int) and not any(lengths):
        log.info("lengths are not known before the collator makes tokens; give buckets=memfit.Buckets(...) to pad")
        return TrainerData(batch=longest, buckets=None)
    _check_can_pad(trainer, longest)
    buckets = wanted if isinstance(wanted, Buckets) else _choose(trainer, lengths, wanted, size, longest)
    padded = buckets.pad(longest, values=pad_values(trainer), of=LENGTHS_OF, side=pad_side(trainer))
    return TrainerData(batch=padded, buckets=buckets)


def pad_values(trainer: Any) -> dict[str, float]:
    """What tensors of a batch are padded with, by name."""
    token = getattr(trainer.processing_class, "pad_token_id", None)
    if token is None:
        token = getattr(getattr(trainer.model, "config", None), "pad_token_id", None)
    labels = dict.fromkeys((*trainer.label_names, "shift_labels"), PAD_VALUES["labels"])
    return {**PAD_VALUES, **labels, LENGTHS_OF: float(token if isinstance(token, int) and token >= 0 else 0)}


def pad_side(trainer: Any) -> str:
    """The side that the trainer's tokenizer pads, if it has one."""
    return str(getattr(trainer.processing_class, "padding_side", "right"))


def _choose(trainer: Any, lengths: Sequence[int], most: int, size: int, longest: Mapping[str, Any]) -> Buckets:
    multiple = getattr(trainer.data_collator, "pad_to_multiple_of", None) or 1
    known = [length for length in lengths if length > 0]
    beyond = longest[LENGTHS_OF].shape[1]  # what the collator makes of the longest, separators included
    more = beyond - -(-max(known) // multiple) * multiple
    return Buckets.of(
        [length + max(0, more) for length in known],
        most=most,
        batch_size=size,
        multiple=multiple,
        least_gain=max(0.01, _CAPTURE_STEPS / _steps(trainer)),
    )


def search_s(trainer: Any) -> float:
    """Seconds that a search may take: a better plan must save in training what it took to find."""
    return min(_LONGEST_SEARCH_S, max(_SHORTEST_SEARCH_S, _SEARCH_S_A_STEP * _steps(trainer)))


def _steps(trainer: Any) -> float:
    """How many batches the trainer will run, about."""
    accumulated = trainer.args.gradient_accumulation_steps
    if trainer.args.max_steps > 0:
        return float(trainer.args.max_steps * accumulated)
    samples = len(trainer.train_dataset) if hasattr(trainer.train_dataset, "__len__") else 1
    return max(1.0, float(trainer.args.num_train_epochs * samples / trainer.args.train_batch_size))


def _places(count: int) -> range:
    return range(0, count, max(1, -(-count // _LOOKED_AT)))


def _length(sample: Any) -> int:
    """How long a sample is; 0 if it has no length."""
    value = sample.get(LENGTHS_OF) if isinstance(sample, Mapping) else None
    try:
        return len(value) if value is not None else 0
    except TypeError:
        return 0


def _checked(batch: Any) -> Mapping[str, Any]:
    if not isinstance(batch, Mapping):
        raise InvalidSample(
            f"the trainer's collator makes a {type(batch).__name__}; a dict of the model's arguments was expected"
        )
    return dict(batch)


def _check_alike(one: Mapping[str, Any], other: Mapping[str, Any]) -> None:
    """Refuse data whose batches are of different kinds."""
    if one.keys() != other.keys():
        differing = ", ".join(sorted(one.keys() ^ other.keys()))
        raise InvalidSample(
            f"batches of this trainer have different keys: {differing} only in some; make the collator give all of them"
        )
    for name, value in one.items():
        kinds = [str(getattr(each, "dtype", type(each).__name__)) for each in (value, other[name])]
        if kinds[0] != kinds[1]:
            raise InvalidSample(f"{name!r} is {kinds[0]} in one batch of this trainer and {kinds[1]} in another")


def _varies(one: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    given = one.get(LENGTHS_OF)
    return isinstance(given, torch.Tensor) and given.dim() >= 2 and given.shape[1] != other[LENGTHS_OF].shape[1]


def _check_can_pad(trainer: Any, batch: Mapping[str, Any]) -> None:
    """Refuse to pad where padding would change the numbers."""
    if "attention_mask" in batch:
        return
    config = getattr(trainer.model, "config", None)
    causal = "CausalLM" in type(trainer.model).__name__ or "LMHead" in type(trainer.model).__name__
    if not (causal or getattr(config, "is_decoder", False)) or pad_side(trainer) == "left":
        raise InvalidSample(
            "batches of this trainer differ in length and have no 'attention_mask', without which padding changes what "
            "the model computes; let the collator make one, or give buckets=None to capture every length by itself"
        )
