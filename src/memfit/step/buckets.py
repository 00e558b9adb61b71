"""Padded lengths for data of many lengths, so that a handful of captured calls serve all of them.

Note [Fewest padded tokens]
    A batch is padded to its longest sample, and then on to the next bucket. Which lengths batches have follows from the
    lengths of samples: the longest of n drawn ones is at most L with probability F(L)^n. The buckets are those that
    make the expected work least, found by a dynamic program over the distinct lengths: the last bucket is the longest
    length, and the best k buckets up to a length are the best k - 1 up to a shorter one and that length itself. Where
    the shorter one lies only moves up with the length, so half of the places are found between those found before.
"""

import bisect
import dataclasses
import itertools
import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F

from memfit.errors import InvalidInput, InvalidSample

PAD_VALUES: dict[str, float] = {"labels": -100}  # by name of a tensor of the batch; others are padded with 0
_MOST_LENGTHS = 1024  # distinct ones that the program looks at; more are rounded up to these


@dataclasses.dataclass(frozen=True, kw_only=True)
class Buckets:
    """The lengths that batches are padded to, ascending."""

    lengths: tuple[int, ...]
    work_ratio: float  # expected work with these buckets over that of batches padded to their longest sample

    @classmethod
    def of(
        cls,
        lengths: Iterable[int],
        *,
        most: int = 8,
        batch_size: int = 1,
        multiple: int = 1,
        least_gain: float = 0.01,
        work: Callable[[int], float] = float,
    ) -> "Buckets":
        """Choose at most `most` buckets for samples of these lengths, see Note [Fewest padded tokens].

        `work` is what a batch of a padded length costs; by default that is in proportion to the length. Buckets are
        multiples of `multiple`. One more must save `least_gain` of the work that batches have anyway.
        """
        histogram = Counter(-(-length // multiple) * multiple for length in lengths)
        if most < 1 or batch_size < 1 or multiple < 1:
            raise InvalidInput("buckets need at least one of most, batch_size and multiple")
        if not histogram or min(histogram) < 1:
            raise InvalidInput("buckets are chosen from lengths of samples, whole numbers above 0; none were given")
        distinct, weights = _batch_lengths(_coarse(histogram), batch_size)
        costs = [work(length) for length in distinct]
        exact = sum(weight * cost for weight, cost in zip(weights, costs, strict=True))
        ends = _best_ends(weights, costs, min(most, len(distinct)), least_gain * exact)
        chosen = tuple(distinct[end] for end in ends)
        return cls(lengths=chosen, work_ratio=_expected(weights, costs, ends) / exact)

    def length_for(self, length: int) -> int:
        """The bucket of a length. One beyond all buckets is its own."""
        place = bisect.bisect_left(self.lengths, length)
        return self.lengths[place] if place < len(self.lengths) else length

    def pad(
        self,
        batch: Mapping[str, Any],
        *,
        values: Mapping[str, float] = PAD_VALUES,
        of: str = "input_ids",
        side: str = "right",
    ) -> dict[str, Any]:
        """A batch whose tensors are as long as the bucket: those of the shape of `of` in their first two axes.

        `values` says what to pad a tensor with, by its name; without a name there it is 0.
        """
        if side not in ("left", "right"):
            raise InvalidInput(f'a side to pad is "left" or "right", {side!r} was given')
        given = batch.get(of)
        if not isinstance(given, torch.Tensor) or given.dim() < 2:
            raise InvalidSample(
                f"the batch has no tensor {of!r} of samples by lengths; say by of= which of {', '.join(batch)} has them"
            )
        rows, length = given.shape[:2]
        missing = self.length_for(length) - length
        return {
            name: _padded(value, missing, values.get(name, 0), side)
            if isinstance(value, torch.Tensor) and value.dim() >= 2 and value.shape[:2] == (rows, length)
            else value
            for name, value in batch.items()
        }

    def __str__(self) -> str:
        return f"{len(self.lengths)} buckets ({', '.join(map(str, self.lengths))}), {self.work_ratio - 1:+.1%} work"


def _padded(tensor: torch.Tensor, missing: int, value: float, side: str) -> torch.Tensor:
    if not missing:
        return tensor
    ends = (0, missing) if side == "right" else (missing, 0)
    return F.pad(tensor, (*(0,) * (2 * (tensor.dim() - 2)), *ends), value=value)


def _coarse(histogram: Mapping[int, int]) -> Counter[int]:
    """The same counts at no more lengths than the program can look at, each rounded up."""
    lengths = sorted(histogram)
    step = -(-len(lengths) // _MOST_LENGTHS)
    kept = [*lengths[step - 1 :: step], lengths[-1]]
    coarse: Counter[int] = Counter()
    for length, count in histogram.items():
        coarse[kept[bisect.bisect_left(kept, length)]] += count
    return coarse


def _batch_lengths(histogram: Mapping[int, int], batch_size: int) -> tuple[list[int], list[float]]:
    """The lengths that batches have, and how often, from those of samples."""
    lengths = sorted(histogram)
    total = sum(histogram.values())
    up_to = [(count / total) ** batch_size for count in itertools.accumulate(histogram[each] for each in lengths)]
    return lengths, [one - other for one, other in zip(up_to, [0.0, *up_to], strict=False)]


def _expected(weights: Sequence[float], costs: Sequence[float], ends: Sequence[int]) -> float:
    starts = [0, *(end + 1 for end in ends)]
    return sum(costs[end] * sum(weights[start : end + 1]) for start, end in zip(starts, ends, strict=False))


def _best_ends(weights: Sequence[float], costs: Sequence[float], most: int, least_gain: float = 0.0) -> list[int]:
    """Places of the buckets, by the program of Note [Fewest padded tokens]; each must save `least_gain`."""
    sums = [0.0, *itertools.accumulate(weights)]
    best = [sums[end + 1] * cost for end, cost in enumerate(costs)]  # with one bucket, up to and with a place
    origins: list[list[int]] = []  # for every bucket more: where the one before the last ends
    for _ in range(most - 1):
        following, origin = _with_one_more(best, sums, costs)
        if best[-1] - following[-1] < least_gain:
            break
        best = following
        origins.append(origin)
    ends = [len(costs) - 1]
    for origin in reversed(origins):
        ends.append(origin[ends[-1]])
    return ends[::-1]


def _with_one_more(
    best: Sequence[float], sums: Sequence[float], costs: Sequence[float]
) -> tuple[list[float], list[int]]:
    """The least work with one bucket more up to every place, and where the bucket before the last ends."""
    least, origin = [math.inf] * len(costs), [-1] * len(costs)
    waiting = [(0, len(costs) - 1, 0, len(costs) - 1)]  # places to look at, and between which the one before ends
    while waiting:
        low, high, first, last = waiting.pop()
        if low > high:
            continue
        end, chosen = (low + high) // 2, first
        for before in range(first, min(last, end - 1) + 1):
            work = best[before] + (sums[end + 1] - sums[before + 1]) * costs[end]
            if work < least[end]:
                least[end], origin[end], chosen = work, before, before
        waiting += [(low, end - 1, first, chosen), (end + 1, high, chosen, last)]
    return least, origin
