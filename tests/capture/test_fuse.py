"""Stretches in a captured graph: found, cut out, put in, and computing what the model computes."""

import copy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import fx, nn

import memfit
from memfit import _torch
from memfit.capture import fuse as fuse_module
from memfit.capture import runs as runs_module
from memfit.capture.fuse import fuse, stretches_in
from memfit.capture.lower import lower
from memfit.capture.runs import find_runs
from memfit.capture.sample import Sample
from memfit.capture.stretches import cut_out, made_again, put_into
from memfit.capture.trace import Joint, traced
from memfit.ir import Phase
from memfit.measure.peak import measure_peak
from memfit.ops.lean import is_backward

ALLOW = ("recompute", "lean", "inductor")


class Block(nn.Module):
    """Convolutions with normalisation, activation, a residual and dropout between them."""

    def __init__(self, channels: int = 8, dropout: float = 0.0) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, channels, 3, padding=1, bias=False)
        self.norm = nn.BatchNorm2d(channels)
        self.second = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.last_norm = nn.BatchNorm2d(channels)
        self.dropout = nn.Dropout(dropout)
        self.head = nn.Linear(channels, 4)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        inner = torch.relu(self.norm(self.first(images)))
        outer = self.dropout(torch.relu(self.last_norm(self.second(inner)) + inner))
        return self.head(outer.mean((2, 3))).square().mean()


class Attention(nn.Module):
    """What Transformers do between their products, with views of one product in the middle."""

    def __init__(self, size: int = 16) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(size)
        self.project = nn.Linear(size, 3 * size)
        self.out = nn.Linear(size, size)

    def forward(self, states: torch.Tensor) -> torch.Tensor:
        queries, keys, values = self.project(self.norm(states) * 2).chunk(3, -1)
        weights = torch.softmax(queries @ keys.transpose(1, 2) / 4 + 0.1, -1)
        return (states + torch.tanh(self.out(weights @ values)) * 0.5).square().mean()


class Gated(nn.Module):
    """Parts of what is made inside, read inside and outside; the last operator works in place; two draws."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(16, 32), nn.Linear(16, 16)
        self.norm = nn.LayerNorm(32)
        self.dropout = nn.Dropout(0.2, inplace=True)

    def forward(self, states: torch.Tensor) -> torch.Tensor:
        gate, value = torch.nn.functional.silu(self.norm(self.first(states)) * 1.5).chunk(2, -1)
        mixed = self.dropout(torch.tanh(gate * 2) * value.sigmoid())
        again = self.second(torch.tanh(mixed * 0.5 + gate))
        return torch.relu_(again * 2 + 0.1).square().mean()


class Normalised(nn.Module):
    """Channels-last, statistics that stand still, and a big buffer that the forward pass changes."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(3, 8, 1), nn.Conv2d(8, 8, 1)
        self.norm = nn.BatchNorm2d(8)
        self.register_buffer("seen", torch.zeros(2**17))

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        scale = 1 + self.seen[:8].view(1, 8, 1, 1)
        self.seen += 0.5
        inner = torch.relu(self.norm(self.first(images)) * scale)
        return (self.second(inner) * inner).sigmoid().mean()


class Pooled(nn.Module):
    """Pools of windows that overlap and that do not fit, after activations."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, 8, 3, padding=1)
        self.second = nn.Conv2d(8, 8, 3, padding=1)
        self.biggest = nn.MaxPool2d(3, stride=2, padding=1)
        self.last = nn.MaxPool2d(2, ceil_mode=True)
        self.average = nn.AvgPool2d(3, stride=1, padding=1)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        inner = self.biggest(torch.relu(self.first(images)))
        return self.last(torch.tanh(self.second(inner)) + self.average(inner)).square().mean()


MODELS = {
    "pooled": (Pooled, lambda: torch.randn(4, 3, 18, 18)),
    "pooled, channels last": (Pooled, lambda: torch.randn(4, 3, 18, 18).to(memory_format=torch.channels_last)),
    "gated": (Gated, lambda: torch.randn(4, 12, 16)),
    "normalised": (Normalised, lambda: torch.randn(4, 3, 8, 8).to(memory_format=torch.channels_last)),
    "block": (Block, lambda: torch.randn(4, 3, 16, 16)),
    "block with dropout": (lambda: Block(dropout=0.3), lambda: torch.randn(4, 3, 16, 16)),
    "attention": (Attention, lambda: torch.randn(2, 12, 16)),
}


@pytest.fixture(autouse=True)
def _everything_is_worth_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runs_module, "_SMALLEST_RUN_BYTES", 0)
    monkeypatch.setattr(fuse_module, "_SMALLEST_BYTES", 0)


@pytest.fixture
def eager_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """Stretches run operator by operator: compiling is tested by few tests."""

    def refuse(*_: Any) -> Any:
        raise RuntimeError("no compiler")

    monkeypatch.setattr(_torch, "compile_graph", refuse)
    monkeypatch.setattr("memfit.ops.stretch.kept_kernel", lambda _: None)
    monkeypatch.setattr("memfit.ops.stretch._STRETCHES", {})
    monkeypatch.setattr("memfit.ops.stretch._SAID", set())


@pytest.fixture
def joint() -> Iterator[Joint]:
    with traced(Block(), Sample.of(torch.randn(4, 3, 16, 16))) as traced_block:
        yield traced_block


def names(nodes: Any) -> list[str]:
    return [str(node.target) for node in nodes]


def test_runs_stand_between_operators_that_are_not_fused(joint: Joint) -> None:
    runs = find_runs(joint.graph_module.graph)
    forward = [run for run in runs if not run.is_backward]
    assert [names([run.last])[0] for run in forward[:1]] == ["aten.relu.default"]
    everything = [name for run in runs for name in names(run.members)]
    assert not any(word in name for name in everything for word in ("convolution", "mm", "view", "expand"))
    assert len({run.is_backward for run in runs}) == 2


def test_members_read_by_others_are_outputs_also_through_views() -> None:
    with traced(Attention(), Sample.of(torch.randn(2, 12, 16))) as traced_attention:
        runs = find_runs(traced_attention.graph_module.graph)
    assert any("layer_norm" in name for run in runs for name in names(run.members))
    for run in runs:
        inside = set(run.members)
        read = {node for node in run.members for user in node.users if user not in inside}
        assert set(run.outputs) <= {*read, *run.members}
        assert run.outputs


def test_draws_are_in_no_run() -> None:
    with traced(Block(dropout=0.5), Sample.of(torch.randn(4, 3, 16, 16))) as traced_block:
        members = [node for run in find_runs(traced_block.graph_module.graph) for node in run.members]
    assert not any("bernoulli" in str(node.target) or "dropout" in str(node.target) for node in members)


def test_noise_is_kept_as_it_was_drawn_and_divided_where_it_is_read() -> None:
    with traced(Block(dropout=0.5), Sample.of(torch.randn(4, 3, 8, 8))) as joint:
        fuse(joint)
    (drawn,) = (node for node in joint.graph_module.graph.nodes if node.name.startswith("bernoulli"))
    assert {is_backward(user) for user in drawn.users} == {False, True}
    graph = lower(joint)
    (maker,) = (each for each in graph.operations if each.name == drawn.name)
    readers = [each for each in graph.operations if maker.outputs[0] in each.inputs]
    assert {each.phase for each in readers} == {Phase.FORWARD, Phase.BACKWARD}
    assert all(each.target.startswith("memfit.stretch") for each in readers)


def test_noise_that_no_stretch_reads_is_divided_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runs_module, "_SMALLEST_RUN_BYTES", 2**40)
    with traced(Block(dropout=0.5), Sample.of(torch.randn(4, 3, 8, 8))) as joint:
        before = [str(node.target) for node in joint.graph_module.graph.nodes]
        fuse(joint)
    assert [str(node.target) for node in joint.graph_module.graph.nodes] == before


def test_one_operator_and_small_values_are_no_run(monkeypatch: pytest.MonkeyPatch) -> None:
    sample = Sample.of(torch.randn(4, 8))
    with traced(nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8)), sample) as plain:
        assert not [run for run in find_runs(plain.graph_module.graph) if not run.is_backward]
    monkeypatch.setattr(runs_module, "_SMALLEST_RUN_BYTES", 2**30)
    with traced(Block(), Sample.of(torch.randn(4, 3, 16, 16))) as small:
        assert find_runs(small.graph_module.graph) == []


def test_a_piece_computes_what_its_run_computes(joint: Joint) -> None:
    graph = joint.graph_module.graph
    for run in find_runs(graph):
        piece = cut_out(run)
        with _torch.no_modes():  # the trace is open
            values = {node: made_up(node) for node in piece.inputs}
            expected = evaluated(run.outputs, values)
            found = fx.GraphModule({}, piece.graph)(*values.values())
            for one, other in zip(found, expected, strict=True):
                torch.testing.assert_close(one, other)


def test_a_normalised_value_is_made_again_from_its_statistics(joint: Joint) -> None:
    run = find_runs(joint.graph_module.graph)[0]
    piece = cut_out(run)
    place = max(range(len(run.outputs)), key=lambda index: run.outputs[index].meta["val"].numel())
    again = made_again(piece, place, run.outputs)
    assert again is not None
    assert not any("var_mean" in name for name in names(again.graph.nodes))
    with _torch.no_modes():
        values = {node: made_up(node) for node in piece.inputs}
        results = evaluated(run.outputs, values)
        known = values | dict(zip(run.outputs, results, strict=True))
        (found,) = fx.GraphModule({}, again.graph)(*(known[node] for node in again.inputs))
        torch.testing.assert_close(found, results[place])


def test_a_value_can_be_made_inside_the_stretch_that_reads_it(joint: Joint) -> None:
    graph = joint.graph_module.graph
    first, *others = find_runs(graph)
    last = others[-1]
    inner, outer = cut_out(first), cut_out(last)
    shared = next(node for node in first.outputs if node in outer.inputs and node.meta["val"].dim() == 4)
    again = made_again(inner, first.outputs.index(shared), first.outputs)
    assert again is not None
    both = put_into(outer, {shared: again})
    assert shared not in both.inputs
    with _torch.no_modes():
        values = {node: made_up(node) for node in (*outer.inputs, *again.inputs)}
        (values[shared],) = fx.GraphModule({}, again.graph)(*(values[node] for node in again.inputs))
        expected = fx.GraphModule({}, outer.graph)(*(values[node] for node in outer.inputs))
        found = fx.GraphModule({}, both.graph)(*(values[node] for node in both.inputs))
        for one, other in zip(found, expected, strict=True):
            torch.testing.assert_close(one, other)


def made_up(node: fx.Node) -> torch.Tensor:
    value = node.meta["val"]
    if not value.is_floating_point():
        return torch.zeros(value.shape, dtype=value.dtype)
    return torch.rand(value.shape, dtype=value.dtype) + 0.5


def evaluated(wanted: Any, values: dict[fx.Node, Any]) -> list[Any]:
    known = dict(values)

    def value_of(node: fx.Node) -> Any:
        if node.op == "placeholder":
            return known.setdefault(node, made_up(node))  # what operators name and do not read
        if node not in known:
            args, kwargs = fx.node.map_arg((node.args, dict(node.kwargs)), value_of)
            known[node] = node.target(*args, **kwargs)  # type: ignore[operator]
        return known[node]

    return [value_of(node) for node in wanted]


def test_equal_runs_become_one_stretch() -> None:
    model = nn.Sequential(*(layer for _ in range(3) for layer in (nn.Linear(16, 16), nn.LayerNorm(16), nn.GELU())))
    with traced(model, Sample.of(torch.randn(8, 16))) as traced_model:
        fuse(traced_model)
        graph = traced_model.graph_module.graph
    calls = [node for node in graph.nodes if node.target in stretches_in(graph) and "memfit_technique" not in node.meta]
    forward = [node for node in calls if not is_backward(node)]
    assert len(forward) == 3
    assert len({node.target for node in forward}) == 1


def test_a_fused_graph_has_the_same_ends_and_fewer_operations(joint: Joint) -> None:
    before = lower(joint)
    fuse(joint)
    after = lower(joint)
    assert len(after.operations) < len(before.operations)
    for ends in ("resident", "tangents", "held", "written_back", "trained"):
        assert len(getattr(after, ends)) == len(getattr(before, ends))
    assert {each.technique for each in after.alternatives} == {"stretch"}
    assert {each.phase for each in after.alternatives} == {Phase.FORWARD, Phase.BACKWARD}


@pytest.mark.parametrize(
    ("layout", "expected"), [(torch.contiguous_format, {False}), (torch.channels_last, {True})], ids=["own", "last"]
)
def test_pools_are_part_of_runs_where_channels_lie_last(layout: torch.memory_format, expected: set[bool]) -> None:
    with traced(Pooled(), Sample.of(torch.randn(4, 3, 18, 18).to(memory_format=layout))) as traced_pools:
        nodes = [node for node in traced_pools.graph_module.graph.nodes if "pool2d" in str(node.target)]
        assert len(nodes) == 6
        assert {runs_module.is_fusible(node) for node in nodes} == expected


def test_fusing_is_the_same_every_time() -> None:
    digests = set()
    for _ in range(2):
        with traced(Block(), Sample.of(torch.randn(4, 3, 16, 16))) as traced_block:
            fuse(traced_block)
            digests.add(lower(traced_block).digest())
    assert len(digests) == 1


def step(model: nn.Module, batch: torch.Tensor) -> list[torch.Tensor]:
    torch.manual_seed(3)
    model.zero_grad()
    loss = model(batch)
    loss.backward()
    gradients = [parameter.grad for parameter in model.parameters()]
    return [loss.detach(), *gradients, *model.buffers()]


def assert_close(model: nn.Module, twin: nn.Module, batch: torch.Tensor) -> None:
    twin.load_state_dict(model.state_dict())
    found, state = step(model, batch), torch.get_rng_state()
    expected = step(twin, batch)
    assert torch.equal(state, torch.get_rng_state())
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-6)


@pytest.mark.usefixtures("eager_kernels", "one_thread")
@pytest.mark.parametrize("name", MODELS)
def test_fused_models_compute_what_the_eager_ones_do(name: str, caplog: pytest.LogCaptureFixture) -> None:
    make_model, make_batch = MODELS[name]
    model, batch = make_model(), make_batch()
    twin = copy.deepcopy(model)
    for budget in (10**8, "smallest"):
        plan = memfit.plan(model, batch, budget=budget, allow=ALLOW, time_limit=1)
        memfit.apply(plan, model)
        assert_close(model, twin, batch)
        memfit.remove(model)
    assert "runs with eager kernels: RuntimeError: no compiler" in caplog.text


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize(
    "name",
    [
        "attention",
        pytest.param("block with dropout", marks=pytest.mark.slow),  # half a minute of compilation
        pytest.param("gated", marks=pytest.mark.slow),
        pytest.param("pooled", marks=pytest.mark.slow),
        pytest.param("pooled, channels last", marks=pytest.mark.slow),
    ],
)
def test_compiled_models_compute_what_the_eager_ones_do_within_the_budget(name: str) -> None:
    make_model, make_batch = MODELS[name]
    model, batch = make_model(), make_batch()
    twin = copy.deepcopy(model)
    for budget in (10**8, "smallest"):
        plan = memfit.plan(model, batch, budget=budget, allow=ALLOW, time_limit=1)
        memfit.apply(plan, model)
        assert_close(model, twin, batch)
        model.zero_grad()
        measured = measure_peak(lambda: model(batch).backward(), resident=[model, batch])
        assert measured.peak_bytes == pytest.approx(plan.peak_bytes, rel=0.015)
        memfit.remove(model)


@pytest.mark.slow  # compiles
def test_compiled_pools_give_the_same_bits_at_every_step_on_several_threads() -> None:
    model, batch = Pooled(), torch.randn(16, 3, 64, 64).to(memory_format=torch.channels_last)
    memfit.fit(model, batch, 10**9, allow=ALLOW, time_limit=1)
    first = step(model, batch)
    for _ in range(5):
        assert all(torch.equal(*pair) for pair in zip(step(model, batch), first, strict=True))


@pytest.mark.usefixtures("one_thread")
def test_a_plan_is_recognised_after_inductor_has_seen_the_graphs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))  # nothing is remembered: graphs are really compiled
    monkeypatch.setattr("memfit.ops.stretch._STRETCHES", {})
    monkeypatch.setattr("memfit.capture.stretches._PRIMITIVE", {})
    model, batch = Attention(), torch.randn(2, 12, 16)
    plan = memfit.plan(model, batch, budget=0.95, allow=ALLOW, time_limit=1)
    memfit.apply(plan, model, batch)
    twin = Attention()
    assert_close(model, twin, batch)


@pytest.mark.usefixtures("eager_kernels", "one_thread")
def test_a_saved_plan_is_applied_to_another_copy_of_the_model() -> None:
    model, batch = Block(), torch.randn(4, 3, 16, 16)
    plan = memfit.plan(model, batch, budget=0.9, allow=ALLOW, time_limit=1)
    loaded = type(plan).from_json(plan.to_json())
    other = Block()
    twin = copy.deepcopy(other)
    memfit.apply(loaded, other)
    assert_close(other, twin, batch)
