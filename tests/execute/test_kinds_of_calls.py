"""What makes a call another kind of call, and what a captured call must not bake in or leave behind."""

import copy

import pytest
import torch
from torch import nn
from twins import MODELS, ConvNet, Linear, assert_captured_equals_eager, assert_same, train_step

import memfit
from memfit.errors import CaptureError, InvalidInput
from memfit.execute.attach import PlannedForward


@pytest.mark.parametrize("name", MODELS)
def test_another_batch_of_the_same_shape_is_computed_anew(name):
    make_model, make_batch = MODELS[name]
    assert_captured_equals_eager(make_model(), make_batch(), make_batch())


def test_a_draw_that_nobody_reads_still_moves_the_generator():
    def forward(model, features):
        nn.functional.dropout(features, 0.5)
        torch.rand(3)
        return nn.functional.dropout(model.linear(features), 0.5)

    assert_captured_equals_eager(Linear(forward), torch.randn(3, 4), torch.randn(3, 4))


def test_a_value_and_its_own_transpose_are_added_up():
    def forward(model, features):
        hidden = model.linear(features).tanh()
        return hidden * 2 + hidden.transpose(0, 1) * 3 + (hidden + hidden.transpose(0, 1)).sin()

    assert_captured_equals_eager(Linear(forward), torch.randn(4, 4), torch.randn(4, 4))


def test_a_tensor_written_out_in_the_forward_is_a_constant():
    def forward(model, features):
        scale = torch.tensor([1.0, 2.0, 3.0, 4.0])
        scale *= 2
        return model.linear(features) * scale

    captured = assert_captured_equals_eager(Linear(forward), torch.randn(3, 4), torch.randn(3, 4))
    batch = torch.randn(3, 4)
    assert torch.equal(captured(batch), captured(batch))


def test_a_draw_into_a_transposed_slice_is_the_eager_one():
    def forward(model, features):
        noise = torch.empty(4, 6).t()[:3].bernoulli_(0.5)
        return model.linear(features) * noise

    assert_captured_equals_eager(Linear(forward), torch.randn(3, 4), torch.randn(3, 4))


@pytest.mark.parametrize("when", ["before", "after"])
def test_a_hook_that_changes_values_runs_once(when):
    eager = nn.Linear(4, 4)
    captured = copy.deepcopy(eager)
    batch = torch.randn(2, 4)
    if when == "after":
        memfit.fit(captured, batch)
    for model in (eager, captured):
        model.register_forward_pre_hook(lambda _, args: (args[0] * 2,))
        model.register_forward_hook(lambda _, args, output: output + 1)
    if when == "before":
        memfit.fit(captured, batch)
    assert_same(train_step(eager, batch), train_step(captured, batch))
    other = torch.randn(5, 4)
    assert_same(train_step(eager, other), train_step(captured, other))


def test_a_replaced_part_is_used():
    eager = ConvNet()
    batch = torch.randn(4, 3, 8, 8)
    captured = memfit.fit(copy.deepcopy(eager), batch)
    head = nn.Linear(8, 5)
    eager.head, captured.head = head, copy.deepcopy(head)
    assert_same(train_step(eager, batch), train_step(captured, batch))
    assert captured.head.weight.grad is not None
    eager.head.bias = captured.head.bias = None
    assert_same(train_step(eager, batch), train_step(captured, batch))


def test_another_layout_of_the_parameters_is_another_kind_of_call():
    eager = ConvNet()
    batch = torch.randn(4, 3, 8, 8)
    captured = memfit.fit(copy.deepcopy(eager), batch)
    for model in (eager, captured):
        model.to(memory_format=torch.channels_last)
    assert_same(train_step(eager, batch), train_step(captured, batch))
    assert len(captured.forward.calls) == 2


def test_the_same_tensor_given_twice_is_another_kind_of_call():
    class Two(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(4, 4)

        def forward(self, one, other):
            return self.linear(one) * other

    eager = Two()
    one, other = torch.randn(2, 4), torch.randn(2, 4)
    captured = memfit.fit(copy.deepcopy(eager), (one, one))
    assert torch.equal(captured(one, other), eager(one, other))
    assert torch.equal(captured(one, one), eager(one, one))


def test_minus_zero_is_another_constant():
    eager = ConvNet()
    batch = torch.randn(4, 3, 8, 8)
    captured = memfit.fit(copy.deepcopy(eager), {"image": batch, "scale": 0.0})
    for scale in (0.0, -0.0, float("nan"), float("nan")):
        captured(batch, scale=scale)
    assert len(captured.forward.calls) == 4  # 0.0 as a keyword; as keywords -0.0 and nan; and the sample's own


def test_an_argument_that_may_change_unseen_is_refused():
    captured = memfit.fit(ConvNet(), torch.randn(4, 3, 8, 8))
    with pytest.raises(InvalidInput, match="of type object"):
        captured(torch.randn(4, 3, 8, 8), scale=object())


def test_what_is_frozen_whole_runs_by_its_own_forward():
    captured = memfit.fit(ConvNet(), torch.randn(4, 3, 8, 8))
    captured.requires_grad_(False)
    captured(torch.randn(4, 3, 8, 8))
    assert len(captured.forward.calls) == 1


def test_a_model_in_eval_mode_is_refused():
    with pytest.raises(memfit.InvalidModel, match=r"model.train\(\)"):
        memfit.fit(nn.Linear(2, 2).eval(), torch.randn(1, 2))


def test_what_is_no_module_is_refused():
    for call in (memfit.fit, memfit.estimate):
        with pytest.raises(memfit.InvalidModel, match="a function was given"):
            call(lambda features: features, torch.randn(1, 2))


def test_a_forward_that_counts_is_refused():
    class Counting(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(2, 2)
            self.calls = 0

        def forward(self, features):
            self.calls += 1
            return self.linear(features)

    model = Counting()
    with pytest.raises(CaptureError, match="reads calls and writes it"):
        memfit.fit(model, torch.randn(1, 2))
    assert model.calls == 0


def test_a_flag_set_in_the_first_forward_is_seen_in_the_second():
    class Initializing(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(2, 2)
            self.ready = False

        def forward(self, features):
            factor = 1.0 if self.ready else 10.0
            self.ready = True
            return self.linear(features) * factor

    batch = torch.randn(1, 2)
    eager = Initializing()
    captured = memfit.fit(copy.deepcopy(eager), batch)
    for _ in range(3):
        assert torch.equal(captured(batch), eager(batch))
    assert captured.ready
    assert memfit.captures_of(captured).count == 2


def test_a_distribution_is_made_anew_by_every_call():
    class Distributed(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(2, 2)

        def forward(self, features):
            return torch.distributions.Normal(self.linear(features), 1.0, validate_args=False)

    eager, batch = Distributed(), torch.randn(3, 2)
    captured = memfit.fit(copy.deepcopy(eager), torch.randn(3, 2))
    for model in (eager, captured):
        found = model(batch)
        assert type(found) is torch.distributions.Normal
        found.log_prob(torch.ones(2)).sum().backward()
    assert captured(batch) is not captured(batch)
    assert torch.equal(eager(batch).mean, captured(batch).mean)
    assert torch.equal(eager.linear.weight.grad, captured.linear.weight.grad)


def test_an_output_with_tensors_that_cannot_be_found_is_refused():
    class InSet(nn.Linear):
        def forward(self, features):
            return {super().forward(features)}

    with pytest.raises(CaptureError, match="holds a set"):
        memfit.fit(InSet(2, 2), torch.randn(1, 2))


def test_views_of_what_was_written_in_place_get_gradients():
    class Written(nn.Linear):
        def forward(self, features):
            values = super().forward(features)
            written = torch.empty_like(values)
            written[:, 0] = values[:, 0]
            written[:, 1:] = values[:, 1:] * 2
            return written.transpose(0, 1), written[:1]

    eager, batch = Written(4, 4), torch.randn(3, 4)
    captured = memfit.fit(copy.deepcopy(eager), torch.randn(3, 4))
    for model in (eager, captured):
        turned, first = model(batch)
        assert turned.requires_grad
        (turned.square().sum() + first.exp().sum()).backward()
    assert torch.equal(eager.weight.grad, captured.weight.grad)


def test_an_interrupted_capture_leaves_no_mode_behind():
    def interrupt(model, features):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        memfit.fit(Linear(interrupt), torch.randn(1, 4))
    assert type(torch.zeros(1) + 1) is torch.Tensor


def test_a_fitted_model_can_be_estimated_and_goes_on_as_fitted():
    batch = torch.randn(4, 3, 8, 8)
    model = ConvNet()
    plain = memfit.estimate(model, batch).peak_bytes
    memfit.fit(model, batch)
    assert memfit.estimate(model, batch).peak_bytes == plain
    assert isinstance(model.forward, PlannedForward)
