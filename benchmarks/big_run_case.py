"""One process of the big run: a few training steps of a Llama, plain or by `memfit.Step` under a limit.

    python -m benchmarks.big_run_case SIZE plain
    python -m benchmarks.big_run_case SIZE budgeted DIRECTORY

What it finds out is printed as lines of JSON, as it comes.
"""

import dataclasses
import functools
import hashlib
import json
import resource
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

import memfit
from benchmarks.big_run_watch import Clock, MemoryWatch, status_bytes
from memfit.cli.torchvision_repair import prepare
from memfit.units import parse_bytes

PLAIN, BUDGETED = "plain", "budgeted"
STEPS = 5
MARK = "big run: "
_LEARNING_RATE = 3e-4
_WORDS = 1000  # of the vocabulary that occur, so that there is something to learn


@dataclasses.dataclass(frozen=True, kw_only=True)
class Size:
    """A Llama, its batch, and the memory it is trained in."""

    hidden: int
    intermediate: int
    layers: int
    heads: int
    key_value_heads: int
    vocabulary: int
    sequences: int
    tokens: int  # a sequence
    budget: str  # of `memfit.Step`
    limit: str  # of the process, beyond what it has after its imports
    plain_needs: str  # that must be free for the plain steps


SIZES = {
    "1.1B": Size(
        hidden=2048,
        intermediate=5632,
        layers=22,
        heads=32,
        key_value_heads=4,
        vocabulary=32000,
        sequences=1,
        tokens=512,
        budget="8GiB",
        limit="10GiB",
        plain_needs="18GiB",
    ),
    "1.1B, 4 x 512": Size(
        hidden=2048,
        intermediate=5632,
        layers=22,
        heads=32,
        key_value_heads=4,
        vocabulary=32000,
        sequences=4,
        tokens=512,
        budget="8GiB",
        limit="10GiB",
        plain_needs="21GiB",
    ),
    "small": Size(
        hidden=256,
        intermediate=704,
        layers=4,
        heads=8,
        key_value_heads=2,
        vocabulary=2000,
        sequences=1,
        tokens=64,
        budget="32MiB",
        limit="640MiB",  # most of it is for the process: threads, captured graphs
        plain_needs="1GiB",
    ),
}


def main(name: str, kind: str, directory: Path | None = None) -> None:
    prepare()
    import transformers  # noqa: F401  (before memory is counted)

    size = SIZES[name]
    rest_bytes = status_bytes("VmData")
    if kind == BUDGETED:
        limit_bytes = rest_bytes + parse_bytes(size.limit)
        resource.setrlimit(resource.RLIMIT_DATA, (limit_bytes, limit_bytes))
    else:
        Path("/proc/self/oom_score_adj").write_text("1000")  # if memory runs out, others are not to pay for this
    with MemoryWatch() as memory:
        start = time.perf_counter()
        model, batches = new_model(size), new_batches(size)
        tell(
            parameters=sum(each.numel() for each in model.parameters()),
            rest_bytes=rest_bytes,
            build_s=time.perf_counter() - start,
            build_bytes=memory.take_peak_bytes() - rest_bytes,
        )
        training = Training(model, batches, memory, rest_bytes)
        if kind == PLAIN:
            training.plain()
        else:
            training.budgeted(size.budget, directory)
        tell(resident_peak_bytes=status_bytes("VmHWM"), parameter_digest=digest_of(model))


class Training:
    """A few steps, each told of when it is done."""

    def __init__(self, model: nn.Module, batches: Sequence[torch.Tensor], memory: MemoryWatch, rest_bytes: int) -> None:
        self._model = model
        self._batches = batches
        self._memory = memory
        self._rest_bytes = rest_bytes
        self._optimizer = torch.optim.AdamW(model.parameters(), lr=_LEARNING_RATE)
        self._clock = Clock()

    def plain(self) -> None:
        """As everybody writes it."""

        def step(batch: torch.Tensor) -> torch.Tensor:
            self._optimizer.zero_grad()
            value = loss(self._model, batch)
            value.backward()
            with self._clock.part("update"):
                self._optimizer.step()
            return value.detach()

        self._run(step)

    def budgeted(self, budget: str, directory: Path | None) -> None:
        """By `memfit.Step`, which chooses how inside its budget."""
        with self._clock.watching():
            start = time.perf_counter()
            step = memfit.Step(self._model, self._optimizer, loss, budget=budget, directory=directory)
            choice = step.choose(self._batches[0])
            tell(
                planning_s=time.perf_counter() - start,
                planning_bytes=self._memory.take_peak_bytes() - self._rest_bytes,
                predicted_bytes=choice.peak_bytes,
                predicted_step_s=choice.step_us / 1e6,
                times_measured=choice.times_measured,
                choice=choice.explain().splitlines(),
            )
            self._run(step)
            step.close()

    def _run(self, step: Callable[[torch.Tensor], torch.Tensor]) -> None:
        for batch in self._batches:
            value, spent = self._clock.timed(functools.partial(step, batch))
            peak_bytes = self._memory.take_peak_bytes() - self._rest_bytes
            tell(step={"loss": value.item(), "peak_bytes": peak_bytes, **dataclasses.asdict(spent)})


def loss(model: nn.Module, words: torch.Tensor) -> torch.Tensor:
    value: torch.Tensor = model(input_ids=words, labels=words).loss
    return value


def new_model(size: Size) -> nn.Module:
    """Random weights, the same ones in every process."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=size.hidden,
        intermediate_size=size.intermediate,
        num_hidden_layers=size.layers,
        num_attention_heads=size.heads,
        num_key_value_heads=size.key_value_heads,
        vocab_size=size.vocabulary,
        tie_word_embeddings=False,
        use_cache=False,
    )
    model: nn.Module = LlamaForCausalLM(config)
    return model.train()


def new_batches(size: Size) -> list[torch.Tensor]:
    words = torch.Generator().manual_seed(1)
    return [torch.randint(_WORDS, (size.sequences, size.tokens), generator=words) for _ in range(STEPS)]


def digest_of(model: nn.Module) -> str:
    """Of the bits of all parameters."""
    digest = hashlib.sha256()
    for parameter in model.parameters():
        bits: Any = parameter.detach().view(-1).numpy()
        digest.update(bits)
    return digest.hexdigest()


def tell(**found: Any) -> None:
    print(MARK + json.dumps(found), flush=True)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], *map(Path, sys.argv[3:]))
