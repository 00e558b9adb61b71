"""Captured graphs behind a model's own forward, against the plain eager run, bit for bit."""

import copy
import dataclasses
import inspect
import io

import pytest
import torch
from torch import nn

import memfit
from memfit.errors import CaptureError, ExecutionError, InvalidInput
from memfit.execute.attach import PlannedForward
from memfit.measure.peak import measure_peak


class ConvNet(nn.Module):
    """BatchNorm, in-place ReLU, a residual, dropout, pooling."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, 8, 3, padding=1)
        self.bn1 = nn.BatchNorm2d(8)
        self.conv2 = nn.Conv2d(8, 8, 3, padding=1)
        self.relu = nn.ReLU(inplace=True)
        self.dropout = nn.Dropout(0.3)
        self.head = nn.Linear(8, 5)

    def forward(self, image, scale=1.0):
        features = self.relu(self.bn1(self.conv1(image)))
        residual = self.conv2(features)
        residual += features
        features = self.relu(residual) * scale
        return self.head(self.dropout(nn.functional.max_pool2d(features, 2).mean((2, 3))))


class TiedLanguageModel(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(50, 16)
        self.lstm = nn.LSTM(16, 16, num_layers=2, dropout=0.4, batch_first=True)
        self.dropout = nn.Dropout(0.2)
        self.head = nn.Linear(16, 50, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, words):
        states, _ = self.lstm(self.embedding(words))
        return self.head(self.dropout(states))


class Encoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.TransformerEncoderLayer(16, 4, 32, dropout=0.1, batch_first=True)

    def forward(self, tokens):
        return self.layer(tokens)


@dataclasses.dataclass
class Answer:
    loss: torch.Tensor
    logits: torch.Tensor
    name: str = "answer"


class Answering(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 3)

    def forward(self, features):
        logits = self.linear(features)
        return Answer(loss=logits.square().mean(), logits=logits)


MODELS = {
    "conv": (ConvNet, lambda: torch.randn(4, 3, 8, 8)),
    "conv channels-last": (
        lambda: ConvNet().to(memory_format=torch.channels_last),
        lambda: torch.randn(4, 3, 8, 8).to(memory_format=torch.channels_last),
    ),
    "tied language model": (TiedLanguageModel, lambda: torch.randint(50, (3, 7))),
    "encoder": (Encoder, lambda: torch.randn(2, 5, 16)),
}


def train_step(model, batch, seed=3):
    """Loss, gradients, buffers and generator state after one forward and backward."""
    torch.manual_seed(seed)
    loss = model(batch).square().mean()
    loss.backward()
    gradients = [parameter.grad for parameter in model.parameters()]
    return [loss.detach(), *gradients, *model.buffers(), torch.get_rng_state()]


def assert_same(ones, others):
    assert len(ones) == len(others)
    for one, other in zip(ones, others, strict=True):
        assert (one is None) == (other is None)
        assert one is None or torch.equal(one, other)


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
    with torch.autocast("cpu", torch.bfloat16):
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


def test_pickling_the_whole_model_says_what_to_do():
    captured = memfit.fit(nn.Linear(2, 2), torch.randn(1, 2))
    with pytest.raises(ExecutionError, match=r"memfit.remove\(model\)"):
        torch.save(captured, io.BytesIO())


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
            return self.linear(features) if features.sum() > 0 else features

    model = Branching()
    with pytest.raises(CaptureError):
        memfit.fit(model, torch.randn(1, 2))
    assert "forward" not in model.__dict__
    model(torch.ones(1, 2))


def test_an_error_inside_a_call_leaves_the_model_usable():
    eager = nn.Linear(2, 2)
    captured = memfit.fit(copy.deepcopy(eager), torch.randn(1, 2))
    with pytest.raises(CaptureError, match="Linear could not be captured"):
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


def assert_captured_equals_eager(eager, sample, batch):
    """Capture on one batch, compare on another: nothing of the first may be baked in."""
    captured = memfit.fit(copy.deepcopy(eager), sample)
    assert_same(train_step(eager, batch), train_step(captured, batch))
    return captured


@pytest.mark.parametrize("name", MODELS)
def test_another_batch_of_the_same_shape_is_computed_anew(name):
    make_model, make_batch = MODELS[name]
    assert_captured_equals_eager(make_model(), make_batch(), make_batch())


class Linear(nn.Module):
    """A linear layer with something done around it."""

    def __init__(self, forward, width=4):
        super().__init__()
        self.linear = nn.Linear(width, width)
        self.written = forward

    def forward(self, features):
        return self.written(self, features)


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


def test_a_forward_that_sets_attributes_is_warned_about():
    class Counting(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(2, 2)
            self.calls = 0

        def forward(self, features):
            self.calls += 1
            return self.linear(features)

    with pytest.warns(UserWarning, match="changes calls"):
        model = memfit.fit(Counting(), torch.randn(1, 2))
    assert model.calls == 0


def test_an_attribute_set_in_the_first_forward_alone_is_captured_as_the_first():
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
    with pytest.warns(UserWarning, match="changes ready"):
        captured = memfit.fit(copy.deepcopy(eager), batch)
    assert torch.equal(captured(batch), eager(batch))


def test_an_output_with_tensors_that_cannot_be_found_is_refused():
    class Distributed(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(2, 2)

        def forward(self, features):
            return torch.distributions.Normal(self.linear(features), 1.0, validate_args=False)

    with pytest.raises(CaptureError, match="holds a Normal"):
        memfit.fit(Distributed(), torch.randn(1, 2))


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
