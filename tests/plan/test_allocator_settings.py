"""What PYTORCH_CUDA_ALLOC_CONF says, read as torch reads it."""

import pytest

from memfit.errors import InvalidInput
from memfit.plan.allocator.settings import AllocatorSettings

MIB = 2**20


def test_nothing_is_the_defaults():
    assert AllocatorSettings.parse("") == AllocatorSettings() == AllocatorSettings.parse(" , ")
    assert str(AllocatorSettings()) == ""


def test_options_are_read_with_spaces_and_without_effect_ones_are_left_out():
    settings = AllocatorSettings.parse(
        " expandable_segments: True , max_split_size_mb:64,garbage_collection_threshold:0.8,"
        "pinned_num_register_threads:8,backend:native,per_process_memory_fraction:0.5"
    )
    assert settings.expandable_segments
    assert settings.max_split_bytes == 64 * MIB
    assert settings.garbage_collection_threshold == 0.8
    assert settings.memory_fraction == 0.5


def test_a_later_value_replaces_an_earlier_one():
    assert AllocatorSettings.parse("max_split_size_mb:64,max_split_size_mb:128").max_split_bytes == 128 * MIB


def test_divisions_are_one_number_or_by_size():
    assert AllocatorSettings.parse("roundup_power2_divisions:4").roundup_power2_divisions == (4,) * 16
    by_size = AllocatorSettings.parse("roundup_power2_divisions:[256:1,512:2,1024:4,>:8]").roundup_power2_divisions
    assert by_size[:9] == (1,) * 9  # up to 256 MiB
    assert by_size[9] == 2
    assert by_size[10:] == (8,) * 6  # ">" begins at the last size that is named, as in torch


@pytest.mark.parametrize(
    "text",
    [
        "expandable_segments:True",
        "max_split_size_mb:64,garbage_collection_threshold:0.8",
        "roundup_power2_divisions:[256:1,512:2,>:8]",
        "large_segment_size_mb:40,max_non_split_rounding_mb:32,per_process_memory_fraction:0.25",
    ],
)
def test_settings_are_written_so_that_they_are_read_again(text):
    settings = AllocatorSettings.parse(text)
    assert AllocatorSettings.parse(str(settings)) == settings


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("max_split_size", "written name:value"),
        ("max_split_size_mb:20", "more than 20"),
        ("max_split_size_mb:many", "cannot be used"),
        ("expandable_segments:1", "True or False"),
        ("garbage_collection_threshold:2", "above 0 and below 1"),
        ("roundup_power2_divisions:3", "power of two"),
        ("roundup_power2_divisions:[256:1", "does not end"),
        ("backend:cudaMallocAsync", "not simulated"),
        ("max_spilt_size_mb:64", "not known"),
    ],
)
def test_what_cannot_be_meant_is_said(text, words):
    with pytest.raises(InvalidInput, match=words):
        AllocatorSettings.parse(text)
