from pathlib import Path
from typing import Any

import pytest
import torch

import memfit
from memfit.measure import probe
from memfit.measure.cost import CostCache, OperatorCost
from memfit.measure.probe import kernel_settings, measured_costs
from memfit.measure.signature import decode, encode

aten = torch.ops.aten
X = torch.zeros(64, 64)
RELU = encode(aten.relu.default, (X,), {})
ADD = encode(aten.add.Tensor, (X, X), {})
REJECTED = encode(aten.mm.default, (torch.zeros(2, 3), torch.zeros(2, 3)), {})


@pytest.fixture
def cache(tmp_path: Path) -> CostCache:
    return CostCache("cpu", tmp_path)


def cost_of(cache: CostCache, operator: Any, *args: Any, **kwargs: Any) -> OperatorCost:
    signature = encode(operator, args, kwargs)
    return measured_costs([signature], device="cpu", cache=cache)[signature]


def convolution(groups: int = 1) -> tuple[Any, ...]:
    weight = torch.zeros(16, 16 // groups, 3, 3)
    return torch.zeros(4, 16, 32, 32), weight, None, [1, 1], [1, 1], [1, 1], False, [0, 0], groups


def test_a_pointwise_operator_makes_its_output_and_nothing_else(cache: CostCache) -> None:
    assert cost_of(cache, aten.relu.default, X) == OperatorCost(workspace_bytes=0, output_bytes=(X.nbytes,))


def test_a_convolution_takes_a_workspace_beside_its_output(cache: CostCache) -> None:
    cost = cost_of(cache, aten.convolution.default, *convolution())
    assert cost.output_bytes == (4 * 16 * 32 * 32 * 4,)
    assert cost.workspace_bytes > 0


def test_the_workspace_is_what_a_real_call_rises_by(cache: CostCache) -> None:
    from memfit.measure.peak import measure_peak

    args = convolution()
    aten.convolution.default(*args)
    kept: list[torch.Tensor] = []
    rise_bytes = measure_peak(lambda: kept.append(aten.convolution.default(*args)), resident=[]).peak_bytes
    cost = cost_of(cache, aten.convolution.default, *args)
    assert cost.workspace_bytes + sum(cost.output_bytes) == rise_bytes


def test_several_outputs_are_told_in_their_order(cache: CostCache) -> None:
    cost = cost_of(cache, aten.max_pool2d_with_indices.default, torch.zeros(2, 3, 8, 8), [2, 2])
    assert cost.output_bytes == (2 * 3 * 4 * 4 * 4, 2 * 3 * 4 * 4 * 8)


def test_a_view_makes_no_storage(cache: CostCache) -> None:
    assert cost_of(cache, aten.t.default, X).output_bytes == ()


def test_the_recurrent_layer_keeps_the_workspace_of_its_backward(cache: CostCache) -> None:
    weights = (torch.zeros(32, 8), torch.zeros(32, 8), torch.zeros(32), torch.zeros(32))
    states = (torch.zeros(2, 8), torch.zeros(2, 8))
    flags = (False, [], 2, 8, 1, True, False, False, True)
    cost = cost_of(cache, aten.mkldnn_rnn_layer.default, torch.zeros(5, 2, 8), *weights, *states, *flags)
    assert len(cost.output_bytes) == 4
    assert cost.output_bytes[-1] > 0


def test_times_are_measured_only_when_asked_for(cache: CostCache) -> None:
    assert cost_of(cache, aten.relu.default, X).time_us is None
    timed = measured_costs([RELU], device="cpu", cache=cache, timed=True)[RELU]
    assert timed.time_us is not None
    assert timed.time_us > 0


def test_a_timed_cost_answers_an_untimed_question(cache: CostCache, monkeypatch: pytest.MonkeyPatch) -> None:
    timed = OperatorCost(workspace_bytes=1, output_bytes=(2,), time_us=3.0)
    cache.save({RELU: timed})
    monkeypatch.setattr(probe._Probe, "run", _never)
    assert measured_costs([RELU], device="cpu", cache=cache) == {RELU: timed}


def _never(*_: object, **__: object) -> None:
    pytest.fail("measured again")


def test_a_known_cost_is_not_measured_again(cache: CostCache, monkeypatch: pytest.MonkeyPatch) -> None:
    first = measured_costs([RELU, ADD], device="cpu", cache=cache)
    monkeypatch.setattr(probe._Probe, "run", _never)
    assert measured_costs([ADD, RELU], device="cpu", cache=cache) == first


def test_equal_signatures_are_measured_once(cache: CostCache, monkeypatch: pytest.MonkeyPatch) -> None:
    probed: list[str] = []
    run = probe._Probe.run

    def counting(self: probe._Probe, *, timed: bool) -> None:
        probed.append(self.signature)
        run(self, timed=timed)

    monkeypatch.setattr(probe._Probe, "run", counting)
    measured_costs([RELU, ADD, RELU], device="cpu", cache=cache)
    assert probed == [RELU, ADD]


def test_a_damaged_cache_is_rebuilt(cache: CostCache, caplog: pytest.LogCaptureFixture) -> None:
    cache.path.write_text('{"format": "memfit.costs", "ver')
    found = measured_costs([RELU], device="cpu", cache=cache)
    assert found[RELU].output_bytes == (X.nbytes,)
    assert cache.load() == found


def test_interrupted_measuring_keeps_what_was_measured(cache: CostCache) -> None:
    def interrupt(done: int, _total: int) -> None:
        if done == 1:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        measured_costs([RELU, ADD], device="cpu", cache=cache, progress=interrupt)
    assert list(cache.load()) == [RELU]


def test_progress_is_told_for_what_has_to_be_measured(cache: CostCache) -> None:
    measured_costs([RELU], device="cpu", cache=cache)
    told: list[tuple[int, int]] = []
    measured_costs([RELU, ADD, REJECTED], device="cpu", cache=cache, progress=lambda *each: told.append(each))
    assert told == [(1, 2), (2, 2)]


def test_an_operator_that_rejects_its_arguments_is_left_out(cache: CostCache, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("INFO"):
        assert list(measured_costs([REJECTED, RELU], device="cpu", cache=cache)) == [RELU]
    assert "not measured (RuntimeError" in caplog.text


def test_an_operator_this_torch_does_not_have_is_left_out(cache: CostCache) -> None:
    foreign = '["aten.no_such_operator.default",[],{}]'
    assert list(measured_costs([foreign, RELU], device="cpu", cache=cache)) == [RELU]


def test_an_opaque_argument_of_unknown_size_is_not_passed_on(
    cache: CostCache, caplog: pytest.LogCaptureFixture
) -> None:
    opaque = encode(aten.relu.default, (torch.zeros(0, dtype=torch.uint8),), {})
    with caplog.at_level("INFO"):
        assert measured_costs([opaque], device="cpu", cache=cache) == {}
    assert "opaque" in caplog.text


def test_what_is_too_big_for_this_machine_is_bounded_and_not_kept(cache: CostCache) -> None:
    with torch.device("meta"):
        huge = torch.empty(2**20, 2**24)
    signature = encode(aten.relu.default, (huge,), {}).replace("meta", "cpu")
    cost = measured_costs([signature], device="cpu", cache=cache)[signature]
    assert cost.is_bound
    assert cache.load() == {}


def test_no_probe_takes_more_than_the_room(cache: CostCache, monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = [2**n for n in range(8, 20)]
    calls = {encode(aten.sigmoid.default, (torch.zeros(size),), {}): 4 * size for size in sizes}
    room_bytes = 2 * 4 * 2**14
    ran: list[str] = []
    run = probe._Probe.run
    monkeypatch.setattr(probe._Probe, "run", lambda self, **each: ran.append(self.signature) or run(self, **each))
    found = measured_costs(calls, device="cpu", cache=cache, room_bytes=room_bytes, made_bytes=calls)
    assert ran == [each for each, size_bytes in calls.items() if 2 * size_bytes <= room_bytes]
    assert {each for each, cost in found.items() if cost.is_bound} == calls.keys() - set(ran)
    assert {cost.workspace_bytes for cost in found.values()} == {0}  # as of all that were seen


def test_where_nothing_fits_a_call_on_fewer_rows_is_learned_from(cache: CostCache) -> None:
    matrices = torch.zeros(512, 64), torch.zeros(64, 64)
    call = encode(aten.mm.default, matrices, {})
    made_bytes = {call: 512 * 64 * 4}
    room_bytes = 2 * made_bytes[call]  # not for a workspace as big as all of it beside
    found = measured_costs([call], device="cpu", cache=cache, room_bytes=room_bytes, made_bytes=made_bytes)
    assert not found[call].is_bound
    assert list(cache.load()) == [call]


def test_what_a_call_would_take_is_told_by_the_same_call_on_fewer_rows(cache: CostCache) -> None:
    """A convolution in float64 unfolds its input: nine times as much with nine elements in the kernel."""
    images = torch.zeros(8, 4, 16, 16, dtype=torch.float64)
    calls = [
        encode(
            aten.convolution.default,
            (images, torch.zeros(4, 4, size, size).double(), None, [1, 1], [size // 2] * 2, [1, 1], False, [0, 0], 1),
            {},
        )
        for size in (1, 3)
    ]
    small, big = measured_costs(calls, device="cpu", cache=cache).values()
    assert big.workspace_bytes > 4 * small.workspace_bytes
    room_bytes = 3 * images.nbytes + big.workspace_bytes // 12
    empty = CostCache("empty", cache.path.parent)
    made_bytes = dict.fromkeys(calls, images.nbytes)
    found = measured_costs(calls, device="cpu", cache=empty, room_bytes=room_bytes, made_bytes=made_bytes)
    assert found[calls[1]].is_bound
    assert not found[calls[0]].is_bound
    assert found[calls[1]].workspace_bytes == pytest.approx(big.workspace_bytes, rel=0.3)


def test_convolutions_of_other_groups_do_not_say_what_one_takes(cache: CostCache) -> None:
    """On small images one of as many groups as channels takes many times what it reads, where channels come last."""
    last = {"memory_format": torch.channels_last}

    def backward(channels: int, groups: int) -> str:
        gradient, image = torch.zeros(2, channels, 4, 4).to(**last), torch.zeros(2, channels, 4, 4).to(**last)
        weight = torch.zeros(channels, channels // groups, 3, 3)
        more = ([channels], [1, 1], [1, 1], [1, 1], False, [0, 0], groups, [True, True, True])
        return encode(aten.convolution_backward.default, (gradient, image, weight, *more), {})

    by_channel, whole = backward(256, 256), backward(256, 1)
    costs = {
        by_channel: OperatorCost(workspace_bytes=64 * 2**20, output_bytes=(2**15, 2**12, 2**10)),
        backward(128, 1): OperatorCost(workspace_bytes=2**20, output_bytes=(2**14, 2**19, 2**9)),
    }
    cache.save(costs)
    found = measured_costs([*costs, whole], device="cpu", cache=cache, room_bytes=2**26)
    assert not found[whole].is_bound
    nothing_fits = measured_costs([*costs, backward(512, 1)], device="cpu", cache=cache, room_bytes=2**10)
    assert nothing_fits[backward(512, 1)].is_bound
    assert nothing_fits[backward(512, 1)].workspace_bytes < 2**26  # as those of one group


def test_an_operator_of_which_nothing_fits_takes_as_much_as_it_reads_and_makes(cache: CostCache) -> None:
    call = encode(aten.relu.default, (torch.zeros(2**10),), {})
    cost = measured_costs([call], device="cpu", cache=cache, room_bytes=2**10, made_bytes={call: 2**12})[call]
    assert cost.is_bound
    assert cost.workspace_bytes == 2**12 + 2**12


def test_arguments_that_are_only_read_share_their_memory() -> None:
    _, args, _ = decode(ADD, shares_memory=True)
    assert args[0].data_ptr() == args[1].data_ptr()
    _, args, _ = decode(encode(aten.add_.Tensor, (X, X), {}), shares_memory=True)
    assert args[0].data_ptr() != args[1].data_ptr()


@pytest.mark.parametrize(
    "signature",
    [encode(aten.bernoulli.p, (X, 0.5), {}), encode(aten.native_dropout.default, (X, 0.5, True), {}), REJECTED],
    ids=["bernoulli", "dropout", "rejected"],
)
def test_the_generator_is_where_it_was(cache: CostCache, signature: str) -> None:
    before = torch.get_rng_state()
    measured_costs([signature], device="cpu", cache=cache, timed=True)
    assert torch.equal(torch.get_rng_state(), before)


def test_grad_mode_is_as_it_was(cache: CostCache) -> None:
    measured_costs([RELU, REJECTED], device="cpu", cache=cache)
    assert torch.is_grad_enabled()


def test_nothing_is_written_when_nothing_was_measured(cache: CostCache) -> None:
    measured_costs([REJECTED], device="cpu", cache=cache)
    assert not cache.path.exists()


@pytest.mark.parametrize("around", [memfit.without_weights, lambda: torch.autocast("cpu", torch.bfloat16)])
def test_what_the_caller_is_in_the_middle_of_does_not_change_a_cost(around) -> None:
    call = encode(torch.ops.aten.mm.default, (torch.zeros(8, 8), torch.zeros(8, 8)), {})
    with around():
        (cost,) = measured_costs([call], device="cpu", cache=CostCache("around")).values()
    assert cost.output_bytes == (8 * 8 * 4,)


def test_settings_of_kernels_can_be_read_whichever_way_they_were_set():
    before, own = kernel_settings(), torch.backends.cuda.matmul.fp32_precision
    torch.backends.cuda.matmul.fp32_precision = "tf32"
    try:
        assert kernel_settings() != before
    finally:
        torch.backends.cuda.matmul.fp32_precision = own
    assert kernel_settings() == before
