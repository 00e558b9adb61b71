import copy
from collections.abc import Collection
from typing import Any

import pytest
import torch
from capturing import captured
from torch import fx, nn

from memfit.capture.alternatives import extend
from memfit.capture.lower import lower
from memfit.capture.nodes import FORM_OF, REMAKES, is_alternative
from memfit.capture.sample import Sample
from memfit.capture.trace import traced
from memfit.execute.attach import attach
from memfit.execute.compiled import CompiledCall
from memfit.ir import Graph, Kind, Operation, Phase
from memfit.measure.cost import CostCache
from memfit.measure.probe import measured_costs
from memfit.ops.calls import faithful_call
from memfit.ops.lean import in_memory_order, is_backward
from memfit.ops.registry import LEAN_OPERATORS
from memfit.tensors import tensors_in


def extended(model: nn.Module, sample: Any, techniques: Collection[str] = ("lean",)) -> Graph:
    with traced(model, Sample.of(sample)) as joint:
        extend(joint, techniques)
        return lower(joint)


def conv_net() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 16, 3, padding=1),
        nn.BatchNorm2d(16),
        nn.ReLU(inplace=True),
        nn.MaxPool2d(3, 2, 1),
        nn.Dropout(0.3),
        nn.Conv2d(16, 16, 3),
        nn.ReLU6(),
        nn.Conv2d(16, 16, 3),
        nn.LeakyReLU(),
        nn.Flatten(),
        nn.Linear(16 * 12 * 12, 10),
    )


def images() -> torch.Tensor:
    return torch.randn(4, 3, 32, 32)


@pytest.fixture(scope="module")
def conv_graph() -> Graph:
    return extended(conv_net(), images())


def named(graph: Graph, function: str) -> list[Operation]:
    return [each for each in graph.alternatives if each.target.endswith(f":{function}")]


def test_the_model_s_own_operations_stay_as_they_are(conv_graph: Graph) -> None:
    plain = captured(conv_net(), images())
    assert conv_graph.operations == plain.operations
    assert conv_graph.storages[: len(plain.storages)] == plain.storages
    assert (conv_graph.held, conv_graph.trained, conv_graph.resident) == (plain.held, plain.trained, plain.resident)


def test_without_a_technique_there_are_no_alternatives() -> None:
    assert extended(conv_net(), images(), ()).alternatives == ()
    assert extended(conv_net(), images(), ("recompute",)).alternatives == ()


def test_dropout_is_offered_in_bits(conv_graph: Graph) -> None:
    (pack,) = [each for each in named(conv_graph, "pack") if each.technique == "dropout"]
    bits = conv_graph.storages[pack.outputs[0]]
    assert (bits.kind, bits.size_bytes, bits.name) == (Kind.ACTIVATION, 4 * 16 * 16 * 16 // 8, "div.bits")
    (unpack,) = named(conv_graph, "unpack_noise")
    assert (unpack.inputs, unpack.outputs) == (pack.outputs, pack.inputs)
    forward, backward = named(conv_graph, "apply_noise")
    assert (forward.phase, backward.phase) == (Phase.FORWARD, Phase.BACKWARD)
    assert pack.outputs[0] in forward.inputs
    assert pack.outputs[0] in backward.inputs


def test_max_pooling_is_offered_in_bytes_and_without_its_input(conv_graph: Graph) -> None:
    (pack,) = named(conv_graph, "pack_indices")
    (pool,) = [each for each in conv_graph.operations if each.target == "aten.max_pool2d_with_indices.default"]
    assert pack.inputs == (pool.outputs[1],)
    assert conv_graph.storages[pack.outputs[0]].size_bytes * 8 == conv_graph.storages[pool.outputs[1]].size_bytes
    (backward,) = named(conv_graph, "backward_from_places")
    assert pack.outputs[0] in backward.inputs
    assert not set(backward.inputs) & {*pool.inputs, *pool.outputs}


def test_an_alternative_of_the_backward_makes_what_an_operation_of_the_model_makes(conv_graph: Graph) -> None:
    made = {each.outputs for each in conv_graph.operations if each.phase is Phase.BACKWARD}
    backward = [each for each in conv_graph.alternatives if each.phase is Phase.BACKWARD]
    assert backward
    assert all(each.outputs in made for each in backward)


def test_an_alternative_reads_only_what_exists(conv_graph: Graph) -> None:
    """What it reads is the model's own, or made by an alternative before it."""
    exist = {index for each in conv_graph.operations for index in each.outputs}
    exist |= {*conv_graph.resident, *conv_graph.tangents}
    for alternative in conv_graph.alternatives:
        assert exist.issuperset(alternative.inputs)
        exist |= set(alternative.outputs)


def test_alternatives_carry_the_module_they_belong_to(conv_graph: Graph) -> None:
    assert {each.module for each in conv_graph.alternatives if each.technique == "dropout"} == {"4"}
    assert {each.module for each in conv_graph.alternatives if each.technique == "max_pool"} == {"3"}


def test_alternatives_can_be_measured(conv_graph: Graph, tmp_path: Any) -> None:
    signatures = {each.signature for each in conv_graph.alternatives}
    costs = measured_costs(signatures, device="cpu", timed=True, cache=CostCache("here", tmp_path))
    assert costs.keys() == signatures
    for alternative in conv_graph.alternatives:
        sizes = tuple(conv_graph.storages[index].size_bytes for index in alternative.outputs)
        assert costs[alternative.signature].output_bytes == sizes


def test_a_graph_with_alternatives_comes_back_from_its_text(conv_graph: Graph) -> None:
    assert Graph.from_json(conv_graph.to_json()) == conv_graph


def test_names_are_unique(conv_graph: Graph) -> None:
    names = [each.name for each in (*conv_graph.operations, *conv_graph.alternatives)]
    assert len(set(names)) == len(names)


class _Checking(fx.Interpreter):
    """Runs a joint graph with all its alternatives, and compares each with what it stands for."""

    def __init__(self, module: fx.GraphModule, exact: set[str]) -> None:
        super().__init__(module, garbage_collect_values=False)
        self.exact = exact
        self.checked = 0

    def run_node(self, n: fx.Node) -> Any:
        result = super().run_node(n)
        if REMAKES in n.meta and n.meta["memfit_technique"] in self.exact:
            expected = self.env[n.meta[REMAKES]]
            for made, own in zip(tensors_in(result), tensors_in(expected), strict=True):
                assert torch.equal(in_memory_order(made).view(torch.uint8), in_memory_order(own).view(torch.uint8))
            self.checked += 1
        return result

    def call_function(self, target: Any, args: Any, kwargs: Any) -> Any:
        return faithful_call(target)(*args, **kwargs)


def checked_alternatives(model: nn.Module, sample: Any) -> int:
    """Run every alternative beside the model's own operations; the number of values compared."""
    exact = {operator.name for operator in LEAN_OPERATORS if operator.exact and operator.certain}
    call = Sample.of(sample)
    with traced(model, call) as joint:
        extend(joint, ("lean",))
        graph_module = joint.graph_module
    tensors = {**dict(model.named_parameters(remove_duplicate=False)), **dict(model.named_buffers())}
    leaves = [*call.args, *call.kwargs.values()]

    def value(node: fx.Node) -> Any:
        description = node.meta["desc"]
        if hasattr(description, "target"):
            return tensors[description.target.removeprefix("model.")].detach().clone()
        example = node.meta["val"]
        is_tangent = type(description).__name__ == "TangentAOTInput"
        return torch.randn(example.shape, dtype=example.dtype) if is_tangent else leaves[description.idx]

    values = [value(node) for node in graph_module.graph.nodes if node.op == "placeholder"]
    checking = _Checking(graph_module, exact)
    with torch.no_grad():
        checking.run(*values, enable_io_processing=False)
    return checking.checked


@pytest.mark.parametrize("memory_format", [torch.contiguous_format, torch.channels_last], ids=str)
def test_every_exact_alternative_makes_the_same_bits(memory_format: torch.memory_format) -> None:
    model = conv_net().to(memory_format=memory_format)
    assert checked_alternatives(model, images().to(memory_format=memory_format)) >= 4


def test_the_alternatives_of_half_precision_make_the_same_bits() -> None:
    assert checked_alternatives(conv_net().bfloat16(), images().bfloat16()) >= 4


def test_phases_are_those_of_the_nodes_they_stand_for() -> None:
    with traced(conv_net(), Sample.of(images())) as joint:
        extend(joint, ("lean",))
        for node in joint.graph_module.graph.nodes:
            if is_alternative(node):
                of = node.meta[REMAKES] if REMAKES in node.meta else node.meta[FORM_OF][0]
                assert is_backward(node) == is_backward(of)


class Masked(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(64, 64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.where(x > 0.1, self.linear(x), x).square()


def test_a_mask_of_bool_is_offered_in_bits() -> None:
    graph = extended(Masked(), torch.randn(128, 64))
    pack, unpack = graph.alternatives
    assert (pack.technique, unpack.technique) == ("bits", "bits")
    assert graph.storages[pack.outputs[0]].size_bytes == 128 * 64 // 8
    assert graph.storages[unpack.outputs[0]].dtype == "bool"
    assert checked_alternatives(Masked(), torch.randn(128, 64)) == 1


@pytest.fixture(scope="module")
def gpt2() -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(
        n_layer=2, n_embd=32, n_head=2, vocab_size=100, n_positions=64, bos_token_id=0, eos_token_id=0,
        use_cache=False, attn_implementation="eager",
    )  # fmt: skip
    config.loss_type = "ForCausalLM"
    return GPT2LMHeadModel(config)


def tokens() -> dict[str, torch.Tensor]:
    words = torch.randint(100, (2, 64))
    return {"input_ids": words, "labels": words}


def test_a_language_model_keeps_every_dropout_in_bits(gpt2: nn.Module) -> None:
    graph = extended(gpt2, tokens())
    dropouts = 1 + 2 * 3  # the embedding's; of each layer attention, its output and the feed-forward's
    assert len([each for each in named(graph, "pack") if each.technique == "dropout"]) == dropouts
    assert len(named(graph, "unpack_noise")) == dropouts
    assert len(named(graph, "apply_noise")) == 2 * dropouts
    assert checked_alternatives(gpt2, tokens()) >= 3 * dropouts


@pytest.mark.parametrize("technique", ["16-bit", "8-bit", "4-bit"])
def test_kept_activations_are_offered_with_fewer_bits(technique: str) -> None:
    graph = extended(conv_net(), images(), (technique,))
    bits = int(technique.removesuffix("-bit"))
    packs, unpacks = graph.alternatives[::2], graph.alternatives[1::2]
    assert len(packs) == len(unpacks) > 3
    for pack, unpack in zip(packs, unpacks, strict=True):
        assert (unpack.inputs, unpack.outputs) == (pack.outputs, pack.inputs)
        (whole,), (form,) = pack.inputs, pack.outputs
        assert graph.storages[whole].kind is Kind.ACTIVATION
        share = graph.storages[form].size_bytes / graph.storages[whole].size_bytes
        assert bits / 32 <= share <= bits / 32 + 0.03


@pytest.mark.parametrize("memory_format", [torch.contiguous_format, torch.channels_last], ids=str)
def test_unused_alternatives_change_nothing(memory_format: torch.memory_format) -> None:
    """Also not in the graphs that run: the same bits as the eager run."""

    def compiled(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> CompiledCall:
        with traced(model, Sample(args, kwargs), with_hooks=False) as joint:
            extend(joint, ("lean", "16-bit", "8-bit", "4-bit"))
            return CompiledCall(joint, lower(joint))

    eager = conv_net().to(memory_format=memory_format)
    planned = copy.deepcopy(eager)
    batch = images().to(memory_format=memory_format)
    attach(planned, compiled).capture((batch,), {})
    results = []
    for model in (eager, planned):
        torch.manual_seed(3)
        loss = model(batch).square().mean()
        loss.backward()
        results.append([loss.detach(), *(each.grad for each in model.parameters()), *model.buffers()])
    assert all(torch.equal(one, other) for one, other in zip(*results, strict=True))


class MixedLayouts(nn.Module):
    """A convolution whose weight has its channels last, between contiguous values."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(3, 8, 3, padding=1), nn.Conv2d(8, 8, 3, padding=1)
        self.to(memory_format=torch.channels_last)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(self.first(x).contiguous().flip(1)).contiguous()


def test_an_alternative_that_makes_another_layout_is_left_out() -> None:
    graph = extended(MixedLayouts(), torch.randn(4, 3, 16, 16))
    assert not named(graph, "convolution_backward")
