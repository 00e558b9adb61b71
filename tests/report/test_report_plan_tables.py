import pytest
from handmade_reports import FATES, fate, make_plan, printed

from memfit.plan.plan import Treatment
from memfit.report.plan_tables import print_plan


def test_everything_is_said():
    text = printed(print_plan, make_plan())
    for words in (
        "Net, training step with adamw, on cpu",
        "Sample x: float32[4, 4]",
        "12.00 MiB",
        "55% of the unplanned peak",
        "set by aten.convolution_backward.default",
        "+6.4%",
        "kept",
        "computed again",
        "replaced",
        "layers.0-1,3",
        "of it by bits",
    ):
        assert words in text, words
    assert "sent out" not in text  # a column without a size says nothing


def test_a_plan_that_keeps_everything_has_no_table_of_modules():
    text = printed(print_plan, make_plan(fates=FATES[:1]))
    assert "Activations" not in text
    assert "note: the unplanned step fits the budget" in text


@pytest.mark.parametrize("width", [40, 60, 80, 120, 200])
def test_no_line_is_wider_than_the_terminal_and_no_size_is_lost(width):
    plan = make_plan(fates=(*FATES, fate("a.very_long_name_of_a_module_that_does_not_fit", Treatment.KEPT)))
    text = printed(print_plan, plan, width=width)
    assert max(len(line.rstrip()) for line in text.splitlines()) <= width
    for words in ("12.00 MiB", "11.00 MiB", "20.00 MiB", "3.00 MiB"):
        assert words in text


def test_names_are_text_and_not_markup():
    text = printed(print_plan, make_plan(fates=(fate("[bold]a", Treatment.AGAIN),), model="[red]Net\x1b"))
    assert "[bold]a" in text
    assert "[red]Net?" in text
    assert "\x1b" not in text


def test_rows_and_depth_can_be_chosen():
    plan = make_plan(fates=tuple(fate(f"{name}.part", Treatment.AGAIN) for name in "abcdefgh"))
    assert "(6 others)" in printed(print_plan, plan, top=2)
    assert "a.part" not in printed(print_plan, plan, depth=1)
