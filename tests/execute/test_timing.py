import contextlib
import math
import time

import pytest
import torch
from captured_step import captured
from torch import nn
from twins import MODELS, ConvNet, TiedLanguageModel, assert_same

import memfit
from memfit.capture.lower import lower
from memfit.capture.sample import Sample
from memfit.capture.trace import traced
from memfit.errors import InvalidModel
from memfit.execute import timing
from memfit.execute.timed_step import TimedStep
from memfit.execute.timing import OperationTimes, SeenTimes, operation_times, with_estimates
from memfit.ir import ACCUMULATE, Compute, Graph, Kind, Operation, Phase, Program, Storage
from memfit.measure.cost import CostCache
from memfit.measure.roofline import roofline_times
from memfit.ops.registry import find_lean_operator


def timed(model, sample, techniques=(), **options):
    joint, graph, model, example = captured(model, sample, techniques)
    return graph, operation_times(joint.graph_module, graph, model, example, **{"steps": 2, **options})


@pytest.mark.parametrize("name", MODELS)
def test_every_operation_has_a_time_and_one_in_place_where_it_may_overwrite(name):
    make_model, make_batch = MODELS[name]
    graph, times = timed(make_model(), make_batch(), ("lean",))
    operations = (*graph.operations, *graph.alternatives)
    assert list(times.fresh_us) == [each.name for each in operations]
    assert list(times.in_place_us) == [each.name for each in operations if each.may_overwrite is not None]
    uncertain = {each.name for each in graph.alternatives if not find_lean_operator(each.technique).certain}
    assert all(0 < each < math.inf for name, each in times.fresh_us.items() if name not in uncertain)
    assert all(0 < each < math.inf for name, each in times.in_place_us.items() if name not in uncertain)


@pytest.mark.parametrize("name", MODELS)
def test_nothing_of_the_model_or_the_generator_changes(name):
    make_model, make_batch = MODELS[name]
    model, batch = make_model(), make_batch()
    model(batch).sum().backward()
    before = [each.clone() for each in tensors_of(model, batch)]
    modes = [module.training for module in model.modules()]
    timed(model, batch, ("lean",))
    assert_same(before, tensors_of(model, batch))
    assert [module.training for module in model.modules()] == modes


def tensors_of(model, batch):
    gradients = [parameter.grad for parameter in model.parameters()]
    return [*model.parameters(), *gradients, *model.buffers(), batch, torch.get_rng_state()]


def test_equal_calls_are_given_equal_times():
    graph, times = timed(nn.Sequential(*(nn.Linear(8, 8) for _ in range(3))), torch.randn(4, 8))
    by_signature = {}
    for operation in graph.operations:
        by_signature.setdefault(operation.signature, set()).add(times.fresh_us[operation.name])
    assert len(by_signature) < len(graph.operations)
    assert all(len(each) == 1 for each in by_signature.values())


def test_much_work_takes_longer_than_little():
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.randn(512, 512))

        def forward(self, values):
            return (values @ self.weight)[:1, :1].neg()

    graph, times = timed(Model(), torch.randn(512, 512), steps=3)
    time_of = {operation.target: times.fresh_us[operation.name] for operation in graph.operations}
    assert time_of["aten.mm.default"] > 5 * time_of["aten.neg.default"]


def test_the_times_of_a_step_are_no_more_than_the_time_of_running_it():
    model, batch = nn.Sequential(nn.Linear(256, 256), nn.ReLU(inplace=True), nn.Linear(256, 8)), torch.randn(512, 256)
    start = time.perf_counter()
    graph, times = timed(model, batch, steps=1)
    assert 0 < times.step_us(graph) < (time.perf_counter() - start) * 1e6


def test_the_gradient_of_a_tied_parameter_takes_time_to_add_up():
    graph, times = timed(TiedLanguageModel(), torch.randint(50, (3, 7)))
    accumulations = [each.name for each in graph.operations if each.target == ACCUMULATE]
    assert accumulations
    assert all(times.fresh_us[each] > 0 for each in accumulations)


class FakeStep:
    """Steps that take as long as they are told."""

    def __init__(self, *step_us):
        self.left = list(step_us)
        self.with_extras = []

    running = contextlib.nullcontext

    def run(self, *, with_extras):
        self.with_extras.append(with_extras)
        time_us = self.left.pop(0)
        return {(0, False): [time_us]}, {(0, True): [time_us / 2]} if with_extras else {}


@pytest.mark.parametrize(
    ("steps", "seconds", "extras"),
    [
        (4, 0.0, [True, True]),
        (1, 60.0, [True]),
        (2, 60.0, [True, True]),
        (4, 60.0, [True, False, False, True]),
    ],
)
def test_steps_are_as_many_as_asked_for_and_the_time_allows(steps, seconds, extras):
    step = FakeStep(*([100.0] * 9))
    timing._timed_steps(step, steps, seconds, with_extras=True)
    assert step.with_extras == extras


def test_of_long_steps_two_that_agree_are_enough_and_all_have_extra_runs():
    second_us = 1e6
    step = FakeStep(2 * second_us, 1.5 * second_us, 1.55 * second_us, second_us)
    runs = timing._timed_steps(step, 4, 60.0, with_extras=True)
    assert step.with_extras == [True, True, True]
    assert [own[0, False] for own, _ in runs] == [[1.5 * second_us], [1.55 * second_us]]


def test_the_first_step_warms_up_and_what_runs_beside_it_counts_for_nothing():
    runs = timing._timed_steps(FakeStep(100.0, 90.0), 9, 0.0, with_extras=True)
    assert runs == [({(0, False): [90.0]}, {(0, True): [45.0]})]


def test_the_first_step_counts_where_steps_ran_just_before_or_take_very_long():
    runs = timing._timed_steps(FakeStep(100.0, 90.0), 9, 0.0, with_extras=True, is_warm=True)
    assert runs == [({(0, False): [100.0]}, {(0, True): [50.0]})]
    runs = timing._timed_steps(FakeStep(7e6, 6e6), 9, 0.0, with_extras=True)
    assert runs == [({(0, False): [7e6]}, {(0, True): [3.5e6]})]


@pytest.mark.parametrize(("seconds", "runs"), [(60.0, 3), (0.0, 2)])
def test_own_times_are_seen_in_steps_without_extra_runs(seconds, runs, monkeypatch):
    seen = []
    run = TimedStep.run
    monkeypatch.setattr(TimedStep, "run", lambda self, **options: seen.append(options) or run(self, **options))
    joint, graph, model, sample = captured(nn.Linear(2, 2), torch.randn(1, 2))
    own = timing.own_times(joint.graph_module, graph, model, sample, steps=3, time_limit_s=seconds)
    times_us = timing.own_times_of(graph, own)
    assert seen == [{"with_extras": False}] * runs
    assert list(times_us) == [each.name for each in graph.operations]


def test_a_caller_in_the_middle_of_something_is_not_disturbed():
    joint, graph, model, sample = captured(ConvNet(), torch.randn(4, 3, 8, 8))
    with torch.autocast("cpu"), torch.inference_mode():
        operation_times(joint.graph_module, graph, model, sample, steps=1)
        assert torch.is_autocast_enabled("cpu")
        assert torch.is_inference_mode_enabled()


def test_times_can_be_taken_while_the_trace_is_open():
    model, sample = ConvNet(), Sample.of(torch.randn(4, 3, 8, 8))
    with traced(model, sample) as joint:
        graph = lower(joint)
        assert operation_times(joint.graph_module, graph, model, sample, steps=1).step_us(graph) > 0


def test_a_model_without_weights_is_refused():
    with memfit.without_weights():
        model = nn.Linear(2, 2)
    joint, graph, *rest = captured(model, torch.randn(1, 2))
    with pytest.raises(InvalidModel, match="roofline"):
        operation_times(joint.graph_module, graph, *rest)


def handmade(*operations):
    storages = tuple(
        Storage(name=str(n), size_bytes=100, kind=Kind.TEMPORARY, dtype="float32", shape=(25,)) for n in range(3)
    )
    return Graph(storages=storages, operations=operations, resident=(0,), tangents=(), held=(1,))


def operation(name, *, signature="relu", overwrites=None, may_overwrite=None):
    return Operation(
        name=name,
        target="relu",
        phase=Phase.FORWARD,
        inputs=(0,),
        outputs=(1,),
        signature=signature,
        overwrites=overwrites,
        may_overwrite=may_overwrite,
    )


def test_a_form_is_known_from_every_step_that_ran_it():
    graph = handmade(operation("a", overwrites=0, may_overwrite=0), operation("b", may_overwrite=0), operation("c"))
    steps = [{(0, True): [1.0], (1, False): [10.0], (2, False): [11.0]}, {(0, True): [2.0], (1, False): [12.0, 13.0]}]
    extra = [{(0, False): [20.0], (1, True): [3.0]}]
    typical = timing._typical(graph, [*steps, *extra])
    assert typical == {("relu", True): 1.0, ("relu", False): 11.0}  # a quarter is not above


def test_bytes_are_priced_by_what_reads_and_writes_all_of_them():
    graph = handmade(
        operation("a", may_overwrite=0), operation("b", signature="embedding"), operation("c", signature="")
    )
    seen = SeenTimes(times_us={("relu", False): 50.0, ("embedding", False): 1.0})
    assert with_estimates(graph, seen).fresh_us["c"] == 50.0


def test_what_was_not_seen_is_estimated_by_what_others_of_its_kind_took():
    graph = handmade(operation("a"), operation("b", signature="other relu"))
    estimated_us = roofline_times(graph)
    times = with_estimates(graph, SeenTimes(times_us={("relu", False): 7 * estimated_us["a"]}))
    assert times.fresh_us["b"] == pytest.approx(7 * estimated_us["b"])


def test_what_was_seen_to_make_other_bits_takes_for_ever():
    graph = handmade(operation("a"), operation("b", signature="other relu", may_overwrite=0))
    seen = SeenTimes(times_us={("relu", False): 1.0}, unequal=frozenset({"other relu"}))
    times = with_estimates(graph, seen)
    assert times.fresh_us["b"] == times.in_place_us["b"] == math.inf


def test_times_of_later_steps_are_scaled_to_those_of_earlier_ones():
    first = SeenTimes(times_us={("relu", False): 10.0, ("mm", False): 30.0})
    later = SeenTimes(times_us={("relu", False): 20.0, ("mm", False): 60.0, ("gelu", False): 8.0})
    both = first.with_others(later).times_us
    assert both == {("relu", False): 10.0, ("mm", False): 30.0, ("gelu", False): 4.0}


def test_a_program_is_covered_when_all_its_forms_were_timed():
    graph = handmade(operation("a", may_overwrite=0), operation("b", signature=""))
    program = Program(graph_digest="", forward=(Compute(0, in_place=True), Compute(1)), backward=())
    assert not SeenTimes(times_us={("relu", False): 1.0}).covers(graph, program)
    assert SeenTimes(times_us={("relu", True): 1.0}).covers(graph, program)


def test_what_steps_have_shown_is_kept_for_later_runs(tmp_path):
    graph = handmade(operation("a", may_overwrite=0), operation("b", signature="unknown"))
    seen = SeenTimes(
        times_us={("relu", False): 1.0, ("relu", True): 2.0, ("elsewhere", False): 3.0}, equal=frozenset({"relu"})
    )
    seen.keep(CostCache("here", tmp_path))
    kept = SeenTimes.kept(graph, CostCache("here", tmp_path))
    assert kept == SeenTimes(times_us={("relu", False): 1.0, ("relu", True): 2.0}, equal=frozenset({"relu"}))


def test_a_step_adds_up_each_operation_as_the_eager_run_does_it():
    graph = handmade(operation("a", overwrites=0, may_overwrite=0), operation("b", may_overwrite=0))
    times = OperationTimes(fresh_us={"a": 5.0, "b": 7.0}, in_place_us={"a": 1.0, "b": 2.0})
    assert times.step_us(graph) == 1.0 + 7.0


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device")
def test_times_on_cuda_are_those_of_the_device():
    model = nn.Linear(2048, 2048, device="cuda")
    graph, times = timed(model, torch.randn(4096, 2048, device="cuda"), steps=3)
    assert times.step_us(graph) > 3 * 2 * 4096 * 2048**2 / 1e9  # no card computes 1e15 flops a second


def test_a_step_that_was_disturbed_as_a_whole_counts_like_the_others():
    quiet = {(0, False): [2.0], (1, False): [4.0]}
    disturbed = {(0, False): [14.0], (1, False): [28.0]}
    runs = [(disturbed, {(2, False): [7.0]}), (quiet, {})]
    assert timing._undisturbed(runs) == [quiet, {(2, False): [1.0]}, quiet, {}]
