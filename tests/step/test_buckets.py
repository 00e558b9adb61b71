"""Buckets against every choice there is, and batches padded to them."""

import itertools
import random

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import memfit
from memfit.step.buckets import _batch_lengths, _best_ends, _expected


@given(
    st.lists(st.integers(1, 60), min_size=1, max_size=40),
    st.integers(1, 5),
    st.integers(1, 4),
    st.sampled_from([1.0, 2.0]),
)
def test_no_other_choice_of_buckets_pads_less(lengths, most, batch_size, power):
    histogram = {length: lengths.count(length) for length in lengths}
    distinct, weights = _batch_lengths(histogram, batch_size)
    costs = [length**power for length in distinct]
    count = min(most, len(distinct))
    every = ([*inner, len(distinct) - 1] for inner in itertools.combinations(range(len(distinct) - 1), count - 1))
    least = min(_expected(weights, costs, ends) for ends in every)
    assert _expected(weights, costs, _best_ends(weights, costs, count)) == pytest.approx(least)


def test_the_longest_of_a_batch_is_as_often_seen_as_it_is_drawn():
    draw = random.Random(0)
    lengths = [draw.randint(16, 40) for _ in range(500)]
    distinct, weights = _batch_lengths({each: lengths.count(each) for each in lengths}, 4)
    seen = [max(draw.choices(lengths, k=4)) for _ in range(20_000)]
    assert sum(weights) == pytest.approx(1)
    for length, weight in zip(distinct, weights, strict=True):
        assert seen.count(length) / len(seen) == pytest.approx(weight, abs=0.015)


def test_buckets_are_multiples_and_cover_all_lengths():
    buckets = memfit.Buckets.of(range(16, 513), most=6, multiple=8, least_gain=0)
    assert len(buckets.lengths) == 6
    assert all(length % 8 == 0 for length in buckets.lengths)
    assert buckets.lengths[-1] == 512
    assert all(length <= buckets.length_for(length) <= 512 for length in range(1, 513))
    assert buckets.length_for(700) == 700
    assert 1 < buckets.work_ratio < 1.2
    assert "6 buckets" in str(buckets)


def test_a_bucket_that_saves_little_is_left_out():
    few = memfit.Buckets.of(range(16, 513), batch_size=8, least_gain=0.02)
    many = memfit.Buckets.of(range(16, 513), batch_size=8, least_gain=0)
    assert len(few.lengths) < len(many.lengths) == 8
    assert many.work_ratio < few.work_ratio < many.work_ratio + 0.05


def test_one_length_needs_one_bucket_and_many_lengths_are_rounded():
    assert memfit.Buckets.of([32] * 10).lengths == (32,)
    assert memfit.Buckets.of([32] * 10).work_ratio == 1
    assert memfit.Buckets.of(range(1, 5001), most=4).lengths[-1] == 5000


@pytest.mark.parametrize("side", ["right", "left"])
def test_batches_are_padded_by_the_names_of_their_tensors(side):
    buckets = memfit.Buckets(lengths=(4, 8), work_ratio=1.0)
    batch = {
        "input_ids": torch.ones(2, 5, dtype=torch.long),
        "labels": torch.ones(2, 5, dtype=torch.long),
        "features": torch.ones(2, 5, 3),
        "class": torch.ones(2),
        "name": "a",
    }
    padded = buckets.pad(batch, values={"labels": -100, "input_ids": 7}, side=side)
    own, added = (slice(0, 5), slice(5, 8)) if side == "right" else (slice(3, 8), slice(0, 3))
    for name, value in (("input_ids", 7), ("labels", -100), ("features", 0)):
        assert padded[name].shape[1] == 8
        assert (padded[name][:, own] == 1).all()
        assert (padded[name][:, added] == value).all()
    assert padded["class"] is batch["class"]
    assert padded["name"] == "a"


def test_what_cannot_be_meant_is_refused():
    with pytest.raises(memfit.InvalidInput, match="none were given"):
        memfit.Buckets.of([])
    with pytest.raises(memfit.InvalidInput, match="at least one"):
        memfit.Buckets.of([1], most=0)
    with pytest.raises(memfit.InvalidSample, match="pixels"):
        memfit.Buckets.of([1]).pad({"pixels": torch.ones(2, 3)})
    with pytest.raises(memfit.InvalidInput, match="side"):
        memfit.Buckets.of([1]).pad({"input_ids": torch.ones(2, 3)}, side="up")
