"""Precisions: autocast as torch does it, fp16 that skips overflows, bf16 parameters rounded at random."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from training import TiedNet, assert_same_parameters, classify, rows, twins

import memfit
from memfit.errors import InvalidInput
from memfit.step.rounding import StochasticRounding

pytestmark = pytest.mark.usefixtures("one_thread")

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


def train_cast(model, optimizer, batches, dtype, scaler):
    for batch in batches:
        optimizer.zero_grad()
        with torch.autocast("cpu", dtype, cache_enabled=False):
            loss = classify(model, batch)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()


@pytest.mark.parametrize("planned", [False, True])
@pytest.mark.parametrize("precision", DTYPES)
def test_autocast_is_that_of_torch(precision, planned):
    plain, model = twins(TiedNet())
    batches = [rows() for _ in range(20)]
    scaler = torch.amp.GradScaler("cpu", enabled=precision == "fp16")
    train_cast(plain, torch.optim.AdamW(plain.parameters(), lr=0.01), batches, DTYPES[precision], scaler)
    if planned:
        with torch.autocast("cpu", DTYPES[precision], cache_enabled=False):
            memfit.fit(model, batches[0][0], budget="smallest", time_limit=0.5)
    step = memfit.Step(model, torch.optim.AdamW(model.parameters(), lr=0.01), classify, precision=precision)
    for batch in batches:
        step(batch)
    assert_same_parameters(model, plain)


@pytest.mark.parametrize("precision", ["bf16", "fp16", "pure-bf16"])
@pytest.mark.parametrize("planned", [False, True])
def test_precisions_combine_with_micro_batches_and_plans(precision, planned):
    model = TiedNet()
    if planned:
        memfit.fit(model, rows(4)[0], budget="9KiB", loop=memfit.Loop(gradients="kept"), time_limit=0.5)
    step = memfit.Step(
        model, torch.optim.AdamW(model.parameters(), lr=0.01), classify, precision=precision, micro_batches=3
    )
    batch = rows(12)
    losses = [float(step(batch)) for _ in range(30)]
    assert losses[-1] < 0.6 * losses[0]


def test_an_overflow_skips_the_update_and_lowers_the_scale():
    model = nn.Linear(8, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    step = memfit.Step(
        model, optimizer, lambda model, batch: 1e4 * classify(model, batch), precision="fp16", scheduler=scheduler
    )
    before = copy.deepcopy(model.state_dict())
    step(rows())
    assert (step.position.updates, step.position.skipped) == (0, 1)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert optimizer.param_groups[0]["lr"] == 0.1
    scale = step.state_dict()["scaler"]["scale"]
    assert scale < 65536
    while not step.position.updates:
        step(rows())
    assert not torch.equal(model.weight, before["weight"])


# Stochastic rounding


def test_rounding_is_right_on_average():
    rounding = StochasticRounding(torch.device("cpu"))
    exact = torch.tensor([1.0 + 2**-10, -3.3, 1e-20, 0.0, 2.5e38])
    rounded = torch.empty(20000, 5, dtype=torch.bfloat16)
    rounding.round_into(rounded, exact.expand(20000, 5).contiguous())
    mean = rounded.double().mean(0)
    assert torch.allclose(mean, exact.double(), rtol=2**-8 / 20000**0.5 * 4)
    below, above = exact.bfloat16().double() * (1 - 2**-7), exact.bfloat16().double() * (1 + 2**-7)
    assert ((rounded >= torch.minimum(below, above)) & (rounded <= torch.maximum(below, above))).all()


def test_what_bf16_can_hold_stays():
    exact = torch.tensor([1.5, -2.0, float("inf"), -float("inf"), 0.0, -0.0, 3.0])
    rounded = torch.empty(7, dtype=torch.bfloat16)
    StochasticRounding(torch.device("cpu")).round_into(rounded, exact)
    assert torch.equal(rounded.float(), exact)
    nans = torch.tensor([float("nan")] * 99)
    nans[::2] = torch.tensor([0x7FFFFFFF], dtype=torch.int32).view(torch.float32)
    rounded = torch.empty(99, dtype=torch.bfloat16)
    StochasticRounding(torch.device("cpu")).round_into(rounded, nans)
    assert rounded.isnan().all()


@pytest.mark.parametrize("update", ["after", "inside"])
def test_small_updates_are_kept_on_average(update):
    """Each is an eighth of what the nearest bf16 neighbour is away."""
    model = nn.Linear(256, 16, bias=False)
    nn.init.ones_(model.weight)
    step = memfit.Step(
        model,
        torch.optim.SGD(model.parameters(), lr=2**-11),
        lambda model, batch: model(batch).sum(),
        precision="pure-bf16",
        update=update,
    )
    for _ in range(16):
        step(torch.ones(1, 256))
    assert model.weight.dtype is torch.bfloat16
    assert abs(float(model.weight.detach().float().mean()) - (1 - 16 * 2**-11)) < 2e-4
    nearest = torch.ones(1, dtype=torch.bfloat16)
    assert nearest - torch.tensor(2**-11, dtype=torch.bfloat16) == nearest


def test_the_models_random_numbers_do_not_move():
    model = nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.5), nn.Linear(8, 4)).bfloat16()
    step = memfit.Step(model, torch.optim.AdamW(model.parameters()), classify, precision="pure-bf16")
    torch.manual_seed(5)
    step(rows())
    after = torch.get_rng_state()
    torch.manual_seed(5)
    features, labels = rows()
    F.cross_entropy(model(features.bfloat16()), labels).backward()
    assert torch.equal(torch.get_rng_state(), after)


def test_pure_bf16_has_the_state_of_a_plain_optimizer():
    model = TiedNet()
    optimizer = torch.optim.AdamW(model.parameters())
    memfit.Step(model, optimizer, classify, precision="pure-bf16")(rows())
    plain = TiedNet().bfloat16()
    other = torch.optim.AdamW(plain.parameters())
    classify(plain, (rows()[0].bfloat16(), rows()[1])).backward()
    other.step()
    for ours, theirs in zip(
        optimizer.state_dict()["state"].values(), other.state_dict()["state"].values(), strict=True
    ):
        assert {name: value.dtype for name, value in ours.items()} == {
            name: value.dtype for name, value in theirs.items()
        }


def test_an_optimizer_that_has_stepped_is_refused():
    model = TiedNet()
    optimizer = torch.optim.AdamW(model.parameters())
    classify(model, rows()).backward()
    optimizer.step()
    with pytest.raises(InvalidInput, match="has stepped"):
        memfit.Step(model, optimizer, classify, precision="pure-bf16")
