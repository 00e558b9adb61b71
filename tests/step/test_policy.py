"""What cannot be meant is refused in one sentence, and changes nothing."""

import copy

import pytest
import torch
from torch import nn
from training import TiedNet, classify, rows

import memfit
from memfit.errors import InvalidInput, NonFiniteLoss


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"micro_batches": 0}, "micro_batches is a whole number"),
        ({"accumulate": 1.5}, "accumulate is a whole number"),
        ({"precision": "int8"}, "precision is one of 'fp16'"),
        ({"update": None}, "update is one of"),
        ({"state_tier": "tape"}, "state_tier is one of"),
        ({"state_tier": "disk"}, "needs a directory"),
        ({"directory": "here"}, "give both or neither"),
        ({"clip_norm": 0.0}, "clip_norm is a positive number"),
        ({"update": "inside", "clip_norm": 1.0}, "norm of all gradients"),
        ({"update": "inside", "precision": "fp16"}, "skip an update"),
        ({"allow": ("anything",)}, "known are"),
        ({"allow": "batch-statistics"}, "allow is a tuple"),
        ({"state_tier": "host"}, "in host memory already"),
        ({"offload": True}, "takes no 'offload'"),
        ({"reduction": "max"}, '"mean" or "sum"'),
        ({"policy": memfit.StepPolicy(), "accumulate": 2}, "into the policy"),
    ],
)
def test_options_that_make_no_sense(options, words):
    model = TiedNet()
    with pytest.raises(InvalidInput, match=words):
        memfit.Step(model, torch.optim.SGD(model.parameters()), classify, **options)


def test_a_policy_stands_for_its_keywords():
    model = TiedNet()
    policy = memfit.StepPolicy(micro_batches=3, clip_norm=1.0)
    step = memfit.Step(model, torch.optim.SGD(model.parameters()), classify, policy=policy)
    assert step.policy is policy
    assert memfit.StepPolicy(**policy.to_json()) == policy
    step(rows())
    assert step.gradient_norm is not None


@pytest.mark.parametrize(
    ("loss", "words"),
    [
        (lambda model, batch: model(batch[0]), r"shape \(12, 4\)"),
        (lambda model, batch: 3.0, "returned float"),
        (lambda model, batch: model(batch[0]).argmax(1)[0], "not a scalar"),
        (lambda model, batch: model(batch[0]).mean().detach(), "does not depend on any parameter"),
        (lambda model, batch: memfit.Mean(model(batch[0]).sum(), 0), "nothing|anything to count"),
        (lambda model, batch: (model(batch[0]).sum(), -1), "finite number of terms"),
    ],
)
def test_losses_that_are_none(loss, words):
    model = TiedNet()
    step = memfit.Step(model, torch.optim.SGD(model.parameters()), loss)
    with pytest.raises(InvalidInput, match=words):
        step(rows())


@pytest.mark.parametrize("update", ["after", "inside"])
@pytest.mark.parametrize("micro_batches", [1, 3])
def test_a_loss_that_is_not_finite_is_reported_and_changes_nothing(update, micro_batches):
    model = TiedNet()
    step = memfit.Step(
        model, torch.optim.AdamW(model.parameters()), classify, update=update, micro_batches=micro_batches
    )
    step(rows())
    before = copy.deepcopy(model.state_dict())
    features, labels = rows()
    features[-1] = float("nan")
    with pytest.raises(NonFiniteLoss, match="step 2 is nan") as found:
        step((features, labels))
    assert found.value.step == 2
    assert (step.position.updates, step.position.batches) == (1, 2)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert all(parameter.grad is None for parameter in model.parameters())
    step(rows())
    assert step.position.updates == 2


def test_a_split_that_gives_another_number_of_pieces():
    model = TiedNet()
    step = memfit.Step(
        model, torch.optim.SGD(model.parameters()), classify, micro_batches=2, split=lambda batch, pieces: [batch]
    )
    with pytest.raises(InvalidInput, match="1 pieces where 2"):
        step(rows())


def test_what_is_no_optimizer():
    with pytest.raises(InvalidInput, match="str was given"):
        memfit.Step(TiedNet(), "adamw", classify)
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))])
    optimizer.param_groups = []
    with pytest.raises(InvalidInput, match="no parameters"):
        memfit.Step(TiedNet(), optimizer, classify)
