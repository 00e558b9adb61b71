"""Which parts are regions, and the reason why others are not."""

import contextlib

import pytest
import torch
from regional import Branching, Experts, Repeated, images, rows
from torch import nn
from torch.utils.checkpoint import checkpoint

from memfit.capture.sample import Sample
from memfit.errors import CaptureError
from memfit.recipe import Recipe
from memfit.regions.find import find_regions

pytestmark = pytest.mark.usefixtures("one_thread")
ERROR = CaptureError("it asks")


class Around(nn.Module):
    """A part, and how it is called."""

    def __init__(self, part, call):
        super().__init__()
        self.part = part
        self.call = call

    def forward(self, batch):
        return self.call(self.part, batch)


def mlp():
    return nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh())


def found(model, sample=None, least_bytes=1024):
    sample = Sample.of(torch.randn(32, 64) if sample is None else sample)
    return find_regions(model, sample, Recipe(budget=0.5), ERROR, least_bytes=least_bytes)


def reason(call, part=None):
    regions = found(Around(part or mlp(), call))
    assert "part" not in [region.name for region in regions.found]
    return regions.left_eager["part"]


def test_the_largest_parts_are_found_in_the_order_of_the_model():
    regions = found(Branching(), images(2))
    assert [region.name for region in regions.found] == ["first", "second", "last"]
    assert regions.left_eager[""] == "it asks"


def test_equal_regions_are_of_one_kind():
    first, second, last = found(Branching(), images(2)).found
    assert first.kind is second.kind
    assert last.kind is not first.kind


def test_parts_of_lists_are_found():
    assert {"experts.0", "experts.1"} <= {region.name for region in found(Experts(), rows(64)).found}


def test_calls_are_counted():
    regions = found(Repeated(), images(2))
    assert {region.name: region.calls for region in regions.found} == {"shared": 2}
    assert regions.left_eager["resized"] == "it is called with arguments of different kinds in one step"
    assert "resized.0" not in regions.left_eager  # the same reason


def test_what_keeps_little_is_left_eager():
    regions = found(Around(mlp(), lambda part, batch: part(batch)), least_bytes=2**20)
    assert not regions.found
    assert regions.left_eager["part"] == "it keeps only 8.00 KiB for its backward pass"


def test_a_part_that_runs_without_gradients_or_again():
    def without(part, batch):
        with torch.no_grad():
            part(batch)
        return part(batch)

    assert "without gradients" in reason(without)
    assert "torch.utils.checkpoint" in reason(lambda part, batch: checkpoint(part, batch, use_reentrant=False))


def test_a_part_whose_arguments_or_results_are_overwritten():
    def given(part, batch):
        changed = batch * 2
        out = part(changed)
        changed.zero_()
        return out

    part = nn.Sequential(nn.Tanh(), nn.Linear(64, 64))
    assert reason(given, part) == "what it is given or returns is changed in place"
    part = nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 64))
    assert reason(lambda part, batch: part(batch).relu_(), part) == "what it is given or returns is changed in place"


def test_a_part_that_writes_into_its_arguments():
    class Writes(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = mlp()

        def forward(self, batch):
            return self.inner(batch.mul_(2))

    assert "changed in place" in reason(lambda part, batch: part(batch * 1), Writes())


def test_a_part_in_eval_mode():
    model = Around(mlp(), lambda part, batch: part(batch))
    model.part.eval()
    assert "eval mode" in found(model).left_eager["part"]


def test_a_part_in_an_autocast_block():
    def inside(part, batch):
        with torch.autocast("cpu", torch.bfloat16):
            return part(batch).float()

    assert "autocast" in reason(inside)


def test_a_part_called_twice_under_autocast_whose_parameters_are_cast_once():
    def twice(part, batch):
        return part(part(batch).float())

    with torch.autocast("cpu", torch.bfloat16):
        assert "more than once under autocast" in reason(twice)
    with torch.autocast("cpu", torch.bfloat16, cache_enabled=False):
        assert "more than once" not in found(Around(mlp(), twice)).left_eager.get("part", "")


def test_a_part_that_shares_a_parameter_under_autocast_which_is_cast_once():
    class Two(nn.Module):
        def __init__(self):
            super().__init__()
            self.one, self.other = nn.Linear(64, 64), nn.Linear(64, 64)
            self.other.weight = self.one.weight

        def forward(self, batch):
            return self.other(self.one(batch).relu())

    model = Around(Two(), lambda part, batch: part(batch))
    with torch.autocast("cpu", torch.bfloat16):
        left = found(model).left_eager
    assert "more than once under autocast" in left["part"]
    assert "shares a parameter" in left["part.one"]
    assert "shares a parameter" in left["part.other"]
    assert "shares" not in found(model).left_eager.get("part.one", "")


def test_results_that_no_gradient_reaches():
    class Two(nn.Module):
        def __init__(self):
            super().__init__()
            self.one, self.other = mlp(), mlp()

        def forward(self, batch):
            return self.one(batch), self.other(batch)

    regions = found(Around(Two(), lambda part, batch: part(batch)[0]))
    assert [region.name for region in regions.found] == ["part.one"]
    assert "no gradient reaches" in regions.left_eager["part"]


def test_a_forward_that_counts():
    class Counts(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner, self.count = mlp(), 0

        def forward(self, batch):
            self.count += 1
            return self.inner(batch)

    regions = found(Around(Counts(), lambda part, batch: part(batch)))
    assert [region.name for region in regions.found] == ["part.inner"]
    assert "the forward reads count and writes it" in regions.left_eager["part"]


def test_nothing_is_left_behind():
    model, batch = Branching(), images(2)
    before = [each.clone() for each in (*model.state_dict().values(), torch.get_rng_state())]
    with contextlib.suppress(ValueError):
        found(model, batch)
    after = [*model.state_dict().values(), torch.get_rng_state()]
    assert all(torch.equal(one, other) for one, other in zip(before, after, strict=True))
    assert all(parameter.grad is None for parameter in model.parameters())
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())
