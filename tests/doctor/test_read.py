"""Files of every form: read whole, or refused by name."""

import dataclasses
import gzip
import json
import pickle

import pytest
from recorded import as_snapshot
from recorded_training import FRAMES, training

from memfit.doctor.read import is_history, read_file, read_histories
from memfit.doctor.stacks import owner_of
from memfit.errors import InvalidFile, InvalidInput
from memfit.plan.allocator.settings import AllocatorSettings

COLUMNS = ["action", "address", "size", "stream", "frame"]


def compact(history):
    return {
        "name": history.name,
        "device": history.device,
        "settings": {},
        "columns": COLUMNS,
        "frames": list(history.frames),
        "events": [list(each) for each in history.events],
        "segments_at_end": [
            {
                "address": each.address,
                "total_size": each.size_bytes,
                "stream": each.stream,
                "kind": "small" if each.is_small else "large",
                "blocks": [list(block)[:3] for block in each.blocks],
            }
            for each in history.segments
        ],
    }


@pytest.mark.parametrize("settings", ["", "expandable_segments:True", "max_split_size_mb:64"])
def test_a_pickle_and_its_json_are_the_history_that_was_recorded(settings):
    history = training(settings)
    snapshot = as_snapshot(history)
    for content in (pickle.dumps(snapshot), json.dumps(snapshot).encode()):
        (found,) = read_histories(content, "recorded")
        assert [event[:4] for event in found.events] == [event[:4] for event in history.events]
        assert found.segments == history.segments
        assert found.settings == history.settings == AllocatorSettings.parse(settings)
        assert {found.frames[event.frame] for event in found.events} == set(FRAMES)


def test_columns_are_the_history_that_was_recorded():
    history = training()
    (found,) = read_histories(json.dumps(compact(history)).encode(), "x")
    assert found == history


@pytest.mark.parametrize(
    ("path", "line"),
    [
        ("/opt/pytorch/torch/nn/modules/linear.py", "app/train.py:9 in main"),
        ("/usr/lib/python3.11/contextlib.py", "app/train.py:9 in main"),
        ("/home/me/project/modules/block.py", "project/modules/block.py:4 in forward"),
        ("/home/me/torch/play.py", "me/torch/play.py:4 in forward"),
        ("C:\\work\\model\\block.py", "model/block.py:4 in forward"),
        (
            "/x/site-packages/transformers/models/gpt2/modeling_gpt2.py",
            "transformers/models/gpt2/modeling_gpt2.py:4 in forward",
        ),
    ],
)
def test_a_file_of_the_user_is_told_from_a_librarys(path, line):
    snapshot = as_snapshot(training())
    outer = {"filename": "/home/me/app/train.py", "line": 9, "name": "main"}
    snapshot["device_traces"][0][0]["frames"] = [{"filename": path, "line": 4, "name": "forward"}, outer]
    (found,) = read_histories(pickle.dumps(snapshot), "x")
    assert owner_of(found.frames[found.events[0].frame]).line == line


def test_packed_files_are_unpacked(tmp_path):
    path = tmp_path / "snapshot.pickle.gz"
    path.write_bytes(gzip.compress(pickle.dumps(as_snapshot(training()))))
    assert read_histories(read_file(path), "x")
    path.write_bytes(gzip.compress(pickle.dumps(as_snapshot(training())))[:-20])
    with pytest.raises(InvalidFile, match="cut off"):
        read_file(path)


def test_a_file_that_is_not_there_is_said(tmp_path):
    with pytest.raises(InvalidInput, match="cannot be read"):
        read_file(tmp_path / "none")


def test_several_devices_are_several_histories():
    one, other = training(), dataclasses.replace(training(), device=3)
    found = read_histories(pickle.dumps(as_snapshot(one, other)), "x")
    assert [each.device for each in found] == [0, 3]
    assert len(found[1].events) == len(other.events)


def test_a_list_of_segments_alone_is_a_history_without_events():
    (found,) = read_histories(pickle.dumps(as_snapshot(training())["segments"]), "x")
    assert not found.events
    assert found.reserved_at_end_bytes == training().reserved_at_end_bytes


def test_an_older_snapshot_with_blocks_of_another_form_is_read():
    snapshot = as_snapshot(training())
    del snapshot["allocator_settings"]
    for segment in snapshot["segments"]:
        for key in ("segment_pool_id", "is_expandable"):
            del segment[key]
        for block in segment["blocks"]:
            block["history"] = [{"addr": 0, "real_size": block.pop("requested_size"), "frames": block.pop("frames")}]
    (found,) = read_histories(pickle.dumps(snapshot), "x")
    assert found.segments == training().segments


def test_events_that_are_not_known_are_left_out():
    snapshot = as_snapshot(training())
    snapshot["device_traces"][0].insert(3, {"action": "snapshot", "addr": 0, "size": 0, "stream": 0, "frames": []})
    (found,) = read_histories(pickle.dumps(snapshot), "x")
    assert len(found.events) == len(training().events)


def broken(change):
    snapshot = as_snapshot(training())
    change(snapshot)
    return pickle.dumps(snapshot)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", "neither a pickle nor whole JSON"),
        (b"{", "neither a pickle nor whole JSON"),
        (b"[" * 100_000, "neither a pickle nor whole JSON"),
        (b"PK\x03\x04...", "as torch.save writes it"),
        (pickle.dumps({"a": 1}), "no list of segments"),
        (pickle.dumps(7), "no list of segments"),
        (pickle.dumps([1, 2, 3]), "no list of segments"),
        (b"[1, 2]", "no list of segments"),
        (pickle.dumps({"segments": [], "device_traces": [[]]}), "empty"),
        (pickle.dumps({"segments": [5], "device_traces": []}), "damaged"),
        (broken(lambda each: each["segments"][0].pop("address")), "damaged: KeyError"),
        (broken(lambda each: each["segments"][0].update(total_size=-1)), "damaged"),
        (broken(lambda each: each["segments"][0].update(total_size=512)), "the snapshot is damaged"),
        (broken(lambda each: each["device_traces"][0][0].update(size="9")), "damaged"),
        (broken(lambda each: each["device_traces"][0][0].update(frames=[3])), "damaged"),
        (broken(lambda each: each["allocator_settings"].update(max_split_size="a")), "settings cannot be read"),
        (json.dumps(compact(training()) | {"columns": ["size"]}).encode(), "columns"),
        (json.dumps(compact(training()) | {"events": [["alloc", 1, 2]]}).encode(), "damaged"),
        (json.dumps(compact(training()) | {"frames": []}).encode(), "damaged: ValueError: frame"),
    ],
)
def test_what_is_no_snapshot_is_refused_by_name(content, words):
    with pytest.raises(InvalidFile, match=words):
        read_histories(content, "x")


def test_a_history_is_told_from_the_text_of_a_message():
    assert is_history(pickle.dumps({}))
    assert is_history(b'  {"segments": []}')
    assert not is_history(b"torch.OutOfMemoryError: CUDA out of memory.")
