"""`memfit.check` stays inside the budget, and finds what differs there too."""

import os
import shutil

import pytest
import torch
from budgeted import Answering, assert_untouched, state_of
from test_inside_budget import MODELS, budget_at
from torch import nn

import memfit
from memfit.capture.sample import Sample
from memfit.errors import ExecutionError, InvalidFile
from memfit.execute.compiled import CompiledCall
from memfit.measure.peak import measure_peak
from memfit.ops import batch_norm
from memfit.prove.batch_part import first_rows

pytestmark = pytest.mark.usefixtures("one_thread")
AS_IT_IS = "the eager step was run as it is"


def planned(name, share):
    make_model, make_batch = MODELS[name]
    torch.manual_seed(0)
    model, batch = make_model().train(), make_batch()
    return model, memfit.plan(model, batch, budget=budget_at(model, batch, share), time_limit=2), batch


@pytest.fixture(scope="module", params=["convolutional", "transformer"])
def tight(request, one_thread):
    return planned(request.param, 0.15)


@pytest.fixture(scope="module")
def images(one_thread):
    return planned("convolutional", 0.15)


def observed(model, plan, batch, **options):
    found = []
    seen = measure_peak(lambda: found.append(memfit.check(model, plan, batch, **options)), resident=[model, batch])
    return found[0], seen


def test_a_check_stays_inside_the_budget_and_compares_everything(tight):
    model, plan, batch = tight
    before = state_of(model)
    check, seen = observed(model, plan, batch)
    assert plan.unplanned_peak_bytes > plan.budget_bytes >= seen.peak_bytes
    assert check.exact
    assert {each.part: each.compared for each in check.comparisons} == {
        "outputs": 1,
        "gradients": len(list(model.parameters())),
        "buffers": len(list(model.buffers())),
        "generator": 1,
    }
    assert check.how.startswith("the eager step does not fit")
    assert "saved tensors were kept in a file of" in check.how
    assert check.how in str(check)
    assert_untouched(model, before)


def test_a_step_that_fits_is_run_as_it_is(one_thread):
    model, batch = MODELS["convolutional"][0](), MODELS["convolutional"][1]()
    plan = memfit.plan(model, batch, budget="1GiB")
    assert memfit.check(model, plan, batch).how == AS_IT_IS


def test_results_of_a_step_that_fits_do_not_live_beside_the_planned_one(one_thread):
    model = nn.Sequential(nn.Linear(512, 512), nn.Tanh(), nn.Linear(512, 512))
    batch = torch.randn(8, 512)
    plan = memfit.plan(model, batch, budget=1.0)
    check, seen = observed(model, plan, batch)
    assert check.how == AS_IT_IS
    assert seen.peak_bytes <= 1.05 * plan.budget_bytes  # gradients alone are 0.4 of it


def test_memory_that_is_not_free_counts_as_the_budget_does(images, monkeypatch):
    model, _, batch = images
    plan = memfit.plan(model, batch, budget="1GiB")

    class Little:
        free_bytes = 8 * 2**20

    monkeypatch.setattr("memfit.prove.eager.available", lambda _: Little)
    assert "kept in a file" in memfit.check(model, plan, batch).how


def test_a_planned_step_that_computes_something_else_is_found(images, monkeypatch):
    run = CompiledCall.__call__
    monkeypatch.setattr(CompiledCall, "__call__", lambda *arguments: run(*arguments) * (1 + 1e-3))
    check = memfit.check(*images)
    assert not check.passed
    assert "DIFFERENT" in str(check)
    assert "kept in a file" in str(check)
    assert check.comparisons[0].largest_difference == pytest.approx(1e-3, rel=0.1)


def test_an_operator_that_computes_something_else_is_found(images, monkeypatch):
    def normalize(values, weight, bias, mean, inverse_deviation):
        return torch.zeros_like(values)

    monkeypatch.setattr(batch_norm.normalize, "__code__", normalize.__code__)
    check = memfit.check(*images)
    assert {each.part for each in check.comparisons if each.equal < each.compared} == {"gradients"}
    assert not check.passed
    assert "kept in a file" in check.how


# Where a part of the batch is compared


@pytest.fixture(scope="module")
def answers(one_thread):
    torch.manual_seed(0)
    model, batch = Answering(), torch.randn(256, 64)
    return model, memfit.plan(model, batch, budget="smallest", time_limit=1), batch


def test_where_the_eager_step_never_fits_a_part_of_the_batch_is_compared(answers):
    model, plan, batch = answers
    before = state_of(model)
    check, seen = observed(model, plan, batch)
    assert seen.peak_bytes <= plan.budget_bytes
    assert check.exact
    compared = {each.part: each.compared for each in check.comparisons}
    assert compared["gradients"] == len(list(model.parameters()))
    assert compared["outputs of all 256 samples"] == 1
    assert "gradients of all 256 samples" not in compared
    assert check.how.startswith("compared at 128 of 256 samples, because the eager step does not fit")
    assert check.how.endswith("gradients of all 256 samples were not compared")
    assert_untouched(model, before)


def test_what_differs_in_the_whole_batch_alone_is_found(answers, monkeypatch):
    run = CompiledCall.__call__

    def wrong_if_big(call, states, args, kwargs):
        result = run(call, states, args, kwargs)
        return type(result)(loss=result.loss * (1.5 if len(args[0]) == 256 else 1.0), logits=result.logits)

    monkeypatch.setattr(CompiledCall, "__call__", wrong_if_big)
    check = memfit.check(*answers)
    assert {each.part for each in check.comparisons if each.equal < each.compared} == {"outputs of all 256 samples"}
    assert not check.passed


def test_what_differs_in_a_part_of_the_batch_is_found(answers, monkeypatch):
    run = CompiledCall.__call__

    def wrong(*arguments):
        result = run(*arguments)
        return type(result)(loss=result.loss * 1.5, logits=result.logits)

    monkeypatch.setattr(CompiledCall, "__call__", wrong)
    check = memfit.check(*answers)
    assert {"outputs", "gradients"} <= {each.part for each in check.comparisons if each.equal < each.compared}


class Hoarding(nn.Module):
    """Holds all that its layers make until its forward ends, which no graph shows."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(64, 64) for _ in range(8))

    def forward(self, features):
        made = [features]
        for layer in self.layers:
            made.append(layer(made[-1]).sigmoid())
        return made[-1].square().mean()


def test_a_forward_that_holds_its_values_is_foreseen_and_compared_in_part():
    model, batch = Hoarding(), torch.randn(2048, 64)
    plan = memfit.plan(model, batch, budget="smallest", time_limit=1)
    check, seen = observed(model, plan, batch)
    assert check.exact
    assert seen.peak_bytes <= plan.budget_bytes
    assert "of 2048 samples, because" in check.how
    assert "nothing was compared of all 2048 samples" in check.how


def test_where_nothing_can_be_compared_it_is_refused(answers, monkeypatch):
    monkeypatch.setattr("memfit.prove.batch_part.check_program", refuse)
    with pytest.raises(ExecutionError, match=r"no part of the batch.*1 of 256 samples: not for this"):
        memfit.check(*answers)


def refuse(*_):
    raise InvalidFile("not for this")


def test_all_tensors_of_a_batch_are_cut_that_have_its_rows():
    labels, mask = torch.arange(6), torch.ones(4, 4)
    sample = Sample((torch.randn(6, 3, requires_grad=True),), {"labels": labels, "mask": mask, "scale": torch.ones(())})
    part = first_rows(sample, 2)
    assert [tuple(each.shape) for each in part.tensors()] == [(2, 3), (2,), (4, 4), ()]
    assert part.args[0].requires_grad
    assert part.args[0].is_leaf


# What can go wrong with the file


def test_a_disk_that_is_too_small_is_refused_before_a_step_is_run(images, monkeypatch):
    model, plan, batch = images
    before = state_of(model)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: shutil._ntuple_diskusage(10, 9, 2**20))
    monkeypatch.setattr("memfit.capture.rehearse.step", lambda *_, **__: pytest.fail("a step was run"))
    with pytest.raises(ExecutionError, match=r"a file of .* is needed.*TMPDIR"):
        memfit.check(model, plan, batch)
    monkeypatch.undo()
    assert_untouched(model, before)


@pytest.mark.parametrize("error", [OSError(28, "No space left on device"), KeyboardInterrupt()])
def test_a_file_that_cannot_be_written_leaves_the_model_as_it_is(images, monkeypatch, error):
    model, plan, batch = images
    before = state_of(model)
    write, written = os.pwrite, []

    def failing(file, content, offset):
        written.append(len(content))
        if sum(written) > 2**21:
            raise error
        return write(file, content, offset)

    monkeypatch.setattr(os, "pwrite", failing)
    with pytest.raises(ExecutionError if isinstance(error, OSError) else KeyboardInterrupt):
        memfit.check(model, plan, batch)
    assert_untouched(model, before)
