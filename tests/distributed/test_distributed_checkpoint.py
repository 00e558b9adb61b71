"""Checkpoints from one process to two and back."""

import json
from pathlib import Path

import pytest
import torch
from sharded_job import fast_job
from sharded_models import Blocks, trained

import memfit
from memfit.distributed import load_sharded, save_sharded


def test_two_ranks_go_on_from_what_one_process_saved() -> None:
    folder, ranks = fast_job()
    expected = torch.load(folder / "one.pt", weights_only=True)
    for rank, found in enumerate(ranks):
        assert found["checkpoint"]["extra"] == {"epoch": 3}
        assert found["checkpoint"]["lr"] == 0.01
        assert found["checkpoint"]["updates"] == 2
        loaded = torch.load(folder / f"loaded{rank}.pt", weights_only=True)
        assert all(torch.equal(*each) for each in zip(expected, loaded, strict=True))


def test_two_ranks_go_on_bit_for_bit_from_what_they_saved() -> None:
    assert all(found["checkpoint"]["resumed"] for found in fast_job()[1])


def test_dropout_and_a_schedule_go_on_bit_for_bit() -> None:
    assert all(found["together"]["goes on"]["bits"] for found in fast_job()[1])


def test_a_rank_that_cannot_write_stops_all_and_the_old_checkpoint_stays() -> None:
    first, last = (found["together"]["fails"] for found in fast_job()[1])
    assert last["writing"] == "OSError: [Errno 28] No space left on device"
    assert first["writing"].startswith("RankError: another rank could not write its part")
    assert first["index"] == "OSError: [Errno 28] No space left on device"
    assert last["index"].startswith("RankError: another rank could not write the index")
    assert first["first is there"] == last["first is there"] == "{'saved': 1}"


def test_a_rank_that_cannot_read_stops_all() -> None:
    first, last = (found["together"]["fails"] for found in fast_job()[1])
    assert last["reading"] == "InvalidFile: damaged here"
    assert first["reading"].startswith("RankError: another rank could not read the checkpoint")


def test_one_process_goes_on_from_what_two_ranks_saved() -> None:
    folder, _ = fast_job()
    model = Blocks()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.5)
    assert load_sharded(folder / "from_two", model, optimizer) == {"epoch": 7}
    trained(model, 2, lambda batch: batch, optimizer)
    end = torch.load(folder / "end0.pt", weights_only=True)
    for one, two in zip(model.parameters(), end, strict=True):
        assert float((one - two).detach().abs().max()) <= 1e-6


def test_nothing_on_disk_is_pickled() -> None:
    folder, _ = fast_job()
    names = {path.suffix for path in (folder / "from_two").rglob("*") if path.is_file()}
    assert names == {".json", ".safetensors"}
    assert json.loads((folder / "from_two" / "checkpoint.json").read_text())["ranks"] == 2


def test_a_new_checkpoint_takes_the_place_of_the_old_one(tmp_path: Path) -> None:
    model = Blocks()
    for number in range(2):
        save_sharded(tmp_path, model, extra={"number": number})
    assert load_sharded(tmp_path, model) == {"number": 1}
    assert len([each for each in tmp_path.iterdir() if each.is_dir()]) == 1


def test_another_model_is_refused_and_nothing_changed(tmp_path: Path) -> None:
    save_sharded(tmp_path, Blocks())
    other = Blocks(width=16)
    before = [each.clone() for each in other.parameters()]
    with pytest.raises(memfit.InvalidFile, match="has shape"):
        load_sharded(tmp_path, other)
    assert all(torch.equal(*each) for each in zip(before, other.parameters(), strict=True))


def test_a_folder_that_holds_no_checkpoint_is_refused(tmp_path: Path) -> None:
    with pytest.raises(memfit.InvalidFile, match="is not a checkpoint"):
        load_sharded(tmp_path, Blocks())
    (tmp_path / "checkpoint.json").write_text('{"format": "memfit.sharded", "version": 2}')
    with pytest.raises(memfit.InvalidFile, match="version 2"):
        load_sharded(tmp_path, Blocks())


def test_tensors_have_no_place_among_the_extras(tmp_path: Path) -> None:
    with pytest.raises(memfit.InvalidInput, match="holds a tensor"):
        save_sharded(tmp_path, Blocks(), extra={"weights": torch.ones(2)})


def test_folders_of_others_stay(tmp_path: Path) -> None:
    (tmp_path / "20240101").mkdir()
    model = Blocks()
    save_sharded(tmp_path, model)
    save_sharded(tmp_path, model)
    assert (tmp_path / "20240101").is_dir()


def test_saving_before_the_first_update_changes_nothing(tmp_path: Path) -> None:
    ends = []
    for saves in (False, True):
        torch.manual_seed(0)
        model = Blocks()
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, weight_decay=0.1)
        if saves:
            save_sharded(tmp_path, model, optimizer)
            assert not optimizer.state
            load_sharded(tmp_path, model, optimizer)
            assert not optimizer.state
        trained(model, 2, lambda batch: batch, optimizer)
        ends.append([each.detach() for each in model.parameters()])
    assert all(torch.equal(*each) for each in zip(*ends, strict=True))


def test_parameters_that_were_never_updated_have_no_state_afterwards(tmp_path: Path) -> None:
    class WithUnused(Blocks):
        def __init__(self) -> None:
            super().__init__()
            self.unused = torch.nn.Linear(4, 4)

    model, other = WithUnused(), WithUnused()
    optimizer, its = (torch.optim.AdamW(each.parameters(), lr=0.1) for each in (model, other))
    trained(model, 1, lambda batch: batch, optimizer)
    save_sharded(tmp_path, model, optimizer)
    load_sharded(tmp_path, other, its)
    assert other.unused.weight not in its.state
    assert len(its.state) == len(optimizer.state)
    ends = []
    for each, own in ((model, optimizer), (other, its)):
        torch.manual_seed(3)
        trained(each, 2, lambda batch: batch, own)
        ends.append([parameter.detach() for parameter in each.parameters()])
    assert all(torch.equal(*each) for each in zip(*ends, strict=True))
