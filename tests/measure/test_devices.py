import pytest

from memfit.capture.cuda.capability import find_capability
from memfit.errors import InvalidBudget
from memfit.measure.devices import DEVICES, Device, find_device, usable_bytes


@pytest.mark.parametrize(
    ("written", "name"),
    [
        ("T4", "T4"),
        ("t4", "T4"),
        ("a100-40gb", "A100-40GB"),
        ("A100 80GB", "A100-80GB"),
        ("rtx_4090", "RTX-4090"),
        ("RTX 3090", "RTX-3090"),
        ("h100", "H100-80GB"),
        ("A10", "A10"),
        ("L4", "L4"),
        ("4090", "RTX-4090"),
        ("NVIDIA GeForce RTX 3090", "RTX-3090"),
        ("NVIDIA A100 80GB", "A100-80GB"),
        ("NVIDIA A100-SXM4-40GB", "A100-40GB"),
        ("NVIDIA A100 80GB PCIe", "A100-80GB"),
        ("NVIDIA H100 80GB HBM3", "H100-80GB"),
        ("Tesla V100-SXM2-16GB", "V100-16GB"),
        ("NVIDIA RTX A6000", "RTX-A6000"),
        ("NVIDIA GeForce GTX 1080 Ti", "GTX-1080-Ti"),
        ("4070", "RTX-4070"),
        ("4070 Ti SUPER", "RTX-4070-Ti-SUPER"),
        ("RTX 4090 24GB", "RTX-4090"),
        ("RTX 3080 10 GB", "RTX-3080"),
    ],
)
def test_a_device_is_found_in_any_spelling(written: str, name: str) -> None:
    assert find_device(written).name == name


def test_an_ambiguous_name_is_answered_with_what_it_could_be() -> None:
    with pytest.raises(InvalidBudget, match=r"device 'a100' could be A100-40GB or A100-80GB; known are T4"):
        find_device("a100")


@pytest.mark.parametrize("unknown", ["B300", "cuda", "A100-60GB", "40GB-A100", "RTX 4090 16GB", "RTX 4090 Laptop"])
def test_an_unknown_name_is_answered_with_the_known_ones(unknown: str) -> None:
    with pytest.raises(
        InvalidBudget,
        match=r"is not known( \(did you mean .*\?\))?; known are T4 \(15.00 GiB\), .*; or give its memory",
    ):
        find_device(unknown)


@pytest.mark.parametrize(
    ("slip", "meant"), [("A100-40G8", "A100-40GB"), ("h1OO-80gb", "H100-80GB"), ("RTX-4099", "RTX-4090")]
)
def test_a_slip_of_the_pen_is_answered_with_what_was_meant(slip: str, meant: str) -> None:
    with pytest.raises(InvalidBudget, match=rf"did you mean [^?]*{meant}"):
        find_device(slip)


@pytest.mark.parametrize(
    ("bare", "near"),
    [("4096", "RTX-4090"), ("4O90", "RTX-4090"), ("4090 Ti", "RTX-4090"), ("3085", "RTX-3080"), ("h30", "H200")],
)
def test_a_bare_number_is_a_model_and_no_bytes(bare: str, near: str) -> None:
    assert usable_bytes("4090") == find_device("RTX 4090").usable_bytes
    with pytest.raises(InvalidBudget, match=rf"did you mean [^?]*{near}"):
        usable_bytes(bare)


@pytest.mark.parametrize("empty", ["", " ", "-"])
def test_an_empty_name_is_refused(empty: str) -> None:
    with pytest.raises(InvalidBudget):
        usable_bytes(empty)


@pytest.mark.parametrize(
    ("given", "expected"),
    [("24GiB", 24 * 2**30), ("500MB", 500 * 10**6), (4096, 4096), ("4294967296", 2**32), (1e9, 10**9)],
)
def test_bytes_are_taken_as_they_are(given: str | float, expected: int) -> None:
    assert usable_bytes(given) == expected


@pytest.mark.parametrize("given", [" 24GiB", ".5GiB"])
def test_a_budget_reads_the_same_here_as_anywhere(given: str) -> None:
    from memfit.units import parse_bytes

    assert usable_bytes(given) == parse_bytes(given)


@pytest.mark.parametrize("wrong", ["24 apples", 0, -1, True, float("nan")])
def test_bytes_that_cannot_be_meant_are_refused(wrong: str | float) -> None:
    with pytest.raises(InvalidBudget):
        usable_bytes(wrong)


def test_a_named_device_keeps_something_for_its_driver() -> None:
    device = find_device("T4")
    assert usable_bytes("T4") == device.memory_bytes - device.reserved_bytes < device.memory_bytes


@pytest.mark.parametrize("device", DEVICES, ids=lambda device: device.name)
def test_every_profile_makes_sense(device: Device) -> None:
    assert device.usable_bytes > 5 * 2**30
    assert device.tflops_half >= device.tflops_fp32 > 0
    assert device.bandwidth_gb_per_s > 100
    assert device.granularity_bytes == 512


@pytest.mark.parametrize("device", DEVICES, ids=lambda device: device.name)
def test_every_profile_is_found_by_its_name_and_has_operators(device: Device) -> None:
    assert find_device(device.name) is device
    assert device.capability is not None
    assert find_capability(device.capability).version == device.capability


def test_names_are_unique() -> None:
    assert len({device.name for device in DEVICES}) == len(DEVICES)
