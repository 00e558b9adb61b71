"""Captured graphs behind a model's own forward, against the plain eager run, bit for bit."""

import copy
import inspect
import io

import pytest
import torch
from torch import nn
from twins import MODELS, Answer, Answering, ConvNet, assert_same, train_step

import memfit
from memfit.errors import CaptureError, ExecutionError, InvalidInput
from memfit.execute.attach import PlannedForward, is_planned
from memfit.measure.peak import measure_peak


@pytest.fixture(params=MODELS, ids=list(MODELS))
def pair(request):
    """An eager model, its captured twin and a batch."""
    make_model, make_batch = MODELS[request.param]
    torch.manual_seed(0)
    eager, batch = make_model(), make_batch()
    return eager, memfit.fit(copy.deepcopy(eager), batch), batch


def test_a_captured_step_equals_the_eager_step_bit_for_bit(pair):
    eager, captured, batch = pair
    assert_same(train_step(eager, batch), train_step(captured, batch))


def test_gradients_accumulate_over_steps_as_in_eager(pair):
    eager, captured, batch = pair
    for seed in range(3):
        ones, others = train_step(eager, batch, seed), train_step(captured, batch, seed)
    assert_same(ones, others)


def test_the_peak_is_the_eager_peak(pair):
    eager, captured, batch = pair
    peaks = []
    for model in (eager, captured):
        train_step(model, batch)
        model.zero_grad()
        peaks.append(measure_peak(lambda model=model: train_step(model, batch), resident=[model, batch]).peak_bytes)
    assert peaks[1] <= peaks[0] * 1.01 + 8192


def test_class_signature_and_state_dict_keys_stay(pair):
    eager, captured, _ = pair
    assert type(captured) is type(eager)
    assert list(captured.state_dict()) == list(eager.state_dict())
    assert inspect.signature(captured.forward) == inspect.signature(eager.forward)


def test_remove_gives_the_own_forward_back(pair):
    eager, captured, batch = pair
    assert memfit.remove(captured) is captured
    assert "forward" not in captured.__dict__
    assert_same(train_step(eager, batch), train_step(captured, batch))


def test_remove_leaves_an_untouched_model_alone():
    model = nn.Linear(2, 2)
    assert memfit.remove(model) is model


def test_eval_and_no_grad_run_the_original_forward(pair):
    eager, captured, batch = pair
    calls = len(captured.forward.calls)
    with torch.no_grad():
        torch.manual_seed(1)
        expected = eager(batch)
        torch.manual_seed(1)
        assert torch.equal(captured(batch), expected)
    assert torch.equal(captured.eval()(batch), eager.eval()(batch))
    assert len(captured.forward.calls) == calls


def test_an_unseen_shape_is_captured_when_it_comes():
    eager = ConvNet()
    captured = memfit.fit(copy.deepcopy(eager), torch.randn(4, 3, 8, 8))
    other = torch.randn(2, 3, 12, 12)
    assert_same(train_step(eager, other), train_step(captured, other))
    assert len(captured.forward.calls) == 2


def test_a_known_shape_is_not_captured_again():
    batch = torch.randn(4, 3, 8, 8)
    captured = memfit.fit(ConvNet(), batch)
    call = next(iter(captured.forward.calls.values()))
    train_step(captured, batch)
    assert list(captured.forward.calls.values()) == [call]


def test_another_constant_argument_is_another_call():
    eager = ConvNet()
    batch = torch.randn(4, 3, 8, 8)
    captured = memfit.fit(copy.deepcopy(eager), {"image": batch, "scale": 1.0})
    torch.manual_seed(0)
    expected = eager(batch, scale=3.0)
    torch.manual_seed(0)
    assert torch.equal(captured(batch, scale=3.0), expected)


def test_freezing_a_parameter_later_is_noticed():
    eager = ConvNet()
    batch = torch.randn(4, 3, 8, 8)
    captured = memfit.fit(copy.deepcopy(eager), batch)
    for model in (eager, captured):
        model.conv1.weight.requires_grad_(False)
    assert_same(train_step(eager, batch), train_step(captured, batch))
    assert captured.conv1.weight.grad is None


def test_putting_one_part_into_eval_mode_is_noticed():
    eager = ConvNet()
    batch = torch.randn(4, 3, 8, 8)
    captured = memfit.fit(copy.deepcopy(eager), batch)
    for model in (eager, captured):
        model.bn1.eval()
    assert_same(train_step(eager, batch), train_step(captured, batch))


def test_autocast_around_the_call_is_part_of_it():
    eager = ConvNet()
    batch = torch.randn(4, 3, 8, 8)
    captured = memfit.fit(copy.deepcopy(eager), batch)
    inside = pytest.warns(UserWarning, match="inside an autocast block")  # where these layers cast nothing
    with torch.autocast("cpu", torch.bfloat16), inside:
        assert_same(train_step(eager, batch), train_step(captured, batch))
    assert len(captured.forward.calls) == 2


def test_replaced_parameters_are_used():
    eager = ConvNet()
    batch = torch.randn(4, 3, 8, 8)
    captured = memfit.fit(copy.deepcopy(eager), batch)
    other = ConvNet().state_dict()
    eager.load_state_dict(other, assign=True)
    captured.load_state_dict(copy.deepcopy(other), assign=True)
    for model in (eager, captured):
        model.requires_grad_(True)
    assert_same(train_step(eager, batch), train_step(captured, batch))


def test_a_deep_copy_has_its_own_parameters(pair):
    eager, captured, batch = pair
    twin = copy.deepcopy(captured)
    train_step(captured, batch)
    assert all(parameter.grad is None for parameter in twin.parameters())
    memfit.remove(captured)
    assert isinstance(twin.forward, PlannedForward)
    assert_same(train_step(copy.deepcopy(twin), batch), train_step(twin, batch))
    assert inspect.signature(twin.forward) == inspect.signature(eager.forward)


def test_the_state_dict_can_be_saved_and_loaded_into_the_plain_model(pair):
    eager, captured, batch = pair
    file = io.BytesIO()
    torch.save(captured.state_dict(), file)
    file.seek(0)
    eager.load_state_dict(torch.load(file, weights_only=True))
    assert_same(train_step(eager, batch), train_step(captured, batch))


def test_a_model_that_is_saved_whole_is_saved_as_it_is_without_memfit():
    captured = memfit.fit(nn.Linear(2, 2), torch.randn(1, 2))
    file = io.BytesIO()
    torch.save(captured, file)
    file.seek(0)
    loaded = torch.load(file, weights_only=False)
    assert type(loaded) is nn.Linear
    assert not is_planned(loaded)
    batch = torch.randn(1, 2)
    assert torch.equal(loaded(batch), captured(batch))


def test_hooks_of_the_model_and_of_its_parameters_fire():
    captured = memfit.fit(nn.Linear(2, 2), torch.randn(1, 2))
    seen = []
    captured.register_forward_pre_hook(lambda *_: seen.append("before"))
    captured.register_forward_hook(lambda *_: seen.append("after"))
    captured.weight.register_hook(lambda gradient: seen.append("gradient"))
    captured.weight.register_post_accumulate_grad_hook(lambda _: seen.append("accumulated"))
    captured(torch.randn(1, 2)).sum().backward()
    assert seen == ["before", "after", "gradient", "accumulated"]


def test_a_second_backward_through_a_retained_graph_works(pair):
    eager, captured, batch = pair
    ends = []
    for model in (eager, captured):
        torch.manual_seed(0)
        loss = model(batch).square().mean()
        loss.backward(retain_graph=True)
        loss.backward()
        ends.append([parameter.grad for parameter in model.parameters()])
    assert_same(*ends)


def test_a_second_backward_without_a_retained_graph_is_refused():
    captured = memfit.fit(nn.Linear(2, 2), torch.randn(1, 2))
    loss = captured(torch.randn(1, 2)).sum()
    loss.backward()
    with pytest.raises(RuntimeError, match="second time"):
        loss.backward()


def test_a_gradient_of_the_input_flows():
    eager = nn.Sequential(nn.Linear(4, 4), nn.Tanh())
    batch = torch.randn(3, 4, requires_grad=True)
    captured = memfit.fit(copy.deepcopy(eager), batch)
    (expected,) = torch.autograd.grad(eager(batch).sum(), batch)
    (found,) = torch.autograd.grad(captured(batch).sum(), batch)
    assert torch.equal(found, expected)


def test_a_dataclass_output_comes_back_as_itself():
    eager = Answering()
    batch = torch.randn(2, 4)
    captured = memfit.fit(copy.deepcopy(eager), batch)
    answer = captured(batch)
    assert isinstance(answer, Answer)
    assert answer.name == "answer"
    assert torch.equal(answer.logits, eager(batch).logits)


def test_outputs_beside_the_loss_refuse_a_gradient_instead_of_losing_it():
    captured = memfit.fit(Answering(), torch.randn(2, 4))
    answer = captured(torch.randn(2, 4))
    assert answer.logits.requires_grad
    with pytest.raises(ExecutionError, match='backward_from="all"'):
        (answer.loss + answer.logits.sum()).backward()


def test_every_output_can_be_differentiated_on_request():
    eager = Answering()
    batch = torch.randn(2, 4)
    captured = memfit.fit(copy.deepcopy(eager), batch, backward_from="all")
    for model in (eager, captured):
        answer = model(batch)
        (answer.loss + answer.logits.sum()).backward()
    assert torch.equal(captured.linear.weight.grad, eager.linear.weight.grad)


def test_a_model_that_cannot_be_captured_is_left_as_it_was():
    class Branching(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(2, 2)

        def forward(self, features):
            found = self.linear(features)
            return found if found.sum() > 0 else features

    model = Branching()
    with pytest.raises(CaptureError):
        memfit.fit(model, torch.randn(1, 2))
    assert "forward" not in model.__dict__
    model(torch.ones(1, 2))


def test_an_error_inside_a_call_leaves_the_model_usable():
    eager = nn.Linear(2, 2)
    captured = memfit.fit(copy.deepcopy(eager), torch.randn(1, 2))
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):  # eager's own
        captured(torch.randn(1, 3))
    batch = torch.randn(1, 2)
    assert torch.equal(captured(batch), eager(batch))


def test_fitting_twice_is_refused():
    model = memfit.fit(nn.Linear(2, 2), torch.randn(1, 2))
    with pytest.raises(InvalidInput, match=r"memfit.remove\(model\) first"):
        memfit.fit(model, torch.randn(1, 2))


def test_training_ends_in_the_same_parameters(pair):
    eager, captured, batch = pair
    for model in (eager, captured):
        torch.manual_seed(5)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        for _ in range(5):
            optimizer.zero_grad()
            model(batch).square().mean().backward()
            optimizer.step()
    assert_same(list(eager.state_dict().values()), list(captured.state_dict().values()))
