import contextlib
import math
import time
from types import SimpleNamespace

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
from memfit.execute.timing import OperationTimes, operation_times
from memfit.ir import ACCUMULATE, Graph, Kind, Operation, Phase, Storage
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


@pytest.mark.parametrize(
    ("steps", "seconds", "plain", "other", "both"),
    [(5, 0.0, 1, 0, 1), (1, 60.0, 1, 1, 0), (2, 60.0, 2, 2, 0), (5, 60.0, 5, 5, 0)],
)
def test_steps_are_as_many_as_asked_for_and_the_time_allows(steps, seconds, plain, other, both, monkeypatch):
    runs = []
    run_both = TimedStep.run_both
    monkeypatch.setattr(TimedStep, "run_both", lambda self: runs.append("both") or run_both(self))
    monkeypatch.setattr(timing, "is_slow", lambda *_: False)
    run = TimedStep.run
    monkeypatch.setattr(TimedStep, "run", lambda self, **options: runs.append(bool(options)) or run(self, **options))
    timed(nn.Linear(2, 2), torch.randn(1, 2), steps=steps, time_limit_s=seconds)
    assert (runs.count(False), runs.count(True), runs.count("both")) == (plain, other, both)


@pytest.mark.parametrize(
    ("before_us", "times_us", "kept_us"),
    [
        ([], [100, 103], [100, 103]),
        ([], [130, 100, 101], [100, 101]),  # the first has warmed up
        ([], [130, 100, 120, 100, 100], [100, 100, 100]),
        ([102], [100], [100]),
        ([130], [100, 101], [100, 101]),
        ([100], [130, 100, 120, 150, 160], [100]),
    ],
)
def test_slow_steps_are_run_until_two_agree_and_those_that_were_disturbed_do_not_count(before_us, times_us, kept_us):
    left = list(times_us)

    def run_both():
        time_us = left.pop(0)
        return {"relu": time_us, "alternative": 50}, {"alternative": time_us}

    step = SimpleNamespace(running=contextlib.nullcontext, run_both=run_both)
    before = [{"relu": each} for each in before_us]
    plain, other = timing._timed_slow_steps(step, 5, time.perf_counter() + 60, before)
    assert left == []
    assert [each["relu"] for each in plain] == [each["alternative"] for each in other] == kept_us


def test_slow_steps_end_with_the_time():
    step = SimpleNamespace(running=contextlib.nullcontext, run_both=lambda: ({"relu": 1.0}, {}))
    assert timing._timed_slow_steps(step, 5, time.perf_counter() - 1) == ([{"relu": 1.0}], [{}])


@pytest.mark.parametrize(("seconds", "runs"), [(60.0, 3), (0.0, 1)])
def test_own_times_of_long_steps_are_seen_in_one(seconds, runs, monkeypatch):
    seen = []
    run = TimedStep.run
    monkeypatch.setattr(TimedStep, "run", lambda self: seen.append(self) or run(self))
    joint, graph, model, sample = captured(nn.Linear(2, 2), torch.randn(1, 2))
    times_us = timing.own_times(joint.graph_module, graph, model, sample, steps=3, time_limit_s=seconds)
    assert len(seen) == runs
    assert list(times_us) == [each.name for each in graph.operations]


@pytest.mark.parametrize("name", MODELS)
def test_a_slow_step_is_run_once_and_times_all_forms(name, monkeypatch):
    make_model, make_batch = MODELS[name]
    runs = []
    run_both = TimedStep.run_both
    monkeypatch.setattr(TimedStep, "run_both", lambda self: runs.append(self) or run_both(self))
    monkeypatch.setattr(TimedStep, "run", lambda *_args, **_options: pytest.fail("run twice"))
    graph, times = timed(make_model(), make_batch(), ("lean",), steps=5, time_limit_s=0.0)
    assert len(runs) == 1
    operations = (*graph.operations, *graph.alternatives)
    assert list(times.fresh_us) == [each.name for each in operations]
    assert list(times.in_place_us) == [each.name for each in operations if each.may_overwrite is not None]
    assert all(each > 0 for each in (*times.fresh_us.values(), *times.in_place_us.values()))


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
    plain = [{"a": 1.0, "b": 10.0, "c": 11.0}, {"a": 2.0, "b": 12.0, "c": 13.0}]
    other = [{"a": 20.0, "b": 3.0, "c": 99.0}]
    typical = timing._typical(graph, plain, other)
    assert typical == {("relu", True): 1.0, ("relu", False): 11.0}  # a quarter is not above


def test_bytes_are_priced_by_what_reads_and_writes_all_of_them():
    graph = handmade(operation("a", may_overwrite=0), operation("b", signature="embedding"))
    typical = {("relu", False): 50.0, ("embedding", False): 1.0}
    assert timing._per_byte_us(graph, typical) == 50.0 / 200
    assert timing._per_byte_us(handmade(), {}) == 0.0


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
    graph, _ = timed(ConvNet(), torch.randn(4, 3, 8, 8))
    names = [each.name for each in graph.operations if each.signature]
    quiet = dict.fromkeys(names, 2.0)
    disturbed = dict.fromkeys(names, 14.0)
    assert timing._undisturbed(graph, [disturbed, quiet], [disturbed]) == ([quiet, quiet], [quiet])
