"""A choice and the expansion it comes to say the same."""

from handmade import Case, Features, trainings
from hypothesis import given, settings

from memfit.plan.choice import choice_of
from memfit.plan.expand import Expander
from memfit.plan.greedy import greedy


@settings(max_examples=40)
@given(trainings(Features(in_place=True, alternatives=True, most_layers=6)))
def test_the_choice_of_an_expansion_comes_to_the_same(case: Case) -> None:
    problem = case.problem()
    expander = Expander(problem)
    for share in (0.4, 0.7, 1.0):
        expansion = greedy(problem, int(share * greedy(problem, 2**60).peak_bytes))
        choice = choice_of(problem, expansion)
        again = expander.expand(choice.wanted, choice.made_early, choice.chosen)
        assert again.peak_bytes == expansion.peak_bytes
        assert abs(again.extra_us - expansion.extra_us) < 1e-6
