"""The captured graph computes what the model computes, and capturing leaves no trace."""

import copy
import dataclasses
import itertools
import logging
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from capturing import assert_computes_what_eager_computes, captured, names, targets
from torch import nn

from memfit.capture.sample import Sample
from memfit.capture.trace import traced
from memfit.errors import CaptureError, InvalidInput, InvalidModel
from memfit.ir import Kind


class Calls(nn.Module):
    """A linear layer whose forward is given as a function of the module and its arguments."""

    def __init__(self, function: Any, width: int = 8) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)
        self.second = nn.Linear(width, width)
        self.register_buffer("count", torch.zeros((), dtype=torch.int64))
        self.function = function

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.function(self, *args, **kwargs)


@dataclasses.dataclass
class Output:
    prediction: torch.Tensor
    extra: Any = None


class Pair(NamedTuple):
    first: torch.Tensor
    second: torch.Tensor


def batch() -> torch.Tensor:
    return torch.randn(4, 8)


CALLS: dict[str, tuple[Any, Any]] = {
    "a tensor": (lambda m, x: m.linear(x), batch()),
    "positional": (lambda m, x, y: m.linear(x) * y, (batch(), batch())),
    "keywords": (lambda m, *, x, scale: m.linear(x) * scale, {"x": batch(), "scale": 2.0}),
    "both": (lambda m, x, *, y: m.linear(x) + y, Sample((batch(),), {"y": batch()})),
    "nested arguments": (lambda m, x: m.linear(x["a"][0]) + x["a"][1], ({"a": [batch(), batch()]},)),
    "nested outputs": (lambda m, x: [m.linear(x), (m.second(x), {"k": x + 1})], batch()),
    "a dict": (lambda m, x: {"a": m.linear(x), "name": "constant", "none": None}, batch()),
    "a dataclass": (lambda m, x: Output(m.linear(x), [m.second(x), 3]), batch()),
    "a named tuple": (lambda m, x: Pair(m.linear(x), m.second(x)), batch()),
    "several outputs": (lambda m, x: (m.linear(x), m.second(x).sigmoid()), batch()),
    "a loss beside outputs": (lambda m, x: (m.linear(x).sum(), m.second(x)), batch()),
    "an output that is an input": (lambda m, x: (m.linear(x), x), batch()),
    "integers": (lambda m, i: F.embedding(i, m.linear.weight), torch.tensor([[0, 3], [7, 7]])),
    "a counter": (lambda m, x: (m.count.add_(1), m.linear(x))[1], batch()),
    "dropout": (lambda m, x: F.dropout(m.linear(x), 0.5), batch()),
    "autocast inside": (lambda m, x: _in_bfloat16(m, x), batch()),
    "in-place": (lambda m, x: F.relu(m.linear(x).mul_(2), inplace=True), batch()),
    "no grad inside": (lambda m, x: m.linear(x) + _without_grad(m, x), batch()),
    "detached": (lambda m, x: m.linear(x).sigmoid() * m.second(x).detach(), batch()),
    "views": (lambda m, x: m.linear(x).view(2, 2, 8).transpose(0, 1)[1:].flatten(), batch()),
    "a weight used twice": (lambda m, x: m.linear(m.linear(x).relu()), batch()),
}


def _in_bfloat16(model: Calls, x: torch.Tensor) -> torch.Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        hidden = model.linear(x)
    return model.second(hidden.float())


def _without_grad(model: Calls, x: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        return model.second(x)


@pytest.mark.parametrize(("function", "sample"), CALLS.values(), ids=CALLS)
def test_a_call_is_captured_as_it_is(function: Any, sample: Any) -> None:
    assert_computes_what_eager_computes(Calls(function), sample)


def convolutions() -> nn.Module:
    return nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(inplace=True), nn.MaxPool2d(2), nn.Flatten())


def tied() -> nn.Module:
    first, second = nn.Linear(8, 8), nn.Linear(8, 8)
    second.weight = first.weight
    return nn.Sequential(first, nn.ReLU(), second)


def half_frozen() -> nn.Module:
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8))
    model[0].requires_grad_(False)
    return model


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(8, 8, num_layers=2, dropout=0.5, batch_first=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.lstm(x)[0]


MODELS: dict[str, tuple[Any, Any]] = {
    "convolutions": (convolutions, lambda: torch.randn(2, 3, 8, 8)),
    "channels last": (
        lambda: convolutions().to(memory_format=torch.channels_last),
        lambda: torch.randn(2, 3, 8, 8).to(memory_format=torch.channels_last),
    ),
    "evaluation mode": (lambda: convolutions().eval(), lambda: torch.randn(2, 3, 8, 8)),
    "tied weights": (tied, batch),
    "half frozen": (half_frozen, batch),
    "half precision": (lambda: tied().bfloat16(), lambda: batch().bfloat16()),
    "attention with dropout": (
        lambda: nn.TransformerEncoderLayer(8, 2, 16, batch_first=True),
        lambda: torch.randn(2, 3, 8),
    ),
    "two layers of LSTM with dropout": (Recurrent, lambda: torch.randn(2, 5, 8)),
}


@pytest.mark.parametrize(("make", "sample"), MODELS.values(), ids=MODELS)
def test_a_model_is_captured_as_it_is(make: Any, sample: Any) -> None:
    assert_computes_what_eager_computes(make(), sample())


def test_a_model_of_transformers_is_captured_as_it_is(tiny_gpt2: type[nn.Module]) -> None:
    words = torch.randint(100, (2, 6))
    assert_computes_what_eager_computes(tiny_gpt2().train(), {"input_ids": words, "labels": words})


def test_the_output_of_a_transformer_keeps_its_class(tiny_gpt2: type[nn.Module]) -> None:
    words = torch.randint(100, (2, 6))
    with traced(tiny_gpt2().train(), Sample.of({"input_ids": words, "labels": words})) as joint:
        assert joint.differentiated == (0,)
        assert joint.undifferentiated == (1,)
        rebuilt = joint.template.rebuild([torch.zeros(()), torch.zeros(2)])
    assert type(rebuilt).__name__ == "CausalLMOutputWithCrossAttentions"
    assert rebuilt.logits.shape == (2,)


def test_autocast_around_the_call_is_captured() -> None:
    with torch.autocast("cpu", torch.bfloat16):
        assert_computes_what_eager_computes(nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8)), batch())
        graph = captured(nn.Linear(8, 8), batch())
    assert [graph.storages[index].dtype for index in graph.held if graph.storages[index].kind is Kind.OUTPUT] == [
        "bfloat16"
    ]


@pytest.mark.xfail(strict=True, reason="in a trace parameters are no leaves, so autocast casts them anew at every use")
def test_a_weight_used_twice_under_autocast_is_captured_as_it_is() -> None:
    model = Calls(lambda m, x: m.linear(m.linear(x).relu()), width=64)
    with torch.autocast("cpu", torch.bfloat16):
        assert_computes_what_eager_computes(model, torch.randn(16, 64))


def test_an_input_that_requires_a_gradient_gets_one() -> None:
    graph = captured(nn.Linear(8, 8), batch().requires_grad_())
    held = [graph.storages[index] for index in graph.held]
    assert (4, 8) in [storage.shape for storage in held if storage.kind is Kind.GRADIENT]


def test_a_model_without_parameters_is_captured_for_its_input() -> None:
    graph = captured(nn.Sigmoid(), batch().requires_grad_())
    assert targets(graph) == ["aten.sigmoid.default", "aten.sigmoid_backward.default"]


def test_backward_starts_at_the_only_loss_or_at_all_outputs() -> None:
    model = Calls(lambda m, x: (m.linear(x).sum(), m.second(x)))
    for backward_from, expected in (("auto", (0,)), ("all", (0, 1))):
        with traced(model, Sample.of(batch()), backward_from=backward_from) as joint:
            assert joint.differentiated == expected


def test_backward_from_something_unknown_is_refused() -> None:
    with pytest.raises(InvalidInput, match="backward_from"):
        captured(nn.Linear(8, 8), batch(), backward_from="los")


def test_the_dropout_between_layers_of_an_lstm_stays() -> None:
    graph = captured(Recurrent(), torch.randn(2, 5, 8))
    assert [operation.target for operation in graph.operations if operation.random] == ["aten.bernoulli.p"]


def test_an_lstm_without_dropout_draws_nothing() -> None:
    assert not any(operation.random for operation in captured(Recurrent().eval(), torch.randn(2, 5, 8)).operations)


def test_grad_mode_off_around_the_capture_does_not_matter() -> None:
    with torch.no_grad():
        graph = captured(nn.Linear(8, 8), batch())
        assert not torch.is_grad_enabled()
    assert len(graph.trained) == 2


def test_a_model_that_cuts_its_gradients_is_refused() -> None:
    with pytest.raises(InvalidModel, match=r"no output of Calls requires a gradient.*detach\(\)") as caught:
        captured(Calls(lambda m, x: m.linear(x).detach()), batch())
    assert "\n" not in str(caught.value)


class Leaving(nn.Module):
    """Leaves all sorts of things on itself."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.norm = nn.BatchNorm1d(8)
        self.dropout = nn.Dropout(0.5)
        self.calls: list[int] = []
        self.mask: torch.Tensor | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls.append(1)
        self.mask = x > 0
        self.fresh_attribute = x
        self.norm.last = x
        return self.dropout(self.norm(self.linear(x)))


def test_a_generator_that_the_forward_makes_is_refused() -> None:
    class Draws(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x + torch.randn(x.shape, generator=torch.Generator().manual_seed(3)))

    with (
        pytest.raises(CaptureError, match="draws from a generator of its own"),
        traced(Draws(4, 4), Sample.of(torch.ones(2, 4))),
    ):
        pass


def test_capturing_changes_nothing_on_the_model() -> None:
    model = Leaving()
    before = copy.deepcopy(model)
    captured(model, batch())
    assert (model.calls, model.mask) == ([], None)
    assert not hasattr(model, "fresh_attribute")
    assert not hasattr(model.norm, "last")
    assert [name for name, _ in model.named_buffers()] == [name for name, _ in before.named_buffers()]
    assert all(torch.equal(model.state_dict()[key], value) for key, value in before.state_dict().items())
    assert all(parameter.grad is None for parameter in model.parameters())


def test_capturing_changes_nothing_on_a_model_that_fails() -> None:
    model = Calls(_count_and_fail)
    with pytest.raises(CaptureError):
        captured(model, batch())
    assert not hasattr(model, "seen")
    assert int(model.count) == 0


def _count_and_fail(model: Calls, x: torch.Tensor) -> torch.Tensor:
    model.count += 1
    model.seen = x
    raise ValueError("on purpose")


def test_a_buffer_that_first_appears_in_the_forward_is_refused_and_gone() -> None:
    model = Calls(lambda m, x: (m.register_buffer("fresh", x), m.linear(x))[1])
    with pytest.raises(CaptureError, match="fresh"):
        captured(model, batch())
    assert not hasattr(model, "fresh")


def test_what_fails_in_a_trace_is_raised_and_not_logged() -> None:
    class Fails(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.mm(x, x)

    told: list[logging.LogRecord] = []
    log, handler = logging.getLogger("torch._subclasses.fake_tensor"), logging.Handler()
    handler.emit = told.append  # type: ignore[method-assign]
    log.addHandler(handler)
    try:
        with pytest.raises(CaptureError), traced(Fails(), Sample.of(torch.randn(2, 3, requires_grad=True))):
            pass
    finally:
        log.removeHandler(handler)
    assert not told


def test_a_model_works_after_it_was_captured() -> None:
    model = Leaving()
    captured(model, batch())
    model(batch()).sum().backward()
    assert model.calls == [1]
    assert isinstance(model.mask, torch.Tensor)


def test_what_a_forward_appends_to_a_list_is_gone() -> None:
    model = Calls(lambda m, x: (m.history.append(x), m.linear(x))[1])
    model.history = []
    captured(model, batch())
    assert model.history == []


def test_a_buffer_that_is_given_a_new_tensor_is_not_forgotten() -> None:
    model = Calls(lambda m, x: (setattr(m, "count", m.count + 1), m.linear(x))[1])
    graph = captured(model, batch())
    assert [graph.storages[index].dtype for index in graph.written_back] == ["int64"]


def test_the_generator_is_where_it_was() -> None:
    model, x = nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.5)), batch()
    before = torch.get_rng_state()
    captured(model, x)
    assert torch.equal(torch.get_rng_state(), before)


def test_the_batch_is_as_it_was() -> None:
    x = batch()
    before = x.clone()
    captured(Calls(lambda m, x: m.linear(x.mul_(2))), x)
    assert torch.equal(x, before)


@pytest.mark.parametrize("fails", [False, True])
def test_hooks_are_gone_and_the_users_own_are_not_called(fails: bool) -> None:
    seen: list[nn.Module] = []
    model = Calls(_count_and_fail if fails else (lambda m, x: m.linear(x)))
    hook: Any = lambda module, _: seen.append(module)  # noqa: E731
    model.register_forward_pre_hook(hook)
    hooks = [len(each) for each in _global_hooks()]
    if fails:
        with pytest.raises(CaptureError):
            captured(model, batch())
    else:
        captured(model, batch())
    assert [len(each) for each in _global_hooks()] == hooks
    assert not seen
    assert [*model._forward_pre_hooks.values()] == [hook]


def _global_hooks() -> list[Any]:
    from torch.nn.modules import module

    return [module._global_forward_hooks, module._global_forward_pre_hooks]


def test_a_model_without_weights_is_captured() -> None:
    import memfit

    with memfit.without_weights():
        model, x = nn.Linear(100_000, 50_000), torch.empty(8, 100_000)
    graph = captured(model, x)
    sizes = {storage.name: storage.size_bytes for storage in graph.storages}
    assert sizes["weight"] == 100_000 * 50_000 * 4
    assert targets(graph)[0] == "aten.addmm.default"


def test_a_model_without_weights_takes_a_real_sample() -> None:
    import memfit

    with memfit.without_weights():
        model = nn.Linear(8, 8)
    assert names(captured(model, batch()), Kind.PARAMETER) == ["weight", "bias"]


def test_a_model_without_weights_has_the_graph_of_the_real_one() -> None:
    import memfit

    with memfit.without_weights():
        fake, x = convolutions(), torch.empty(2, 3, 8, 8)
    assert targets(captured(fake, x)) == targets(captured(convolutions(), torch.randn(2, 3, 8, 8)))


COUNTED = itertools.count()


class Counted(nn.Module):
    """Reaches an iterator that its forward does not move, as models reach those of libraries."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.numbers = nn.Linear(2, 2), COUNTED

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        return self.linear(rows)


def test_iterators_may_be_moved_by_who_compiles_a_trace() -> None:
    with traced(Counted(), Sample((torch.randn(2, 2),))):
        next(COUNTED)
