"""What the parts of a model are called with in one eager step."""

import dataclasses

import torch
from torch import nn

from memfit.capture.calls import noted_calls
from memfit.capture.sample import Sample
from memfit.capture.spilled import SpillFile
from memfit.measure.peak import measure_peak


@dataclasses.dataclass
class Pair:
    used: torch.Tensor
    unused: torch.Tensor


class Part(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor, *, scale: float = 1.0) -> Pair:
        return Pair(self.linear(x) * scale, self.linear(x))


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.part = Part()
        self.blocks = nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 4)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.part(x, scale=2.0).used
        for block in self.blocks:
            x = block(x)
        return x.relu_().sum()


def noted(model: nn.Module, batch: torch.Tensor):
    return noted_calls(model, Sample.of(batch))


def test_every_part_is_noted_by_its_path():
    calls = noted(Model(), torch.randn(3, 4))
    assert {path: len(each) for path, each in calls.items()} == {
        "": 1,
        "part": 1,
        "part.linear": 2,
        "blocks.0": 1,
        "blocks.1": 1,
    }


def test_arguments_are_those_of_the_call_without_their_past():
    batch = torch.randn(3, 4)
    calls = noted(Model(), batch)
    assert torch.equal(calls["part"][0].sample.args[0], batch)
    assert calls["part"][0].sample.kwargs == {"scale": 2.0}
    (given,) = calls["blocks.0"][0].sample.args
    assert given.is_leaf
    assert given.requires_grad


def test_results_are_followed_into_dataclasses():
    (call,) = noted(Model(), torch.randn(3, 4))["part"]
    assert (call.returned, call.reached) == (2, 1)


def test_what_is_overwritten_is_noted():
    calls = noted(Model(), torch.randn(3, 4))
    assert {path: calls[path][0].overwritten for path in ("blocks.0", "blocks.1")} == {
        "blocks.0": False,
        "blocks.1": True,
    }


def test_the_model_stays_as_it_is():
    model = Model()
    state = torch.get_rng_state()
    noted(model, torch.randn(3, 4))
    state_after = torch.get_rng_state()
    assert all(parameter.grad is None for parameter in model.parameters())
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())
    torch.set_rng_state(state)
    torch.randn(3, 4)
    assert torch.equal(torch.get_rng_state(), state_after)


def test_what_is_noted_in_a_file_is_the_same_and_not_in_memory():
    model, batch = nn.Sequential(*(nn.Linear(64, 64) for _ in range(12)), nn.ReLU(inplace=True)), torch.randn(512, 64)
    found = []
    before = measure_peak(lambda: found.append(noted(model, batch)), resident=[model, batch])
    in_memory = found.pop()
    with SpillFile() as file:
        seen = measure_peak(
            lambda: found.append(noted_calls(model, Sample.of(batch), file=file)), resident=[model, batch]
        )
        for path, calls in found[0].items():
            for call, other in zip(calls, in_memory[path], strict=True):
                assert dataclasses.replace(call, given=other.given) == other
                if not call.overwritten:
                    assert all(map(torch.equal, call.sample.tensors(), other.sample.tensors()))
    assert seen.peak_bytes < before.peak_bytes - 8 * batch.nbytes


def test_only_the_parts_that_are_asked_for_are_noted_and_others_may_keep_nothing_meanwhile():
    model = Model()
    batch = torch.randn(3, 4)
    calls = noted_calls(model, Sample.of(batch), of=[model.part, model.blocks[1]], checkpointed=[model.part])
    assert set(calls) == {"part", "blocks.1"}
    (call,) = calls["part"]
    assert (call.returned, call.reached, call.with_gradients) == (2, 1, True)
    assert "forward" not in model.part.__dict__
