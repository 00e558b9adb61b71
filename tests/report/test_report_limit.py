import pytest
from handmade_estimate import make_estimate

from memfit.errors import InvalidBudget
from memfit.report.limit import Limit


def test_a_device_has_less_than_its_memory():
    limit = Limit.of("a100-40gb")
    assert limit.label == "A100-40GB"
    assert limit.is_device
    assert limit.usable_bytes < 40 * 2**30


@pytest.mark.parametrize(("peak_bytes", "fits"), [(1023, True), (1024, True), (1025, False)])
def test_a_step_fits_up_to_the_last_byte(peak_bytes, fits):
    limit = Limit.of("1KiB")
    assert limit.fits(peak_bytes) is fits
    assert limit.verdict(peak_bytes).startswith("FITS" if fits else "DOES NOT FIT")


def test_a_limit_agrees_with_the_estimate():
    estimate = make_estimate(["a", "b"])
    for device in ("T4", "1KiB", str(estimate.peak_bytes), str(estimate.peak_bytes - 1)):
        assert Limit.of(device).fits(estimate.peak_bytes) is estimate.fits(device)


@pytest.mark.parametrize("device", ["", "no such", "12 parsecs", "0"])
def test_what_is_no_device_is_refused(device):
    with pytest.raises(InvalidBudget):
        Limit.of(device)
