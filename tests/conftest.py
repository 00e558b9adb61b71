"""What every test needs: its own cost cache, a fixed seed, and imports of torchvision that go through."""

import gc
import os
import tempfile
from collections.abc import Iterator

import pytest
import torch
from hypothesis import settings
from torch import nn

from memfit.cli.torchvision_repair import prepare

settings.register_profile("memfit", deadline=None, derandomize=True, max_examples=50)
settings.load_profile("memfit")


def pytest_configure(config: pytest.Config) -> None:
    if not hasattr(config, "workerinput"):  # the one process that starts the others, which find the folder here
        folder = tempfile.TemporaryDirectory(prefix="memfit-jobs-")
        config.add_cleanup(folder.cleanup)
        os.environ["MEMFIT_TEST_JOBS"] = folder.name


LONG = (  # files that take a fifth of the fast tests' time: CI runs them by themselves, `make long-tests`
    "benchmarks/test_duel.py",
    "benchmarks/test_frontier_case.py",
    "benchmarks/test_peers.py",
    "cli/test_cli_regions.py",
    "distributed/test_distributed_checkpoint.py",
    "integrations/test_accelerate.py",
    "integrations/test_lightning.py",
    "measure/test_optimizer_peak.py",
    "regions/test_regions_planner.py",
    "step/test_choose.py",
    "step/test_update_cost.py",
    "test_docs.py",
    "test_faults.py",
    "test_threads.py",
)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.path.as_posix().endswith(LONG):
            item.add_marker(pytest.mark.long)


def pytest_sessionstart() -> None:
    prepare()  # before the first import of torchvision or transformers
    os.environ["HF_HUB_OFFLINE"] = "1"  # no test fetches anything


def pytest_collection_finish() -> None:
    """What was imported stays: looking through it at every collection takes a quarter of the tests' time."""
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="session", autouse=True)
def _own_cost_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MEMFIT_CACHE_DIR", str(tmp_path_factory.mktemp("cost_cache")))
        yield


@pytest.fixture(scope="module")
def one_thread() -> Iterator[None]:
    """Small steps are faster on one thread; what runs on several is tested elsewhere."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module", autouse=True)
def _one_thread_in_these_folders(request: pytest.FixtureRequest) -> None:
    if {"cli", "benchmarks"} & {*request.path.parts}:
        request.getfixturevalue("one_thread")


@pytest.fixture(autouse=True)
def _fixed_seed() -> None:
    torch.manual_seed(0)


@pytest.fixture(scope="session")
def tiny_gpt2() -> type[nn.Module]:
    """Makes a GPT-2 of one layer; the import takes a second, so only the tests that need it pay."""
    from transformers import GPT2Config, GPT2LMHeadModel

    class TinyGPT2(GPT2LMHeadModel):
        def __init__(self) -> None:
            config = GPT2Config(
                n_layer=1,
                n_embd=32,
                n_head=2,
                vocab_size=100,
                n_positions=64,
                bos_token_id=0,
                eos_token_id=0,
                use_cache=False,
                attn_implementation="eager",
            )
            config.loss_type = "ForCausalLM"
            super().__init__(config)

    return TinyGPT2
