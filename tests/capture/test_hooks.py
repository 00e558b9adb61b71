"""Hooks of a model's parts run in every step, or the model is refused."""

from typing import Any

import pytest
import torch
from torch import nn

import memfit
from memfit.measure.peak import measure_peak

pytestmark = pytest.mark.filterwarnings("ignore:.*has hooks, which do not run while a step is planned")


class Blocks(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = (
            nn.Sequential(nn.Linear(16, 128), nn.GELU(), nn.Linear(128, 128), nn.GELU(), nn.Linear(128, 16))
            for _ in range(2)
        )

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        output: torch.Tensor = self.two(self.one(batch))
        return output


def losses_of(model: nn.Module, batches: torch.Tensor) -> list[float]:
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    losses = []
    for batch in batches:
        optimizer.zero_grad()
        loss = model(batch).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def pair() -> tuple[Blocks, Blocks, torch.Tensor]:
    torch.manual_seed(0)
    plain, fitted = Blocks(), Blocks()
    fitted.load_state_dict(plain.state_dict())
    return plain, fitted, torch.randn(4, 256, 16)


def reading(seen: list[float]) -> Any:
    return lambda _module, _args, output: seen.append(output.detach().sum().item())


def test_a_hook_that_was_there_before_runs_in_every_step() -> None:
    plain, fitted, batches = pair()
    seen: dict[str, list[float]] = {"plain": [], "fitted": []}
    for name, model in (("plain", plain), ("fitted", fitted)):
        model.one.register_forward_hook(reading(seen[name]))
    memfit.fit(fitted, batches[0], 0.95, time_limit=1, progress=False)
    assert not seen["fitted"]  # planning runs the model, not its hooks
    plan = memfit.plan_of(fitted)
    assert plan is not None
    assert set(plan.regions) == {"one", "two"}
    assert losses_of(fitted, batches) == losses_of(plain, batches)
    assert seen["fitted"] == seen["plain"]


def doubled(_module: nn.Module, _args: Any, output: torch.Tensor) -> torch.Tensor:
    return output * 2


def printing(_module: nn.Module, _args: Any, output: torch.Tensor) -> None:
    print(output.shape)


def squared(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
    loss: torch.Tensor = model(batch).square().mean()
    return loss


KEPT: list[torch.Tensor] = []


def keeping(_module: nn.Module, _args: Any, output: torch.Tensor) -> None:
    KEPT.append(output.detach().square())


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("hook", [doubled, keeping])
def test_memory_of_hooks_is_counted_and_nothing_of_their_run_remains(hook: Any, one_thread: None) -> None:
    _, fitted, batches = pair()
    for part in (fitted.one, fitted.two):
        part.register_forward_hook(hook)
    memfit.fit(fitted, batches[0], "smallest", loss=squared, time_limit=1, progress=False, remember=False)
    assert not KEPT
    plan = memfit.plan_of(fitted)
    assert plan is not None
    assert plan.external_bytes > 0

    def step() -> None:
        squared(fitted, batches[0]).backward()

    step()
    fitted.zero_grad()
    KEPT.clear()
    measured = measure_peak(step, resident=[fitted, batches[0]]).peak_bytes
    KEPT.clear()
    assert measured <= plan.peak_bytes
    assert measured > plan.peak_bytes - plan.external_bytes


def test_hooks_whose_memory_is_not_counted_are_named(capsys: pytest.CaptureFixture[str]) -> None:
    """One that prints is not run to plan."""
    _, fitted, batches = pair()
    fitted.one.register_forward_hook(printing)
    with pytest.warns(UserWarning, match=r"Blocks has hooks.*\(printing \(capture/test_hooks.py:\d+\)\).*not counted"):
        memfit.fit(fitted, batches[0], 0.95, time_limit=1, progress=False)
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize("kind", ["forward", "forward_pre", "full_backward"])
def test_a_hook_that_comes_later_changes_what_it_changes_in_the_eager_run(kind: str) -> None:
    hooks = {
        "forward": lambda _module, _args, output: output * 1.5,
        "forward_pre": lambda _module, args: (args[0] * 1.5,),
        "full_backward": lambda _module, gradients, _given: tuple(each * 2 for each in gradients),
    }
    plain, fitted, batches = pair()
    memfit.fit(fitted, batches[0], 0.95, time_limit=1, progress=False)
    assert losses_of(fitted, batches) == losses_of(plain, batches)
    for model in (plain, fitted):
        getattr(model.two, f"register_{kind}_hook")(hooks[kind])
    with pytest.warns(UserWarning, match="region by region: .*'two' has the hook <lambda>"):
        later = losses_of(fitted, batches)
    assert later == losses_of(plain, batches)


def test_hooks_of_torch_are_followed() -> None:
    plain, fitted, batches = pair()
    for model in (plain, fitted):
        torch.manual_seed(1)
        torch.nn.utils.spectral_norm(model.one[0])
    memfit.fit(fitted, batches[0], 0.95, time_limit=1, progress=False)
    plan = memfit.plan_of(fitted)
    assert plan is not None
    assert not plan.regions
    assert losses_of(fitted, batches) == losses_of(plain, batches)


def test_where_nothing_can_be_planned_around_a_hook_it_is_named() -> None:
    model = nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 4))
    for part in model:
        part.register_forward_hook(lambda *_: None)
    with pytest.raises(memfit.MemfitError, match="the module '0' has the hook <lambda>"):
        memfit.fit(model, torch.randn(8, 16), "smallest", progress=False)


def test_planning_in_the_loop_does_not_run_hooks_of_parameters_or_what_is_before_the_model() -> None:
    _, fitted, batches = pair()
    before = nn.Linear(16, 16)
    memfit.fit(fitted, batches[0], 0.95, time_limit=1, progress=False)
    ran: list[str] = []
    fitted.two.register_forward_hook(lambda *_: ran.append("forward"))
    for each in fitted.parameters():
        each.register_post_accumulate_grad_hook(lambda _: ran.append("parameter"))
    with pytest.warns(UserWarning, match="region by region"):
        output = fitted(before(batches[0]))
    assert ran == ["forward"]
    assert before.weight.grad is None
    output.sum().backward()
    assert ran == ["forward"] + ["parameter"] * 12
    assert before.weight.grad is not None


def test_a_model_that_does_not_run_without_a_hook_is_refused_with_its_name() -> None:
    _, fitted, batches = pair()
    fitted.two.register_forward_pre_hook(lambda _module, args: (args[0][:, :16],))
    fitted.one.append(nn.Linear(16, 32))
    with pytest.raises(memfit.CaptureError, match="cannot be run to plan it: without the hook <lambda>"):
        memfit.fit(fitted, batches[0], 0.95, time_limit=1, progress=False)
