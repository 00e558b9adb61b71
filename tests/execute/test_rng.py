import pytest
import torch

from memfit.execute.rng import generator_state, replaying

CPU = torch.device("cpu")


def test_a_replay_draws_the_same_numbers_and_leaves_the_generator_where_it_was():
    state = generator_state(CPU)
    first = torch.empty(100).bernoulli_(0.5)
    torch.rand(7)
    before = torch.get_rng_state()
    again = replaying(torch.ops.aten.bernoulli.p, CPU)(state, torch.empty(100), 0.5)
    assert torch.equal(again, first)
    assert torch.equal(torch.get_rng_state(), before)


def test_a_state_can_be_replayed_more_than_once():
    state = generator_state(CPU)
    replay = replaying(torch.ops.aten.rand.default, CPU)
    assert torch.equal(replay(state, [5]), replay(state, [5]))


def test_a_replay_that_fails_puts_the_generator_back():
    state = generator_state(CPU)
    torch.rand(3)
    before = torch.get_rng_state()
    with pytest.raises(RuntimeError):
        replaying(torch.ops.aten.bernoulli.p, CPU)(state, torch.empty(3), 2.0)
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_device_has_its_own_generator():
    device = torch.device("cuda", 0)
    state, host = generator_state(device), torch.get_rng_state()
    first = torch.rand(5, device=device)
    before = torch.cuda.get_rng_state(device)
    again = replaying(torch.ops.aten.rand.default, device)(state, [5], device=device)
    assert torch.equal(again, first)
    assert torch.equal(torch.cuda.get_rng_state(device), before)
    assert torch.equal(torch.get_rng_state(), host)
