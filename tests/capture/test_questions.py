"""Questions about the values of arguments: answered in a trace, asked again before every call."""

import copy
import warnings
from collections.abc import Callable

import pytest
import torch
from torch import nn

import memfit
from memfit.errors import CaptureError

pytestmark = pytest.mark.usefixtures("one_thread")
Rule = Callable[[torch.Tensor, torch.Tensor], bool]


class Asking(nn.Module):
    """Takes a shorter way for some masks, as libraries do."""

    def __init__(self, asks: Rule) -> None:
        super().__init__()
        self.asks = asks
        self.first, self.second = nn.Linear(16, 64), nn.Linear(64, 16)

    def forward(self, rows: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        hidden = torch.tanh(self.first(rows))
        if not self.asks(mask, hidden):
            hidden = hidden * mask.unsqueeze(-1) * 0.5
        return self.second(hidden).square().mean()


def all_of_it(mask: torch.Tensor, _hidden: torch.Tensor) -> bool:
    return bool(mask.all())


def kept_rows(mask: torch.Tensor, _hidden: torch.Tensor) -> bool:
    return bool((mask.float().mean(-1, keepdim=True) > 0.9).all())


def with_a_constant(mask: torch.Tensor, _hidden: torch.Tensor) -> bool:
    return bool((mask.sum() >= torch.tensor(60)).item())


def shifted_before(mask: torch.Tensor, _hidden: torch.Tensor) -> bool:
    """As T5 shifts its labels, which are new memory that is written into."""
    shifted = mask.new_zeros(mask.shape)
    shifted[..., 1:] = mask[..., :-1].clone()
    return bool(mask.all())


def view_written_before(mask: torch.Tensor, _hidden: torch.Tensor) -> bool:
    mine = mask.clone()
    mine.view(-1)[0] = 1
    return bool(mine[1:].all())


def longest(mask: torch.Tensor, _hidden: torch.Tensor) -> bool:
    return int(mask.sum(-1).max()) == 8


def of_the_weights(mask: torch.Tensor, hidden: torch.Tensor) -> bool:
    return bool((hidden > 100).any() | mask.any())


def written_before(mask: torch.Tensor, _hidden: torch.Tensor) -> bool:
    mine = mask.clone()
    mine[0] = 1
    return bool(mine.all())


FULL = torch.ones(8, 8, dtype=torch.int64)
PADDED = FULL.tril()


def trained(model: nn.Module, masks: list[torch.Tensor]) -> list[torch.Tensor]:
    seen = []
    for seed, mask in enumerate(masks):
        torch.manual_seed(seed)
        model.zero_grad()
        loss = model(torch.randn(8, 8, 16), mask)
        loss.backward()
        seen += [loss.detach(), *(each.grad.clone() for each in model.parameters() if each.grad is not None)]
    return seen


@pytest.mark.parametrize("asks", [all_of_it, kept_rows, with_a_constant, shifted_before])
def test_an_answer_is_kept_and_another_one_is_another_call(asks):
    torch.manual_seed(0)
    plain = Asking(asks)
    masks = [FULL, PADDED, FULL, FULL, PADDED, PADDED]
    fitted = memfit.fit(copy.deepcopy(plain), (torch.randn(8, 8, 16), FULL), 0.9, progress=False, remember=False)
    assert not memfit.plan_of(fitted).regions
    assert all(map(torch.equal, trained(plain, masks), trained(fitted, masks)))
    assert memfit.captures_of(fitted).count == 2


@pytest.mark.parametrize("asks", [longest, of_the_weights, written_before, view_written_before])
def test_numbers_weights_and_what_was_written_into_are_not_asked(asks):
    with pytest.raises(CaptureError, match="asks for the value of a tensor"):
        memfit.plan(Asking(asks), (torch.randn(8, 8, 16), FULL), budget=0.2, progress=False)


def test_who_cannot_afford_another_answer_is_told_which():
    class Padding(Asking):
        def forward(self, rows, mask):
            return super().forward(rows if mask.all() else torch.cat([rows] * 64), torch.ones(1, 8))

    model, rows = Padding(all_of_it), torch.randn(8, 8, 16)
    memfit.fit(model, (rows, FULL), "smallest", progress=False, remember=False)
    with pytest.raises(memfit.InfeasibleBudget, match=r"asks about the values of 1 \(.*\) was True and is False"):
        model(rows, PADDED)


def test_answers_that_flip_from_call_to_call_are_two_captures_and_no_more():
    torch.manual_seed(0)
    model, rows = Asking(all_of_it), torch.randn(8, 8, 16)
    memfit.fit(model, (rows, FULL), 1.0, progress=False, remember=False)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for step in range(8):
            model(rows, PADDED if step % 2 else FULL).backward()
    assert memfit.captures_of(model).count == 2


def test_more_questions_than_a_call_may_have_are_refused():
    model = Asking(lambda mask, _hidden: all(bool((mask.sum() > count).item()) for count in range(8)))
    with pytest.raises(CaptureError, match="asks for the value of a tensor"):
        memfit.plan(model, (torch.randn(8, 8, 16), FULL), budget=0.2, progress=False)


def test_layers_that_ask_the_same_ask_once():
    model = Asking(lambda mask, _hidden: all(bool(mask.all()) for _ in range(8)))
    memfit.fit(model, (torch.randn(8, 8, 16), FULL), 1.0, progress=False, remember=False)
    assert not memfit.plan_of(model).regions
