"""Steps in loops that keep gradients."""

import pytest
import torch
from torch import nn

import memfit
from memfit.errors import InvalidInput
from memfit.ir import Kind

WIDTH = 256


def estimated(**options):
    model = nn.Sequential(*[nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(4)])
    return memfit.estimate(model, torch.randn(2, WIDTH), measure=False, **options)


def test_kept_gradients_live_beside_one_that_is_made():
    plain, kept = estimated(), estimated(loop=memfit.Loop(gradients="kept"))
    one = WIDTH * WIDTH * 4
    assert plain.by_kind()[Kind.GRADIENT] == 4 * one
    assert kept.by_kind()[Kind.GRADIENT] == 5 * one
    assert kept.peak_bytes - plain.peak_bytes >= one // 2


def test_they_are_there_before_the_step():
    kept = estimated(loop=memfit.Loop(gradients="kept"))
    assert kept.timeline.moments[0].by_kind[Kind.GRADIENT] == 4 * WIDTH * WIDTH * 4


def test_the_measured_peak_is_the_predicted_one():
    from memfit.measure.peak import measure_peak

    model = nn.Sequential(*[nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(4)])
    batch = torch.randn(2, WIDTH)
    model(batch).sum().backward()

    def step():
        model(batch).sum().backward()

    measured = measure_peak(step, resident=[model, [each.grad for each in model.parameters()], batch])
    predicted = memfit.estimate(
        model, batch, loss=lambda model, batch: model(batch).sum(), loop=memfit.Loop(gradients="kept")
    )
    assert abs(measured.peak_bytes - predicted.peak_bytes) <= 0.02 * predicted.peak_bytes


def test_another_word_is_refused():
    with pytest.raises(InvalidInput, match='"none" or "kept"'):
        memfit.Loop(gradients="zero")


def test_kept_outputs_live_through_the_next_forward_pass():
    batch = torch.randn(512, WIDTH)

    def loss(model, batch):
        outputs = model(batch)
        return outputs.square().mean(), outputs

    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, WIDTH))
    plain, kept = (
        memfit.estimate(model, batch, loss=loss, device="A100-40GB", loop=memfit.Loop(outputs=word), progress=False)
        for word in ("none", "kept")
    )
    one = batch.nbytes + 512  # and the loss
    first, last = kept.timeline.moments[0], kept.timeline.moments[-1]
    assert first.live_bytes - plain.timeline.moments[0].live_bytes == one
    assert last.live_bytes == plain.timeline.moments[-1].live_bytes
    assert kept.reserved_bytes >= plain.reserved_bytes


def test_a_plan_says_that_it_does_not_count_kept_outputs():
    with pytest.raises(InvalidInput, match="leave room"):
        memfit.plan(nn.Linear(4, 4), torch.randn(2, 4), budget=1.0, loop=memfit.Loop(outputs="kept"))


def evaluated(loss=None, **options):
    model = nn.Sequential(*[nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(4)])
    return memfit.estimate(
        model, torch.randn(64, WIDTH), loss=loss, loop=memfit.Loop(backward=False), measure=False, **options
    )


def without_gradients(model, batch):
    with torch.inference_mode():
        return model(batch)


WEIGHTS, ROWS = 4 * WIDTH * WIDTH * 4, 64 * WIDTH * 4


def test_a_forward_pass_alone_keeps_what_autograd_saves():
    assert evaluated().peak_bytes == WEIGHTS + 5 * ROWS


def test_without_gradients_a_forward_pass_keeps_an_input_and_an_output():
    assert evaluated(without_gradients).peak_bytes == WEIGHTS + 3 * ROWS
    with torch.no_grad():
        assert evaluated().peak_bytes == WEIGHTS + 3 * ROWS


def test_a_forward_pass_alone_is_estimated_for_a_device():
    estimate = evaluated(without_gradients, device="RTX 4090")
    assert estimate.reserved.allocated_bytes == WEIGHTS + 3 * ROWS + 8_519_680
    assert "forward:" in str(estimate)
    assert "adamw" not in str(estimate)


def test_a_frozen_model_can_be_evaluated():
    model = nn.Linear(4, 4).requires_grad_(False)
    assert memfit.estimate(model, torch.randn(2, 4), loop=memfit.Loop(backward=False), measure=False).peak_bytes > 0


def test_a_forward_pass_alone_has_no_optimizer_and_no_plan():
    with pytest.raises(InvalidInput, match="no optimizer step"):
        evaluated(optimizer="adamw")
    with pytest.raises(InvalidInput, match="a plan is for a training step"):
        memfit.plan(nn.Linear(4, 4), torch.randn(2, 4), budget=1.0, loop=memfit.Loop(backward=False))


def test_inference_mode_under_autocast_keeps_no_weights_that_were_cast():
    def inference(model, batch):
        with torch.autocast("cpu", torch.bfloat16), torch.inference_mode():
            return model(batch)

    assert evaluated(inference).peak_bytes < WEIGHTS + WEIGHTS // 4 + 3 * ROWS


def test_an_estimate_says_what_other_loops_would_cost():
    plain, kept = estimated(optimizer="adamw"), estimated(optimizer="adamw", loop=memfit.Loop(gradients="kept"))
    assert plain.peak_bytes + plain.loop_costs["gradients kept"] == kept.peak_bytes
    assert "gradients kept" not in kept.loop_costs
    both = estimated(optimizer="adamw", loop=memfit.Loop(outputs="kept"))
    assert plain.peak_bytes + plain.loop_costs["outputs kept"] == both.peak_bytes
    assert plain.to_dict()["loop_costs"] == plain.loop_costs
    assert evaluated().loop_costs == {}


def test_the_first_step_has_no_state_while_it_computes():
    model = nn.Sequential(*[nn.Linear(64, 64) for _ in range(4)])
    batch = torch.randn(4096, 64)  # the passes are the peak
    found = memfit.estimate(model, batch, optimizer="adamw", measure=False)
    state_bytes = 2 * sum(each.nbytes for each in model.parameters())
    assert found.loop_costs["first step alone"] == -state_bytes - 8 * 4  # and a counter for each parameter
