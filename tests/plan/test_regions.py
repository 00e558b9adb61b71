"""Footprints against sums by hand, choices against trying everything."""

import itertools
import random

import pytest
from handmade_plan import SIZE, chain, program_dropping

from memfit.ir import Phase
from memfit.plan.regions import (
    Footprint,
    Option,
    Stretch,
    Surroundings,
    choose,
    footprint,
    kept_bytes,
    shared_storages,
    smallest,
    whole_peak_bytes,
    without_worse,
)

WEIGHT = SIZE // 10


def footprint_of(case, *dropped, around=None):
    unplanned = program_dropping(case)
    return footprint(
        case.graph,
        program_dropping(case, *dropped),
        unplanned,
        workspace_bytes=case.costs.workspace_bytes,
        around=around or Surroundings(there=shared_storages(case.graph), left=shared_storages(case.graph)),
    )


def index_of(case, name):
    return [each.name for each in case.graph.storages].index(name)


# Footprints: x -> a -> b -> c, each operation saves what it reads, c is returned.


def test_the_unplanned_program_keeps_what_it_keeps():
    case = chain("a", "b", "c")
    own = footprint_of(case)
    assert own.kept_bytes == 0
    assert own.forward_bytes == 3 * SIZE
    assert kept_bytes(case.graph, program_dropping(case)) == 2 * SIZE


def test_what_is_dropped_is_not_kept_and_takes_its_room_again_in_the_backward_pass():
    case = chain("a", "b", "c")
    own = footprint_of(case, "b")
    assert own.kept_bytes == -SIZE
    # b again, then its gradient and a weight's beside it, which the unplanned step has too.
    assert own.backward_bytes == footprint_of(case).backward_bytes == SIZE + WEIGHT


def test_dropping_everything_costs_its_forward_in_the_backward_pass():
    case = chain("a", "b", "c")
    own = footprint_of(case, "a", "b")
    assert own.kept_bytes == -2 * SIZE
    assert own.forward_bytes == 2 * SIZE  # one value and the next


def test_an_argument_that_nobody_else_holds_dies_in_the_backward_pass():
    case = chain("a", "b")
    x = index_of(case, "x")
    held = footprint_of(case)
    own = footprint_of(case, around=Surroundings(there=shared_storages(case.graph), left=frozenset()))
    assert x in shared_storages(case.graph)
    assert own.backward_bytes <= held.backward_bytes


def test_an_argument_that_only_the_plan_reads_is_kept_by_it():
    case = chain("a", "b")
    x = index_of(case, "x")
    first = next(op for op in case.graph.operations if op.name == "back_a")
    assert x in first.inputs  # the unplanned backward pass reads it, so that it is not new
    assert footprint_of(case, around=Surroundings()).kept_bytes == 0


# Choices


def random_case(seed):
    """Regions with a few options each, in a step that goes forward through all and back."""
    dice = random.Random(seed)
    options = []
    for _ in range(dice.randint(1, 4)):
        one = [Option(footprint=Footprint(forward_bytes=50, kept_bytes=0, backward_bytes=60), extra_us=0.0)]
        for _ in range(dice.randint(0, 4)):
            own = Footprint(
                forward_bytes=dice.randint(20, 60), kept_bytes=-dice.randint(0, 90), backward_bytes=dice.randint(0, 99)
            )
            one.append(Option(footprint=own, extra_us=float(dice.randint(0, 20))))
        options.append(one)
    count = len(options)
    stretches = []
    for region in range(count):
        before = dict.fromkeys(range(region), 1)
        stretches.append(
            Stretch(live_bytes=100 * region + dice.randint(0, 30), waiting=before, running=(region, Phase.FORWARD))
        )
        stretches.append(Stretch(live_bytes=100 * region + 100, waiting=before | {region: 1}))
        stretches.append(Stretch(live_bytes=100 * region + 110, waiting=before, running=(region, Phase.BACKWARD)))
    return options, [dice.randint(1, 2) for _ in options], stretches


def all_choices(options):
    return itertools.product(*(range(len(each)) for each in options))


def extra_us(options, calls, choice):
    return sum(calls[region] * options[region][number].extra_us for region, number in enumerate(choice))


@pytest.mark.parametrize("seed", range(30))
def test_the_choice_is_the_fastest_under_the_budget(seed):
    options, calls, stretches = random_case(seed)
    peaks = {choice: whole_peak_bytes(options, stretches, choice) for choice in all_choices(options)}
    for budget in sorted({*peaks.values(), min(peaks.values()) - 1})[::3]:
        fitting = [extra_us(options, calls, choice) for choice, peak in peaks.items() if peak <= budget]
        chosen = choose(options, calls, stretches, budget)
        assert (chosen is None) == (not fitting)
        if chosen is not None:
            assert peaks[chosen] <= budget
            assert extra_us(options, calls, chosen) == pytest.approx(min(fitting))


@pytest.mark.parametrize("seed", range(30))
def test_the_smallest_is_the_lowest_of_all(seed):
    options, _, stretches = random_case(seed)
    peaks = [whole_peak_bytes(options, stretches, choice) for choice in all_choices(options)]
    assert whole_peak_bytes(options, stretches, smallest(options, stretches)) == min(peaks)


def test_options_that_are_worse_in_everything_are_left_out():
    def option(extra_us, kept_bytes):
        return Option(
            footprint=Footprint(forward_bytes=1, kept_bytes=kept_bytes, backward_bytes=1), extra_us=float(extra_us)
        )

    assert without_worse([option(0, 0), option(2, 0), option(3, -5), option(3, -5), option(4, -4)]) == [0, 2]
