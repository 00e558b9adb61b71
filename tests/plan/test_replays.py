"""What draws that are made again take, in plans of whole models and of regions."""

import pytest
import torch
from torch import nn

import memfit
from memfit.measure.peak import measure_peak
from memfit.plan.replays import kept_states_bytes


def dropouts(count: int) -> list[nn.Module]:
    return [each for _ in range(count) for each in (nn.Linear(32, 32), nn.GELU(), nn.Dropout(0.1))]


class Branching(nn.Module):
    """Cannot be captured whole."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Sequential(*dropouts(3)), nn.Sequential(*dropouts(3))

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        hidden = self.first(batch)
        return self.second(hidden if hidden.sum() < 1e9 else -hidden)


def loss_of(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
    loss: torch.Tensor = model(batch).square().mean()
    return loss


MODELS = {"whole": lambda: nn.Sequential(*dropouts(4)), "regions": Branching}


@pytest.mark.parametrize("rows", [64, 256])
@pytest.mark.parametrize("kind", MODELS)
def test_draws_that_are_made_again_are_counted_with_the_states_of_their_generator(
    kind: str, rows: int, one_thread: None
) -> None:
    torch.manual_seed(0)
    model, batch = MODELS[kind](), torch.randn(rows, 32)
    memfit.fit(model, batch, "smallest", loss=loss_of, allow=("recompute",), remember=False, progress=False)
    plan = memfit.plan_of(model)
    assert plan is not None
    assert bool(plan.regions) == (kind == "regions")
    again = [each.step and kept_states_bytes(each.step.graph, each.program) for each in (*plan.regions.values(), plan)]
    assert any(again)

    def step() -> None:
        loss_of(model, batch).backward()

    step()
    model.zero_grad()
    measured = measure_peak(step, resident=[model, batch]).peak_bytes
    assert plan.peak_bytes - 256 <= measured <= plan.peak_bytes  # less: numbers that a loss makes
