"""What is asked of nodes of a joint graph."""

import pytest
import torch
from torch import fx

from memfit.capture.nodes import is_random


@pytest.mark.parametrize(("dropped", "draws"), [(0.0, False), (0.1, True)])
def test_fused_attention_draws_if_it_drops_something(dropped: float, draws: bool) -> None:
    graph = fx.Graph()
    query = graph.placeholder("query")
    aten = torch.ops.aten
    efficient, flash = aten._scaled_dot_product_efficient_attention, aten._scaled_dot_product_flash_attention
    assert is_random(graph.call_function(flash.default, (query, query, query, dropped))) is draws
    assert is_random(graph.call_function(efficient.default, (query, query, query, None, True, dropped))) is draws
    assert is_random(graph.call_function(aten.native_dropout.default, (query, dropped, True)))


def test_what_is_left_out_is_the_default() -> None:
    graph = fx.Graph()
    query = graph.placeholder("query")
    assert not is_random(graph.call_function(torch.ops.aten._scaled_dot_product_flash_attention.default, (query,) * 3))
