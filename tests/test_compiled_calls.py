"""The standard models with compiled kernels, called with keywords and constants as their libraries' users do."""

import copy
import inspect
from typing import Any

import pytest
import torch
from torch import nn

import memfit
from benchmarks.models import Case, frontier_cases
from memfit.measure.peak import measure_peak

BATCH_SIZE = 2
CASES = {case.name: case for case in frontier_cases()}
OF_PARAMETERS = ("VGG-16", "ViT-B/16", "LSTM")  # most of the peak at two samples
CONSTANTS = {
    "GPT-2": {"use_cache": False, "return_dict": True, "output_attentions": False},
    "BERT": {"return_dict": True, "output_hidden_states": None},
}


def keywords_of(case: Case, model: nn.Module, batch: Any) -> dict[str, Any]:
    """The arguments of a call, all by name."""
    sample = case.sample(batch)
    if isinstance(sample, dict):
        return {**sample, **CONSTANTS[case.name]}
    return inspect.signature(model.forward).bind(*sample).arguments


def loss_of(output: Any) -> torch.Tensor:
    found: torch.Tensor = getattr(output, "loss", output)
    return found if found.dim() == 0 else found.square().mean()


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("name", CASES)
def test_compiled_kernels_take_keywords_and_constants(name: str) -> None:
    case = CASES[name]
    torch.manual_seed(0)
    plain = case.make_model().train()
    for module in plain.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0  # compiled kernels draw other numbers
    keywords = keywords_of(case, plain, case.make_batch(BATCH_SIZE))
    budget: float | str = "smallest" if name in OF_PARAMETERS else 0.9
    fitted = memfit.fit(copy.deepcopy(plain), keywords, budget, kernels="inductor", time_limit=2, progress=False)
    losses = []
    for model in (plain, fitted):
        loss = loss_of(model(**keywords))
        loss.backward()
        losses.append(loss.item())
    assert losses[1] == pytest.approx(losses[0], rel=1e-3)
    for one, other in zip(plain.parameters(), fitted.parameters(), strict=True):
        assert (one.grad is None) == (other.grad is None)
    fitted.zero_grad()
    plan = memfit.plan_of(fitted)
    assert plan is not None
    assert plan.budget_bytes is not None
    measured = measure_peak(lambda: loss_of(fitted(**keywords)).backward(), resident=[fitted, keywords])
    assert measured.peak_bytes <= plan.budget_bytes
