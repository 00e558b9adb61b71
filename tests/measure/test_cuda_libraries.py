"""What CUDA's libraries take beside tensors: handles by capability, temporaries of attention, ranges."""

import pytest
import torch
from torch import nn

import memfit
from memfit.capture.cuda.capability import find_capability
from memfit.capture.cuda.operators import operators_of
from memfit.capture.lower import lower
from memfit.capture.sample import Sample
from memfit.capture.trace import traced
from memfit.measure.cuda_libraries import ConvolutionSettings, library_bytes
from memfit.measure.devices import find_device

MIB = 2**20


def found(model, batch, capability=(8, 0)):
    with operators_of(find_capability(capability)), traced(model, Sample.of(batch), runs=False) as joint:
        graph = lower(joint)
    return graph, library_bytes(graph, capability)


@pytest.mark.parametrize(("capability", "size_bytes"), [((8, 6), 8_519_680), ((9, 0), 32 * MIB), ((10, 0), 32 * MIB)])
def test_each_thread_of_a_step_has_a_workspace_of_cublas(capability, size_bytes):
    graph, libraries = found(nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)), torch.randn(4, 8), capability)
    assert list(libraries.handles.values()) == [size_bytes] * 2
    assert [graph.operations[each].phase for each in libraries.handles] == ["forward", "backward"]


def test_what_multiplies_nothing_has_none():
    _, libraries = found(nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU()), torch.randn(2, 3, 8, 8))
    assert not libraries.handles


def most(layer, batch, capability=(8, 0), **settings):
    graph, libraries = found(layer, batch, capability)
    libraries = library_bytes(graph, capability, ConvolutionSettings(**settings))
    assert set(libraries.lowest) == {0}
    places = [place for place, each in enumerate(graph.operations) if "convolution" in each.target]
    return [libraries.highest[place] for place in places]  # forward, backward


IMAGES = torch.randn(2, 16, 8, 8)
MOVED = 2 * IMAGES.nbytes  # input and output


def test_convolutions_are_a_range_and_those_of_single_channels_are_not():
    assert most(nn.Conv2d(16, 16, 3, padding=1), IMAGES) == [int(4.3 * MOVED), MOVED]
    assert most(nn.Conv2d(16, 16, 3, padding=1, groups=16), IMAGES) == [0, 0]


@pytest.mark.parametrize("options", [{"kernel_size": 1}, {"kernel_size": 3, "padding": 2, "dilation": 2}])
def test_what_cannot_be_transformed_is_copied_at_most_and_for_tensor_cores_alone(options):
    layer = nn.Conv2d(16, 16, **options)
    assert most(layer, IMAGES) == [MOVED, MOVED]
    assert most(layer, IMAGES, (7, 5)) == [0, 0]
    assert most(layer, IMAGES, allows_tf32=False) == [0, 0]
    assert most(layer.half(), IMAGES.half(), (7, 5)) == [MOVED // 2, MOVED // 2]
    assert most(nn.Conv2d(16, 6, 1), IMAGES) == [0, 0]  # channels come in fours


def test_channels_last_are_not_copied():
    images = IMAGES.to(memory_format=torch.channels_last)
    assert most(nn.Conv2d(16, 16, 3, padding=1).to(memory_format=torch.channels_last), images) == [0, 0]


def test_a_search_takes_all_that_is_free():
    assert min(most(nn.Conv2d(16, 16, 1), IMAGES, (6, 0), searches=True)) > 2**60


def test_a_search_is_bounded_by_the_device(monkeypatch):
    monkeypatch.setattr(torch.backends.cudnn, "benchmark", True)
    model = nn.Sequential(nn.Conv2d(3, 16, 3), nn.ReLU())
    estimate = memfit.estimate(model, torch.randn(2, 3, 8, 8), device="T4", progress=False)
    usable = find_device("T4").usable_bytes
    assert 0.99 * usable < estimate.highest.peak_bytes <= usable
    assert "tries" in estimate.highest.reason


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.project = nn.Linear(64, 192)

    def forward(self, values):
        query, key, value = self.project(values).unflatten(-1, (3, 2, 32)).permute(2, 0, 3, 1, 4)
        return nn.functional.scaled_dot_product_attention(query, key, value).sum()


def test_attention_adds_up_in_32_bits():
    _, libraries = found(Attention().bfloat16(), torch.randn(1, 100, 64).bfloat16())
    assert max(libraries.lowest) == 2 * 128 * (32 + 1) * 4
    _, efficient = found(Attention(), torch.randn(1, 100, 64))
    assert max(efficient.lowest) == 2 * 100 * 4


@pytest.fixture(scope="module")
def convolutions():
    layers = [layer for _ in range(3) for layer in (nn.Conv2d(16, 16, 3, padding=1), nn.ReLU())]
    model = nn.Sequential(nn.Conv2d(3, 16, 1), *layers)
    return memfit.estimate(model, torch.randn(16, 3, 64, 64), device="RTX 3090")


def test_an_estimate_with_convolutions_is_a_range(convolutions):
    assert convolutions.highest is not None
    assert convolutions.highest.peak_bytes > convolutions.peak_bytes
    assert convolutions.most_needed_bytes > convolutions.needed_bytes
    assert "cuDNN" in convolutions.to_dict()["highest"]["reason"]
    assert "depending on" in str(convolutions)


def test_whether_it_fits_is_yes_no_or_depends(convolutions):
    assert convolutions.verdict(convolutions.most_needed_bytes) == "yes"
    assert convolutions.verdict(convolutions.needed_bytes - 1) == "no"
    between = convolutions.needed_bytes
    assert convolutions.verdict(between).startswith("depends on the algorithms that cuDNN chooses")
    assert not convolutions.fits(between)


def test_without_convolutions_there_is_no_range():
    estimate = memfit.estimate(nn.Linear(64, 64), torch.randn(8, 64), device="H100-80GB")
    assert estimate.highest is None
    assert estimate.reserved.allocated_bytes > 2 * 32 * MIB
    assert estimate.by_kind()["workspace"] == 2 * 32 * MIB
