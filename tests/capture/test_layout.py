"""Images whose channels lie last: where they are copied, and what comes of it."""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import fx, nn

import memfit
from memfit import layout, prepare
from memfit.capture.layout import ChannelsLast
from memfit.capture.lower import lower
from memfit.capture.runs import is_fusible
from memfit.capture.sample import Sample
from memfit.capture.trace import traced
from memfit.ir import Graph
from memfit.measure.peak import measure_peak
from memfit.ops.lean import is_backward
from memfit.prepare import traced_as_eager
from memfit.recipe import Recipe, with_kernels, without_channels_last

aten = torch.ops.aten
ALLOW = ("recompute", "lean", "channels-last")


class Images(nn.Module):
    """Convolutions with normalisation, a branch that is joined again, and a linear head."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, 16, 3, padding=1, bias=False)
        self.norm = nn.BatchNorm2d(16)
        self.second = nn.Conv2d(16, 16, 3, padding=1)
        self.up = nn.ConvTranspose2d(32, 8, 2, stride=2)
        self.head = nn.Linear(8, 4)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        inner = torch.relu(self.norm(self.first(images)))
        both = torch.cat([inner, self.second(inner)], 1)
        return self.head(self.up(nn.functional.max_pool2d(both, 2)).mean((2, 3))).square().mean()


def batch() -> torch.Tensor:
    return torch.randn(4, 3, 24, 24, generator=torch.Generator().manual_seed(0))


def joint_graph(images: torch.Tensor, *, channels_last: bool) -> fx.Graph:
    with traced(Images(), Sample.of(images), channels_last=channels_last) as joint:
        return joint.graph_module.graph


def copies(graph: fx.Graph) -> list[fx.Node]:
    return [node for node in graph.nodes if node.target is aten.clone.default]


def test_one_copy_is_made_and_all_convolutions_read_channels_last() -> None:
    graph = joint_graph(batch(), channels_last=True)
    assert len([node for node in copies(graph) if not is_backward(node)]) == 1
    convolutions = [node for node in graph.nodes if node.target is aten.convolution.default]
    assert len(convolutions) == 3
    for node in convolutions:
        assert node.args[0].meta["val"].is_contiguous(memory_format=torch.channels_last)


@pytest.mark.parametrize(
    ("images", "channels_last"), [(batch(), False), (batch().to(memory_format=torch.channels_last), True)]
)
def test_none_is_made_where_nobody_asks_or_the_batch_lies_so(images: torch.Tensor, channels_last: bool) -> None:
    graph = joint_graph(images, channels_last=channels_last)
    assert not [node for node in copies(graph) if not is_backward(node)]


def test_gradients_of_weights_lie_as_the_weights_do() -> None:
    graph = joint_graph(batch(), channels_last=True)
    results = [node for node in graph.output_node().all_input_nodes if isinstance(node.meta.get("val"), torch.Tensor)]
    of_weights = [node.meta["val"] for node in results if node.meta["val"].dim() == 4]
    assert len(of_weights) == 3
    assert all(each.is_contiguous() for each in of_weights)
    turned = [node for node in copies(graph) if is_backward(node)]
    assert turned
    assert not any(is_fusible(node) for node in turned)


@pytest.mark.parametrize("call", [lambda x, w: torch.conv2d(input=x, weight=w), lambda x, w: torch.conv2d(x[0], w)])
def test_named_arguments_and_images_without_a_batch_are_taken(call: Any) -> None:
    images, weight = batch(), torch.randn(5, 3, 3, 3)
    with ChannelsLast():
        found = call(images, weight)
    torch.testing.assert_close(found, call(images, weight))


@pytest.fixture
def _faster(monkeypatch: pytest.MonkeyPatch) -> None:
    """Channels last are worth it, whatever small steps say."""
    monkeypatch.setattr(layout, "_WORTH_IT", 100.0)


@pytest.mark.usefixtures("one_thread", "_faster")
def test_a_plan_computes_what_the_eager_run_does_within_its_budget() -> None:
    torch.manual_seed(0)
    model, images = Images(), batch()
    eager = copy.deepcopy(model)
    plan = memfit.plan(model, images, budget=0.95, allow=ALLOW, time_limit=1)
    memfit.apply(memfit.Plan.from_json(plan.to_json()), model, images)
    peak = measure_peak(lambda: model(images).backward(), resident=[model, images])
    assert peak.peak_bytes == pytest.approx(plan.peak_bytes, rel=0.01)
    eager(images).backward()
    for one, other in zip(model.parameters(), eager.parameters(), strict=True):
        assert one.grad is not None
        assert one.grad.stride() == one.stride()
        torch.testing.assert_close(one.grad, other.grad, rtol=1e-4, atol=1e-6)
    for one, other in zip(model.buffers(), eager.buffers(), strict=True):
        torch.testing.assert_close(one, other)
    assert memfit.check(Images(), plan, images, tolerance=1e-4).passed


@pytest.mark.usefixtures("one_thread", "_faster")
def test_what_it_is_compared_with_is_the_eager_run(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("MEMFIT_CACHE_DIR", str(tmp_path))
    timed: list[str] = []
    own_times = prepare.own_times

    def noted(module: fx.GraphModule, graph: Graph, *rest: Any, **options: Any) -> Any:
        timed.append(graph.digest())
        return own_times(module, graph, *rest, **options)

    monkeypatch.setattr(prepare, "own_times", noted)
    model, images = Images(), batch()
    plain = memfit.plan(model, images, budget=10**9, time_limit=1)
    laid_out = memfit.plan(model, images, budget=10**9, allow=ALLOW, time_limit=1)
    assert laid_out.unplanned_peak_bytes == plain.unplanned_peak_bytes
    with traced(model, Sample.of(images)) as joint:
        assert timed == [lower(joint).digest()]
    assert traced_as_eager(model, Sample.of(images), Recipe(budget=1)) is None


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize(("worth_it", "chosen"), [(100.0, True), (0.0, False)])
def test_it_is_chosen_where_steps_are_faster_and_nothing_remains(
    worth_it: float, chosen: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(layout, "_WORTH_IT", worth_it)
    monkeypatch.setenv("MEMFIT_CACHE_DIR", str(tmp_path))
    model, images = Images(), batch()
    before = [*(each.clone() for each in model.state_dict().values()), torch.get_rng_state()]
    for _ in range(2):  # the second is remembered
        memfit.fit(model, images, 0.95, allow=ALLOW, time_limit=1, remember=True)
        plan = memfit.plan_of(model)
        assert plan is not None
        assert ("channels-last" in plan.allow) is chosen
        after = [*model.state_dict().values(), torch.get_rng_state()]
        assert all(torch.equal(*pair) for pair in zip(before, after, strict=True))
        assert all(parameter.grad is None for parameter in model.parameters())
        memfit.remove(model)
    assert len(list((tmp_path / "plans").iterdir())) == 1


def test_models_without_convolutions_are_not_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(layout, "step_seconds")
    recipe = Recipe(budget=1, allow=ALLOW)
    found, unplanned = layout.with_layout(nn.Linear(2, 2), Sample.of(torch.randn(2, 2)), recipe)
    assert found.allow == ("recompute", "lean")
    assert unplanned is None


class Flat(nn.Module):
    """Looks at images as rows, which those with channels last are not."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, 8, 3)
        self.head = nn.Linear(8 * 22 * 22, 2)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return self.head(torch.relu(self.first(images)).view(len(images), -1)).square().mean()


@pytest.mark.usefixtures("one_thread", "_faster")
@pytest.mark.parametrize("remember", [False, True])
def test_a_model_that_cannot_do_with_it_does_without(
    remember: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("MEMFIT_CACHE_DIR", str(tmp_path))
    model = memfit.fit(Flat(), batch(), 10**9, allow=ALLOW, time_limit=1, remember=remember)
    plan = memfit.plan_of(model)
    assert plan is not None
    assert not plan.regions
    assert "channels-last" not in plan.allow


@pytest.mark.usefixtures("one_thread", "_faster")
def test_what_only_the_model_s_own_layout_reaches_is_reached() -> None:
    model, images = Images(), batch()
    smallest = memfit.plan(model, images, budget="smallest", allow=ALLOW, time_limit=1)
    assert "channels-last" not in smallest.allow
    for make in (memfit.plan, memfit.fit):
        try:
            make(Images(), images, budget=smallest.peak_bytes, allow=ALLOW, time_limit=2)
        except memfit.InfeasibleBudget as error:
            raise AssertionError("refused, though there is a plan") from error


@pytest.mark.usefixtures("one_thread", "_faster")
def test_the_trial_leaves_batch_gradients_and_graph_alone() -> None:
    class Writing(Images):
        def forward(self, images: torch.Tensor) -> torch.Tensor:
            images.sub_(1.0)
            return super().forward(images)

    model, images = Writing(), batch()
    given = images.clone()
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    with torch.no_grad():
        layout.with_layout(model, Sample.of(images), Recipe(budget=10**9, allow=ALLOW))
    assert torch.equal(images, given)
    assert all(torch.equal(each.grad, torch.ones_like(each)) for each in model.parameters() if each.grad is not None)


@pytest.mark.usefixtures("one_thread", "_faster")
def test_who_waits_for_gradients_does_not_notice_the_trial(monkeypatch: pytest.MonkeyPatch) -> None:
    steps_s: list[float] = []
    step_seconds = layout.step_seconds
    monkeypatch.setattr(layout, "step_seconds", lambda *args: steps_s.append(step_seconds(*args)) or steps_s[-1])
    model = Images()
    reached: list[str] = []
    nodes = []
    for name, parameter in model.named_parameters():  # as DistributedDataParallel does
        node = parameter.expand_as(parameter).grad_fn.next_functions[0][0]  # type: ignore[union-attr]
        node.register_hook(lambda *_, name=name: reached.append(name))
        nodes.append(node)
    _, unplanned = layout.with_layout(model, Sample.of(batch()), Recipe(budget=10**9, allow=ALLOW))
    assert unplanned is not None
    assert unplanned.step_us is None  # what is around the operators would count
    assert len(steps_s) >= 3
    assert reached == []
    model(batch()).backward()
    assert reached


def test_it_is_not_tried_where_a_step_would_change_something(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(layout, "step_seconds")
    recipe = Recipe(budget=10**9, allow=ALLOW)
    updated, hooked = Images(), Images()
    updated.first.weight.register_post_accumulate_grad_hook(lambda _: None)
    hooked.register_forward_hook(lambda *_: None)
    for model in (updated, hooked):
        assert layout.with_layout(model, Sample.of(batch()), recipe) == (without_channels_last(recipe), None)


@pytest.mark.usefixtures("one_thread", "_faster")
def test_results_lie_as_they_do_without() -> None:
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 8, 3))
    memfit.fit(model, batch(), 10**9, allow=ALLOW, time_limit=1)
    plan = memfit.plan_of(model)
    assert plan is not None
    assert "channels-last" in plan.allow
    assert model(batch()).is_contiguous()
    unplanned = memfit.fit(nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU()), batch(), kernels="inductor")
    assert unplanned(batch()).is_contiguous()


@pytest.mark.parametrize(
    ("seconds", "worth_it"),
    [
        ([1.3, 0.9, 1.0], True),  # own, laid out, own: the first of a way is no faster than its second
        ([1.3, 1.2, 1.0, 0.8], True),
        ([1.1, 1.4, 1.2], False),  # own, laid out, laid out
        ([1.3, 1.4, 0.8, 0.7], False),
        ([1.3, 1.4, 0.6, 1.0], True),
        ([0.13, 0.08, 0.10], True),
        ([0.13, 0.09, 0.10, 0.08], True),  # not clear after three
        ([0.13, 0.14, 0.14], False),
        ([0.13, 0.14, 0.13, 0.11], False),
        ([0.13, 0.12, 0.100, 0.099, 0.100, 0.099, 0.100, 0.099], False),
    ],
)
def test_no_more_steps_are_run_than_it_takes(seconds: list[float], worth_it: bool) -> None:
    left = list(seconds)
    trial = layout._Trial(lambda: left.pop(0))
    assert trial.is_worth_it() is worth_it
    assert left == []


@pytest.mark.usefixtures("one_thread", "_faster")
def test_steps_of_the_trial_are_known_where_steps_are_slow(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(prepare, "own_times")
    seconds = iter([3.0, 1.0, 2.0])
    monkeypatch.setattr(layout, "step_seconds", lambda *_: next(seconds))
    plan = memfit.plan(Images(), batch(), budget=10**9, allow=ALLOW, time_limit=1)
    assert "channels-last" in plan.allow
    assert plan.step_us == 2e6


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize(("worth_it", "chosen"), [(100.0, True), (0.0, False)])
def test_where_steps_do_not_fit_convolutions_are_timed_alone(
    worth_it: float, chosen: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(layout, "_WORTH_IT", worth_it)
    monkeypatch.setattr(layout, "step_seconds", lambda *_: pytest.fail("a step was run"))
    recipe = Recipe(budget=0.6, allow=ALLOW)
    found, unplanned = layout.with_layout(Images(), Sample.of(batch()), recipe)
    assert found.channels_last is chosen
    assert (unplanned is not None) is chosen


def test_compiled_kernels_come_with_it() -> None:
    assert with_kernels(("recompute",), "inductor") == ("recompute", "inductor", "channels-last")
    assert with_kernels(("recompute",), "eager") == ("recompute",)
