"""The measured step around regions."""

from memfit.ir import Phase
from memfit.plan.regions import Stretch
from memfit.regions.whole import _lowest

FORWARD = (0, Phase.FORWARD)


def run_of(*live_bytes: int, running: tuple[int, Phase] | None = FORWARD) -> list[Stretch]:
    return [Stretch(live_bytes=each, waiting={}, running=running) for each in live_bytes]


def test_a_release_that_one_run_did_not_see_is_seen_by_another() -> None:
    lowest = _lowest([run_of(10, 30, 25, 15), run_of(10, 20, 25, 25), run_of(10, 20, 15, 15)])
    assert [each.live_bytes for each in lowest] == [10, 20, 15, 15]


def test_runs_that_went_another_way_are_taken_whole() -> None:
    assert _lowest([run_of(10, 40), run_of(20, 30, running=None)]) == run_of(20, 30, running=None)
