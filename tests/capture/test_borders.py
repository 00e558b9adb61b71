"""Which sums of gradients would be others if a part added those of its own uses first."""

import pytest
import torch

from memfit.capture.borders import (
    all_uses,
    are_added_otherwise,
    edges_of,
    places_of_inner,
    reaches_otherwise,
    uses_inside,
    uses_of,
)


def part(given: torch.Tensor) -> torch.Tensor:
    return given.sin() + given.cos()


def sums_differ(given: torch.Tensor, *, before: bool = False, after: bool = False, twice: bool = True) -> bool:
    result = given.exp() if before else torch.zeros(3)
    inside = part(given) if twice else given.sin()
    uses = uses_inside(edges_of([inside]), edges_of([given]))
    result = result + inside + (given.tan() if after else 0)
    return are_added_otherwise(uses, all_uses(edges_of([result])))


@pytest.mark.parametrize("is_leaf", [False, True])
def test_later_uses_outside_of_what_is_used_twice_inside_count(is_leaf: bool) -> None:
    leaf = torch.ones(3, requires_grad=True)
    given = leaf if is_leaf else leaf * 2
    assert sums_differ(given, after=True)
    assert not sums_differ(given)
    assert not sums_differ(given, before=True)  # whose gradients come last anyway
    assert not sums_differ(given, before=True, after=True, twice=False)


def test_a_result_that_the_loss_uses_too_is_used_later() -> None:
    given = torch.ones(3, requires_grad=True) * 2
    inside = part(given)
    uses = uses_inside(edges_of([inside]), edges_of([given]))
    assert are_added_otherwise(uses, all_uses(edges_of([inside, given])))


def test_uses_are_counted_by_place_in_the_order_in_which_they_were_recorded() -> None:
    one, two = torch.ones(3, requires_grad=True), torch.ones(3, requires_grad=True)
    first, second, third = uses_of([part(one) * two], [one, 7, two])
    assert (len(first), second, len(third)) == (2, (), 1)
    assert first[0] < first[1] < third[0]


def test_outputs_that_others_are_computed_from_are_inner() -> None:
    feature = torch.ones(3, requires_grad=True) * 2
    assert places_of_inner([feature.sin(), torch.ones(3), feature]) == [2]
    assert places_of_inner([feature.sin(), feature.cos()]) == []


def test_a_view_that_was_taken_without_gradients_has_no_edge() -> None:
    given = torch.ones(3, requires_grad=True) * 2
    with torch.no_grad():
        view = given[:2]
    assert view.requires_grad
    assert edges_of([view, given]) == edges_of([given])


def test_gradients_of_some_outputs_may_reach_other_results_of_a_function() -> None:
    class TwoResults(torch.autograd.Function):
        @staticmethod
        def forward(ctx, given):
            return given * 2, given * 3

        @staticmethod
        def backward(ctx, *gradients):
            raise AssertionError

    leaf = torch.ones(3, requires_grad=True)
    one, other = TwoResults.apply(leaf)
    node = one.grad_fn
    assert not reaches_otherwise(node, [one, one.sin(), leaf * 2])
    assert not reaches_otherwise(node, [one + other, (one * other).cos()])
    assert reaches_otherwise(node, [one, other])
    assert reaches_otherwise(node, [one + other, other.exp()])
