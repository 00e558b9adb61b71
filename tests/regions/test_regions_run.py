"""A model in regions trains as its eager twin, and is the same afterwards."""

import copy
import warnings

import pytest
import torch
from regional import Branching, Experts, Recurrent, Repeated, images, rows
from torch import nn

import memfit
from memfit.errors import InvalidFile, InvalidInput
from memfit.execute.attach import is_planned
from memfit.execute.call import OwnForward
from memfit.execute.compiled import CompiledCall

pytestmark = pytest.mark.usefixtures("one_thread")


def trained(model, batches):
    """Losses of a few steps with SGD, then everything that training changes."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    losses = []
    torch.manual_seed(5)
    for batch in batches:
        optimizer.zero_grad()
        loss = model(batch)
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    gradients = [parameter.grad for parameter in model.parameters()]
    return [*losses, *gradients, *model.state_dict().values(), torch.get_rng_state()]


def assert_same(ones, others):
    assert len(ones) == len(others)
    for one, other in zip(ones, others, strict=True):
        assert (one is None) == (other is None)
        assert one is None or torch.equal(one, other)


def planned_parts(model):
    return [name for name, module in model.named_modules() if is_planned(module)]


@pytest.fixture(scope="module")
def plan(one_thread):
    torch.manual_seed(0)
    return memfit.plan(Branching(), images(4), budget=0.7, time_limit=0.5)


@pytest.mark.parametrize(
    ("make", "batch", "budget"),
    [
        (Branching, lambda: images(4), 0.7),
        (Experts, lambda: rows(256), 0.7),
        (Recurrent, lambda: images(4), "smallest"),
        (Repeated, lambda: images(4), "smallest"),
    ],
)
@pytest.mark.filterwarnings("ignore:a part of this Experts is given more")  # rows go where their values say
def test_three_steps_are_equal_bit_for_bit(make, batch, budget):
    eager = make()
    model = memfit.fit(copy.deepcopy(eager), batch(), budget, time_limit=0.5)
    assert planned_parts(model) == list(memfit.plan_of(model).regions)
    batches = [batch() for _ in range(3)]
    assert_same(trained(eager, batches), trained(model, batches))


@pytest.mark.parametrize("with_sample", [True, False])
def test_a_loaded_plan_is_applied(plan, with_sample, tmp_path):
    plan.save(tmp_path / "plan.json")
    eager = Branching()
    model = copy.deepcopy(eager)
    loaded = memfit.Plan.load(tmp_path / "plan.json")
    memfit.apply(loaded, model, images(4) if with_sample else None)
    assert memfit.plan_of(model) == plan
    batches = [images(4)]
    assert_same(trained(eager, batches), trained(model, batches))
    calls = [call for forward in _forwards(model) for of_kind in forward.calls.values() for call in of_kind]
    assert len(calls) == 3
    assert all(isinstance(call, CompiledCall) for call in calls)


def _forwards(model):
    return [module.__dict__["forward"] for module in model.modules() if is_planned(module)]


def test_remove_removes_all_regions(plan):
    model = memfit.apply(plan, Branching())
    keys = list(model.state_dict())
    assert planned_parts(model) == ["first", "second", "last"]
    assert memfit.remove(model) is model
    assert planned_parts(model) == []
    assert memfit.plan_of(model) is None
    assert list(model.state_dict()) == keys
    assert not any("forward" in module.__dict__ for module in model.modules())


def test_a_region_is_removed_with_its_model_alone(plan):
    model = memfit.apply(plan, Branching())
    around = nn.Sequential(model)
    memfit.remove(around)
    assert planned_parts(model) == ["first", "second", "last"]


def test_a_model_in_regions_is_not_planned_twice(plan):
    model = memfit.apply(plan, Branching())
    for again in (lambda: memfit.apply(plan, model), lambda: memfit.fit(model, images(4), 0.8)):
        with pytest.raises(InvalidInput, match="runs through memfit already"):
            again()
        assert planned_parts(model) == ["first", "second", "last"]


def test_another_sample_is_refused_and_the_model_stays_as_it_is(plan):
    model = Branching()
    with pytest.raises(InvalidFile, match=r"made for the sample float32\[4, 8, 32, 32\], the sample is float32\[6, 8"):
        memfit.apply(plan, model, images(6))
    assert planned_parts(model) == []


def test_another_model_is_refused(plan):
    with pytest.raises(InvalidFile, match="the plan was made for a Branching"):
        memfit.apply(plan, Repeated())


def test_a_copy_runs_by_itself(plan):
    eager = Branching()
    model = memfit.apply(plan, copy.deepcopy(eager))
    twin = copy.deepcopy(model)
    memfit.remove(model)
    assert memfit.plan_of(twin) == plan
    batches = [images(4)]
    assert_same(trained(eager, batches), trained(twin, batches))


def test_calls_of_other_shapes_keep_the_decisions(plan):
    eager = Branching()
    model = memfit.apply(plan, copy.deepcopy(eager))
    batches = [images(4), images(3)]
    assert_same(trained(eager, batches), trained(model, batches))
    (first, *_) = _forwards(model)
    assert [type(call) for calls in first.calls.values() for call in calls] == [CompiledCall, CompiledCall]


def test_a_larger_call_than_the_planned_one_is_warned_of_and_a_smaller_one_is_not(plan):
    sample = images(4)
    for other, warned in ((3, False), (6, True)):
        model = memfit.apply(plan, Branching(), sample)
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            model(images(other)).backward()
        assert any("give fit the largest sample" in str(each.message) for each in said) == warned


def test_shapes_that_go_on_changing_run_by_the_models_own_forward(plan, monkeypatch):
    monkeypatch.setattr("memfit.regions.run._MOST_KINDS", 1)
    eager = Branching()
    model = memfit.apply(plan, copy.deepcopy(eager))
    batches = [images(2), images(3)]
    assert_same(trained(eager, batches), trained(model, batches))
    (first, *_) = _forwards(model)
    assert [type(call) for calls in first.calls.values() for call in calls] == [CompiledCall, OwnForward]


def test_evaluation_runs_the_models_own_forward(plan):
    model = memfit.apply(plan, Branching()).eval()
    model(images(4))
    assert not any(forward.calls for forward in _forwards(model))


def test_profiling_and_checking_leave_a_planned_model_planned(plan):
    model = memfit.apply(plan, Branching(), images(4))
    memfit.check(model, plan, images(4))
    memfit.profile(model, plan, images(4), pairs=1)
    assert planned_parts(model) == ["first", "second", "last"]


def test_an_output_whose_tensors_cannot_be_found_is_refused_in_a_sentence() -> None:
    class ReturnsSet(Branching):
        def forward(self, images):
            return frozenset([super().forward(images)])

    with pytest.raises(memfit.CaptureError, match="holds a frozenset, whose tensors cannot be found"):
        memfit.fit(ReturnsSet(), images(), 0.9, time_limit=1, progress=False)


class Turning(nn.Module):
    """Its region returns a turned view, whose gradient comes in order; a bias before it sums what comes out."""

    class Normed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm = nn.RMSNorm(48, elementwise_affine=False)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.norm(x.transpose(1, 2)).transpose(1, 2)

    def __init__(self) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.zeros(48, 1))
        self.normed, self.head = self.Normed(), nn.Linear(40, 40)
        self.head.register_forward_hook(lambda module, args, output: output * 2)  # so that the whole is not captured

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.normed(x + self.bias)).tanh()


@pytest.mark.filterwarnings("ignore:.*has hooks, which do not run while a step is planned")
@pytest.mark.parametrize("saved", [False, True])
def test_gradients_reach_a_region_in_the_layout_in_which_they_come_in_eager(saved, tmp_path):
    torch.manual_seed(0)
    model, batch = Turning(), torch.randn(16, 48, 40)
    twin = copy.deepcopy(model)
    memfit.fit(model, batch, "smallest", loss=lambda model, x: model(x).square().mean(), progress=False)
    assert "normed" in planned_parts(model)
    if saved:
        memfit.plan_of(model).save(tmp_path / "plan.json")
        memfit.apply(memfit.Plan.load(tmp_path / "plan.json"), memfit.remove(model))
    for each in (model, twin):
        each(batch).square().mean().backward()
    assert torch.equal(model.bias.grad, twin.bias.grad)


class Masking(nn.Module):
    """Looks at what it has computed, and has a part that takes a mask or None."""

    class Layer(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.second = nn.Linear(32, 128), nn.Linear(128, 32)

        def forward(self, hidden, mask):
            hidden = torch.tanh(self.first(hidden))
            return self.second(hidden if mask is None else hidden * mask)

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(self.Layer() for _ in range(3))

    def forward(self, hidden, mask=None):
        for layer in self.layers:
            hidden = layer(hidden, mask)
        return hidden.square().mean() if hidden.mean() < 1e9 else hidden.sum()


def test_a_call_with_other_operators_is_told_so_and_runs_as_it_is():
    torch.manual_seed(0)
    eager, batch = Masking(), torch.randn(64, 32)
    model = memfit.fit(copy.deepcopy(eager), (batch, torch.ones(64, 1)), 0.8, remember=False, progress=False)
    with pytest.warns(UserWarning, match="runs other operators than the call that was planned"):
        loss = model(batch)
    loss.backward()
    eager(batch).backward()
    assert_same([each.grad for each in eager.parameters()], [each.grad for each in model.parameters()])
