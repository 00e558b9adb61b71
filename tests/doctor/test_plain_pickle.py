"""Pickles of plain containers are read; of everything else nothing is loaded, and it is named."""

import collections
import os
import pickle
import struct

import pytest

from memfit.doctor.plain_pickle import load_plain
from memfit.errors import InvalidFile

PLAIN = {"segments": [{"address": 2**47, "frames": ({"line": 3},), "x": None, "y": 0.5}], "text": "é", "flags": [True]}


@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
def test_plain_containers_are_read_in_every_protocol(protocol):
    assert load_plain(pickle.dumps(PLAIN, protocol)) == PLAIN


class Evil:
    def __init__(self, path):
        self._path = path

    def __reduce__(self):
        return os.mkdir, (str(self._path),)


@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
def test_a_function_is_named_and_not_called(tmp_path, protocol):
    target = tmp_path / "made"
    with pytest.raises(InvalidFile, match=r"mkdir.*nothing of it was loaded"):
        load_plain(pickle.dumps({"segments": [Evil(target)]}, protocol))
    assert not target.exists()


@pytest.mark.parametrize(
    "thing", [collections.OrderedDict(a=1), {1, 2}.__class__, len, ValueError("no"), range(3)], ids=repr
)
def test_every_class_is_refused_even_a_harmless_one(thing):
    content = pickle.dumps([thing])
    with pytest.raises(InvalidFile, match="names "):
        load_plain(content)


@pytest.mark.parametrize(
    "content",
    [
        b"\x80\x04cos\nsystem\n.",
        b"\x80\x04\x8c\x02os\x8c\x06system\x93.",  # by names on the stack
        b"\x80\x02\x82\x01.",  # from the registry of extensions
        b"\x80\x04]\x8c\x01xb.",  # a state for a list
        b"\x80\x04]\x8c\x01x\x85R.",  # a list that is called
        b"\x80\x04Pkept outside\n.",
        b"\x80\x04(ios\nsystem\n.",
    ],
    ids=range(7),
)
def test_programs_written_by_hand_do_nothing(content):
    with pytest.raises(InvalidFile):
        load_plain(content)


def test_a_pickle_that_is_cut_off_is_told_wherever_it_ends():
    content = pickle.dumps(PLAIN)
    for end in range(2, len(content) - 1):
        with pytest.raises(InvalidFile, match="damaged or cut off"):
            load_plain(content[:end])


def test_a_place_in_the_memo_far_away_is_damage():
    with pytest.raises(InvalidFile, match="damaged"):
        load_plain(b"\x80\x04j" + struct.pack("<I", 2**31) + b".")
