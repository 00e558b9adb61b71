"""A small part of the standard cases, as `make bench` runs them all."""

import copy

import pytest
import torch

import memfit
from benchmarks.models import Case, small_cases
from memfit.measure.peak import measure_peak

SMALL = {str(case): case for case in small_cases()}


@pytest.fixture(params=SMALL)
def case(request: pytest.FixtureRequest) -> Case:
    return SMALL[request.param]


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_the_estimate_is_true_and_the_captured_model_equals_eager(case: Case) -> None:
    model = case.make_model().train()
    batch, other = (case.make_batch(case.batch_size) for _ in range(2))
    estimate = memfit.estimate(model, batch, loss=case.loss, optimizer="adamw")
    captured = memfit.fit(copy.deepcopy(model), case.sample(batch))
    ends = []
    for each in (model, captured):
        torch.manual_seed(0)
        loss = case.loss(each, other)
        loss.backward()
        ends.append([loss.detach(), *(p.grad for p in each.parameters()), *each.buffers(), torch.get_rng_state()])
    assert all(torch.equal(one, two) for one, two in zip(*ends, strict=True))

    optimizer = torch.optim.AdamW(model.parameters())

    def step() -> None:
        optimizer.zero_grad()
        case.loss(model, batch).backward()
        optimizer.step()

    step()
    optimizer.zero_grad()
    measured = measure_peak(step, resident=[model, optimizer, batch])
    assert estimate.peak_bytes == pytest.approx(measured.peak_bytes, rel=0.01)
