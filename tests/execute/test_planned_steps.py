"""Programs that compute values again, against the plain eager run, bit for bit."""

import copy

import pytest
import torch
from programs import computed_again, forget_everything, keep_everything, keep_nothing, keeping, planned
from torch import nn
from torch.nn.utils import parametrizations
from torch.utils.checkpoint import checkpoint
from twins import MODELS, Linear, assert_same, train_step

from memfit.errors import ExecutionError
from memfit.plan.identity import identity_program

PLANNERS = {
    "the eager run": identity_program,
    "keep nothing": keep_nothing,
    "forget everything": forget_everything,
    "keep every third": keeping(lambda storage: storage % 3 == 0),
    "nothing in place": keeping(in_place=lambda _: False),
}
EVERY_PLANNER = pytest.mark.parametrize("planner", PLANNERS.values(), ids=list(PLANNERS))


def assert_planned_equals_eager(eager, batch, planner):
    captured = planned(eager, batch, planner)
    for seed in (3, 4):  # buffers, gradients and the generator go on from the first
        assert_same(train_step(eager, batch, seed), train_step(captured, batch, seed))
    assert len(captured.forward.calls) == 1


@EVERY_PLANNER
@pytest.mark.parametrize("name", MODELS)
def test_a_planned_step_equals_the_eager_step(name, planner):
    make_model, make_batch = MODELS[name]
    assert_planned_equals_eager(make_model(), make_batch(), planner)


def blocks_sharing_a_norm():
    norm = nn.BatchNorm1d(8)
    return nn.Sequential(nn.Linear(8, 8), norm, nn.ReLU(), nn.Linear(8, 8), norm, nn.Dropout(0.5), nn.Linear(8, 8))


def spectral():
    layers = [parametrizations.spectral_norm(nn.Linear(8, 8)) for _ in range(2)]
    return nn.Sequential(layers[0], nn.Tanh(), layers[1])


def frozen_norm():
    model = nn.Sequential(nn.Conv2d(8, 8, 1), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 8, 1))
    model[1].eval()
    return model


class Checkpointed(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.Dropout(0.3)) for _ in range(3))

    def forward(self, features):
        for block in self.blocks:
            features = features + checkpoint(block, features, use_reentrant=False)
        return features


def views(model, features):
    hidden = model.linear(features).tanh()
    left, right = hidden.view(3, 2, 4).unbind(1)
    return torch.stack((left.t().sin().t(), right * hidden[:, ::2].exp().sum()), 1).flatten(1) + hidden


def unread_draws(model, features):
    nn.functional.dropout(features, 0.5)
    torch.rand(3)
    return nn.functional.dropout(model.linear(features).exp(), 0.5).sin()


ODD_MODELS = {
    "one norm used twice": (blocks_sharing_a_norm, (6, 8)),
    "spectral norm": (spectral, (6, 8)),
    "a norm in eval mode": (frozen_norm, (4, 8, 3, 3)),
    "checkpoints of its own": (Checkpointed, (6, 8)),
    "views of many kinds": (lambda: Linear(views, 8), (3, 8)),
    "draws that nobody reads": (lambda: Linear(unread_draws), (3, 4)),
}


@pytest.mark.parametrize("name", ODD_MODELS)
@pytest.mark.parametrize(
    "planner", [identity_program, keep_nothing, forget_everything], ids=["eager", "none", "forget"]
)
def test_odd_models_are_planned_as_well(name, planner):
    make_model, shape = ODD_MODELS[name]
    assert_planned_equals_eager(make_model(), torch.randn(shape), planner)


def test_resnet18():
    import torchvision

    eager = torchvision.models.resnet18(num_classes=5)
    batch = torch.randn(2, 3, 32, 32)
    captured = planned(eager, batch, keeping(lambda storage: storage % 5 == 0))
    assert_same(train_step(eager, batch), train_step(captured, batch))


def test_gpt2_of_two_layers():
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(
        n_layer=2, n_embd=16, n_head=2, vocab_size=50, n_positions=16, bos_token_id=0, eos_token_id=0, use_cache=False
    )
    config.loss_type = "ForCausalLM"
    tokens = torch.randint(50, (2, 9))
    eager = GPT2LMHeadModel(config)
    planner = keeping(lambda storage: storage % 3 == 0, forgotten=lambda storage: storage % 2 == 0)
    captured = planned(eager, {"input_ids": tokens, "labels": tokens}, planner)
    ends = []
    for model in (eager, captured):
        torch.manual_seed(3)
        loss = model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        ends.append([loss.detach(), *(weight.grad for weight in model.parameters()), torch.get_rng_state()])
    assert_same(*ends)


def test_under_autocast():
    eager = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Dropout(0.2), nn.Linear(16, 8))
    batch = torch.randn(4, 8)
    inside = pytest.warns(UserWarning, match="inside an autocast block")  # where these layers cast nothing
    with torch.autocast("cpu", torch.bfloat16), inside:
        assert_planned_equals_eager(eager, batch, forget_everything)


def test_what_is_computed_again_is_what_was_not_kept():
    seen = []

    def planner(graph):
        program = keeping(lambda storage: graph.storages[storage].name != "tanh")(graph)
        seen.append(computed_again(graph, program))
        return program

    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))
    planned(model, torch.randn(2, 4), planner)
    assert seen == [["aten.addmm.default", "aten.tanh.default"]]


def test_training_ends_in_the_same_parameters():
    make_model, make_batch = MODELS["conv"]
    eager, batch = make_model(), make_batch()
    captured = planned(eager, batch, forget_everything)
    for model in (eager, captured):
        torch.manual_seed(5)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        for _ in range(20):
            optimizer.zero_grad()
            model(batch).square().mean().backward()
            optimizer.step()
    assert_same(list(eager.state_dict().values()), list(captured.state_dict().values()))


class Remembering(nn.Module):
    """Reads a buffer and then changes it, as a queue of old keys is."""

    def __init__(self, size):
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.register_buffer("memory", torch.randn(size, 4))

    def forward(self, features):
        keys = self.linear(features)
        scores = (keys @ self.memory.t().tanh()).softmax(-1)
        with torch.no_grad():
            self.memory[:1] = keys[:1]
        return scores


def test_what_reads_a_buffer_that_the_forward_changes_sees_the_old_value_again():
    assert_planned_equals_eager(Remembering(10), torch.randn(3, 4), forget_everything)


def test_reading_a_big_buffer_again_after_it_changed_is_refused():
    model = Remembering(20_000)
    with pytest.raises(ExecutionError, match="reads 'memory'; the forward pass has changed that"):
        planned(model, torch.randn(3, 4), forget_everything)
    kept = planned(model, torch.randn(3, 4), keep_everything)
    batch = torch.randn(3, 4)
    assert_same(train_step(copy.deepcopy(model), batch), train_step(kept, batch))


class Normalized(nn.Module):
    """Divides by a running mean of squares, which it moves first."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(6, 5)
        self.register_buffer("squares", torch.ones(5))

    def forward(self, features):
        hidden = self.linear(features)
        self.squares.lerp_(hidden.detach().square().mean(0), 0.1)
        return hidden / self.squares.sqrt()


@EVERY_PLANNER
def test_the_new_value_of_a_buffer_may_be_written_over_where_it_is_computed_again(planner):
    assert_planned_equals_eager(Normalized(), torch.randn(8, 6), planner)
