"""Every exact technique and every pair of them: twenty steps end where plain eager training ends, bit for bit."""

import pytest
import torch
from torch import nn
from training import (
    TiedNet,
    adamw,
    assert_same_parameters,
    assert_same_state,
    classify,
    pairs,
    rows,
    train_plainly,
    twins,
)

import memfit

pytestmark = pytest.mark.usefixtures("one_thread")

EXACT = {
    "planned": {},
    "inside": {"update": "inside"},
    "disk": {"state_tier": "disk"},
    "clipped": {"clip_norm": 0.5},
    "scheduled": {},
    "bf16": {"precision": "bf16"},
    "micro-batches": {"micro_batches": 2},
}
OPTIMIZERS = {
    "SGD": lambda parameters: torch.optim.SGD(parameters, lr=0.05, momentum=0.9, nesterov=True),
    "Adam": lambda parameters: torch.optim.Adam(parameters, lr=0.01, amsgrad=True),
    "NAdam": torch.optim.NAdam,
    "RAdam": torch.optim.RAdam,
    "Adamax": torch.optim.Adamax,
    "Adadelta": torch.optim.Adadelta,
    "Adagrad": torch.optim.Adagrad,
    "RMSprop": lambda parameters: torch.optim.RMSprop(parameters, momentum=0.9, centered=True),
    "Rprop": torch.optim.Rprop,
    "ASGD": torch.optim.ASGD,
    "Adafactor": torch.optim.Adafactor,
}


def options_of(techniques, directory):
    options = {key: value for name in techniques for key, value in EXACT[name].items()}
    return options | ({"directory": directory} if "disk" in techniques else {})


@pytest.fixture(autouse=True)
def _small_parts(monkeypatch):
    monkeypatch.setattr("memfit.step.parts.LARGEST_PART", 100)  # several parts of every weight


REFUSED = {"inside", "clipped"}  # see test_policy.py
ALLOWED = [techniques for techniques in pairs(list(EXACT)) if {*techniques} != REFUSED]


@pytest.mark.parametrize("techniques", ALLOWED, ids="+".join)
def test_twenty_steps_are_those_of_the_plain_run(techniques, tmp_path):
    plain, model = twins(TiedNet())
    batches = [rows() for _ in range(20)]
    expected, optimizer = adamw(plain), adamw(model)
    if "planned" in techniques:
        rows_of_a_piece = 6 if "micro-batches" in techniques else 12
        memfit.fit(
            model,
            batches[0][0][:rows_of_a_piece],
            budget="smallest",
            loop=memfit.Loop(gradients="kept"),
            time_limit=0.5,
        )
    schedulers = [
        torch.optim.lr_scheduler.CosineAnnealingLR(each, 20) if "scheduled" in techniques else None
        for each in (expected, optimizer)
    ]
    step = memfit.Step(model, optimizer, classify, scheduler=schedulers[1], **options_of(techniques, tmp_path))
    pieces = 2 if "micro-batches" in techniques else 1
    losses = train_plainly(
        plain,
        expected,
        classify,
        batches,
        scheduler=schedulers[0],
        clip_norm=0.5 if "clipped" in techniques else None,
        dtype=torch.bfloat16 if "bf16" in techniques else None,
        pieces=pieces,
    )
    found = [step(batch) for batch in batches]
    assert pieces > 1 or all(torch.equal(one, other) for one, other in zip(found, losses, strict=True))
    assert_same_parameters(model, plain)
    assert_same_state(optimizer, expected)
    assert step.position.updates == step.position.batches == 20
    assert all(parameter.grad is None for parameter in model.parameters())


@pytest.mark.parametrize("techniques", [("inside",), ("disk",), ("inside", "disk")], ids="+".join)
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_every_optimizer_runs_in_parts(name, techniques, tmp_path):
    plain, model = twins(TiedNet())
    batches = [rows() for _ in range(4)]
    expected, optimizer = OPTIMIZERS[name](plain.parameters()), OPTIMIZERS[name](model.parameters())
    step = memfit.Step(model, optimizer, classify, **options_of(techniques, tmp_path))
    train_plainly(plain, expected, classify, batches)
    for batch in batches:
        step(batch)
    assert_same_parameters(model, plain)
    assert_same_state(optimizer, expected)
    # and on with the plain optimizer
    plainly = OPTIMIZERS[name](model.parameters())
    plainly.load_state_dict(optimizer.state_dict())
    train_plainly(plain, expected, classify, batches)
    train_plainly(model, plainly, classify, batches)
    assert_same_parameters(model, plain)


def test_muon_is_run_on_whole_parameters():
    plain, model = twins(nn.Sequential(nn.Linear(8, 16, bias=False), nn.Tanh(), nn.Linear(16, 4, bias=False)))
    batches = [rows() for _ in range(4)]
    train_plainly(plain, torch.optim.Muon(plain.parameters()), classify, batches)
    step = memfit.Step(model, torch.optim.Muon(model.parameters()), classify, update="inside")
    for batch in batches:
        step(batch)
    assert_same_parameters(model, plain)


def test_channels_last_weights_are_updated_whole(tmp_path):
    def net():
        torch.manual_seed(1)
        return nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Flatten(), nn.Linear(288, 4)).to(
            memory_format=torch.channels_last
        )

    plain, model = net(), net()
    batches = [(torch.randn(4, 3, 8, 8), torch.randint(4, (4,))) for _ in range(4)]
    train_plainly(plain, torch.optim.AdamW(plain.parameters()), classify, batches)
    optimizer = torch.optim.AdamW(model.parameters())
    step = memfit.Step(model, optimizer, classify, update="inside", state_tier="disk", directory=tmp_path)
    for batch in batches:
        step(batch)
    assert_same_parameters(model, plain)


def test_settings_of_groups_can_change_between_steps():
    plain, model = twins(TiedNet())
    batches = [rows() for _ in range(4)]
    expected, optimizer = adamw(plain), adamw(model)
    step = memfit.Step(model, optimizer, classify, update="inside")
    for number, batch in enumerate(batches):
        for each in (expected, optimizer):
            each.param_groups[1]["lr"] = 0.01 * (number + 1)
        train_plainly(plain, expected, classify, [batch])
        step(batch)
    assert_same_parameters(model, plain)
