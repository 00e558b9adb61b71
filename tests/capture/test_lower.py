"""What a captured graph says about storages, operations and their place in the model."""

import pytest
import torch
import torch.nn.functional as F
from capturing import captured, names, targets
from torch import nn
from torch.utils.checkpoint import checkpoint

from memfit.ir import ACCUMULATE, Compute, Free, Graph, Kind, Operation, Phase
from memfit.plan.identity import identity_program


def operation(graph: Graph, target: str) -> Operation:
    (found,) = (each for each in graph.operations if each.target == target)
    return found


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, 4, 3, padding=1)
        self.bn1 = nn.BatchNorm2d(4)
        self.relu = nn.ReLU(inplace=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.conv1(x)
        x = self.bn1(x)
        return self.relu(x)


class Small(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer1 = nn.Sequential(Block())
        self.head = nn.Linear(4, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.layer1(x).mean((2, 3)))


@pytest.fixture(scope="module")
def small() -> Graph:
    return captured(Small(), torch.randn(2, 3, 8, 8))


def test_parameters_buffers_and_batch_are_resident(small: Graph) -> None:
    assert names(small, Kind.PARAMETER) == [name for name, _ in Small().named_parameters()]
    assert names(small, Kind.BUFFER) == [name for name, _ in Small().named_buffers()]
    assert len(names(small, Kind.BATCH)) == 1
    kinds = {small.storages[index].kind for index in small.resident}
    assert kinds == {Kind.PARAMETER, Kind.BUFFER, Kind.BATCH}


def test_every_size_is_that_of_the_real_tensor(small: Graph) -> None:
    real = {**dict(Small().named_parameters()), **dict(Small().named_buffers())}
    for storage in (small.storages[index] for index in small.resident):
        if storage.name in real:
            assert storage.size_bytes == real[storage.name].nbytes
            assert storage.shape == tuple(real[storage.name].shape)
            assert storage.dtype == str(real[storage.name].dtype).removeprefix("torch.")


def test_every_trained_parameter_has_its_gradient(small: Graph) -> None:
    pairs = [(small.storages[parameter], small.storages[gradient]) for parameter, gradient in small.trained]
    assert [parameter.name for parameter, _ in pairs] == names(small, Kind.PARAMETER)
    assert all(gradient.kind is Kind.GRADIENT for _, gradient in pairs)
    assert all(parameter.size_bytes == gradient.size_bytes for parameter, gradient in pairs)


def test_outputs_and_gradients_are_held(small: Graph) -> None:
    held = [small.storages[index].kind for index in small.held]
    assert sorted(held) == sorted([Kind.OUTPUT, *[Kind.GRADIENT] * 6])


def test_the_backward_starts_from_a_tangent_of_the_output(small: Graph) -> None:
    assert [small.storages[index].shape for index in small.tangents] == [(2, 2)]


def test_what_both_passes_read_is_an_activation(small: Graph) -> None:
    made = {index: each.phase for each in small.operations for index in each.outputs}
    read = {index for each in small.operations if each.phase is Phase.BACKWARD for index in each.inputs}
    crossing = {index for index in read if made.get(index) is Phase.FORWARD and index not in small.held}
    assert crossing == {index for index, storage in enumerate(small.storages) if storage.kind is Kind.ACTIVATION}


def test_new_statistics_are_written_back(small: Graph) -> None:
    shapes = sorted(small.storages[index].shape for index in small.written_back)
    assert shapes == [(), (4,), (4,)]


def test_operations_know_their_module_and_line(small: Graph) -> None:
    convolution = operation(small, "aten.convolution.default")
    assert convolution.module == "layer1.0.conv1"
    line = Block.forward.__code__.co_firstlineno + 1
    assert convolution.source == f"capture/test_lower.py:{line}"


def test_backward_operations_know_what_they_differentiate(small: Graph) -> None:
    backward = operation(small, "aten.convolution_backward.default")
    assert (backward.phase, backward.module) == (Phase.BACKWARD, "layer1.0.conv1")


def test_operations_outside_any_submodule_are_of_the_model_itself(small: Graph) -> None:
    assert operation(small, "aten.mean.dim").module == ""


def test_parameters_belong_to_the_module_that_owns_them(small: Graph) -> None:
    owners = {storage.name: storage.module for storage in small.storages}
    assert owners["layer1.0.conv1.weight"] == "layer1.0.conv1"
    assert owners["head.bias"] == "head"


def test_a_model_of_torchs_own_modules_is_located_in_their_forward() -> None:
    graph = captured(nn.Sequential(nn.Linear(4, 4)), torch.randn(2, 4))
    assert graph.operations[0].module == "0"
    assert graph.operations[0].source.startswith("modules/linear.py:")


def test_relu_in_place_overwrites_its_input(small: Graph) -> None:
    relu = operation(small, "aten.relu.default")
    assert relu.overwrites == relu.inputs[0]


def test_relu_out_of_place_overwrites_nothing() -> None:
    graph = captured(nn.Sequential(nn.Linear(4, 4), nn.ReLU()), torch.randn(2, 4))
    assert operation(graph, "aten.relu.default").overwrites is None


class WritesThenReads(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.linear(x)
        return F.relu(hidden.clone(), inplace=True) + hidden


def test_only_what_dies_is_overwritten() -> None:
    graph = captured(WritesThenReads(), torch.randn(2, 4))
    relu = operation(graph, "aten.relu.default")
    (clone,) = operation(graph, "aten.clone.default").outputs
    assert relu.overwrites == clone


def test_the_batch_is_never_overwritten() -> None:
    class Scales(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.linear(x.mul_(2))

    graph = captured(Scales(), torch.randn(2, 4))
    assert all(each.overwrites is None for each in graph.operations)


def test_gradients_of_one_value_are_added_in_place() -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            hidden = self.first(x)
            return hidden.sigmoid() + hidden.tanh()

    graph = captured(Twice(), torch.randn(2, 4))
    added = [each for each in graph.operations if each.target == "aten.add.Tensor" and each.phase is Phase.BACKWARD]
    assert [each.overwrites for each in added] == [added[0].inputs[0]]


def test_a_gradient_that_is_held_is_not_overwritten() -> None:
    class Shifted(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 4)
            self.shift = nn.Parameter(torch.zeros(2, 4))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            hidden = self.linear(x)
            return hidden.sigmoid() + ((hidden + self.shift) * 2).tanh()

    graph = captured(Shifted(), torch.randn(2, 4))
    overwritten = {each.overwrites for each in graph.operations}
    assert not overwritten & {*graph.held}


def test_views_are_no_operations() -> None:
    class Views(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.linear(x).view(2, 2, 2).transpose(0, 1).unsqueeze(0)

    assert targets(captured(Views(), torch.randn(2, 4)), Phase.FORWARD) == ["aten.addmm.default"]


def test_frozen_parameters_have_no_gradient() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    model[0].requires_grad_(False)
    graph = captured(model, torch.randn(2, 4))
    assert [graph.storages[parameter].name for parameter, _ in graph.trained] == ["1.weight", "1.bias"]
    assert "0.weight" in names(graph, Kind.PARAMETER)


def test_tied_weights_are_one_storage_and_their_gradients_are_summed() -> None:
    model = nn.Sequential(nn.Linear(4, 4, bias=False), nn.ReLU(), nn.Linear(4, 4, bias=False))
    model[2].weight = model[0].weight
    graph = captured(model, torch.randn(2, 4))
    assert len(names(graph, Kind.PARAMETER)) == len(graph.trained) == 1
    sums = [each for each in graph.operations if each.target == ACCUMULATE or each.target == "aten.add.Tensor"]
    assert len(sums) == 1


def test_a_gradient_shared_by_two_parameters_is_copied() -> None:
    class Shift(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one, self.two = nn.Parameter(torch.zeros(4)), nn.Parameter(torch.zeros(4))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x + (self.one + self.two)

    graph = captured(Shift(), torch.randn(2, 4))
    gradients = [gradient for _, gradient in graph.trained]
    assert len(set(gradients)) == 2
    assert targets(graph, Phase.BACKWARD).count(ACCUMULATE) == 1


def test_a_transposed_gradient_is_copied_into_the_layout_of_its_parameter() -> None:
    class Transposed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.zeros(4, 3))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return (self.weight.t().contiguous() * x).sum()

    model, x = Transposed(), torch.randn(3, 4)
    graph = captured(model, x)
    model(x).backward()
    assert model.weight.grad is not None
    assert model.weight.grad.is_contiguous()
    assert ACCUMULATE in targets(graph)


def test_random_operations_are_marked() -> None:
    graph = captured(nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5)), torch.randn(2, 4))
    assert [each.target for each in graph.operations if each.random] == ["aten.bernoulli.p"]


def test_evaluation_mode_draws_nothing() -> None:
    graph = captured(nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5)).eval(), torch.randn(2, 4))
    assert not any(each.random for each in graph.operations)


def test_operations_inside_a_checkpoint_know_which_in_both_passes() -> None:
    class Checkpointed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second, self.third = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = checkpoint(self.first, x, use_reentrant=False)
            return self.third(checkpoint(self.second, x, use_reentrant=False))

    graph = captured(Checkpointed(), torch.randn(2, 4))
    for phase in Phase:
        numbers = {each.module: each.checkpoint for each in graph.operations if each.phase is phase and each.module}
        assert numbers == {"first": 0, "second": 1, "third": None}


def test_the_operations_of_one_autograd_node_share_a_frame() -> None:
    graph = captured(nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4)), torch.randn(2, 4))
    frames = [each.frame for each in graph.operations if each.phase is Phase.BACKWARD]
    assert targets(graph, Phase.BACKWARD)[:3] == ["aten.mm.default", "aten.mm.default", "aten.sum.dim_IntList"]
    assert frames[0] == frames[1] == frames[2] != frames[3]
    assert all(each.frame is None for each in graph.operations if each.phase is Phase.FORWARD)


def test_flops_of_a_product_are_counted_in_both_passes() -> None:
    graph = captured(nn.Linear(8, 16), torch.randn(4, 8))
    flops = [each.flops for each in graph.operations if each.flops]
    assert flops == [2 * 4 * 8 * 16] * 2


def test_flops_of_a_convolution_are_counted(small: Graph) -> None:
    assert operation(small, "aten.convolution.default").flops == 2 * (2 * 4 * 8 * 8) * (3 * 3 * 3)


def test_equal_layers_have_equal_signatures() -> None:
    graph = captured(nn.Sequential(*[nn.Linear(4, 4) for _ in range(3)]), torch.randn(2, 4))
    products = [each.signature for each in graph.operations if each.target == "aten.addmm.default"]
    assert len(products) == 3
    assert len(set(products)) == 1


def test_channels_last_sizes_and_signatures_are_those_of_the_layout() -> None:
    x = torch.randn(2, 3, 8, 8)
    plain = captured(Small(), x)
    last = captured(Small().to(memory_format=torch.channels_last), x.to(memory_format=torch.channels_last))
    convolutions = [operation(graph, "aten.convolution.default").signature for graph in (plain, last)]
    assert convolutions[0] != convolutions[1]
    assert ACCUMULATE not in targets(last)


def test_autocast_inside_the_forward_is_seen() -> None:
    class Mixed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            with torch.autocast("cpu", torch.bfloat16):
                return self.linear(x)

    graph = captured(Mixed(), torch.randn(2, 4))
    (product,) = operation(graph, "aten.addmm.default").outputs
    assert graph.storages[product].dtype == "bfloat16"
    assert graph.storages[product].size_bytes == 2 * 4 * 2


def test_two_captures_of_one_model_are_equal() -> None:
    model, x = Small(), torch.randn(2, 3, 8, 8)
    assert captured(model, x).digest() == captured(model, x).digest()


def test_another_batch_size_is_another_graph() -> None:
    model = Small()
    graphs = [captured(model, torch.randn(size, 3, 8, 8)) for size in (2, 4)]
    assert graphs[0].digest() != graphs[1].digest()
    assert targets(graphs[0]) == targets(graphs[1])


def test_a_captured_graph_survives_its_file(small: Graph) -> None:
    assert Graph.from_json(small.to_json()) == small


def counting() -> nn.Module:
    class Counting(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 4)
            self.register_buffer("count", torch.zeros((), dtype=torch.int64))
            self.register_buffer("last", torch.zeros(2, 4))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.count += 1
            self.last.copy_(x)
            return self.linear(x)

    return Counting()


class ReturnsItsCounter(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.register_buffer("count", torch.zeros((), dtype=torch.int64))

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        self.count += 1
        return self.linear(x), self.count


MODELS = {
    "counter": (counting, (2, 4)),
    "counter that is returned": (ReturnsItsCounter, (2, 4)),
    "attention": (lambda: nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), (2, 3, 8)),
    "tied": (lambda: nn.Sequential(*[nn.Linear(4, 4)] * 3), (2, 4)),
}


@pytest.mark.parametrize(("make", "shape"), MODELS.values(), ids=MODELS)
def test_every_value_is_live_when_it_is_read_and_gone_at_the_end(make: type[nn.Module], shape: tuple[int, ...]) -> None:
    assert_values_are_live_when_read(captured(make(), torch.randn(shape)))


def assert_values_are_live_when_read(graph: Graph) -> None:
    program = identity_program(graph)
    live = {*graph.resident}
    for instructions, arriving in ((program.forward, ()), (program.backward, graph.tangents)):
        live |= {*arriving}
        for instruction in instructions:
            if isinstance(instruction, Free):
                live.remove(instruction.storage)
            elif isinstance(instruction, Compute):
                each = graph.operations[instruction.operation]
                assert {*each.inputs} <= live, each.name
                live = (live | {*each.outputs}) - {each.overwrites}
    assert live == {*graph.resident, *graph.held}


class Normalizes(nn.Module):
    """Updates a buffer and uses its new value, as vector quantizers and running scales do."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.register_buffer("scale", torch.ones(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.linear(x)
        self.scale.mul_(0.9).add_(hidden.detach().abs().mean(0), alpha=0.1)
        return hidden / self.scale


@pytest.mark.parametrize("make", [lambda: nn.BatchNorm1d(4), Normalizes], ids=["BatchNorm", "scale"])
def test_a_new_buffer_value_lives_as_long_as_it_is_needed(make: type[nn.Module]) -> None:
    assert_values_are_live_when_read(captured(make(), torch.randn(2, 4)))
