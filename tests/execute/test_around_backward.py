"""What is set otherwise around a backward pass than a captured call was made for is said."""

import pytest
import torch
from torch import nn

import memfit

BATCH = torch.randn(4, 8)


def test_a_backward_pass_inside_an_autocast_block_is_said_once() -> None:
    model = memfit.fit(nn.Linear(8, 8), BATCH, progress=False)
    with torch.autocast("cpu", torch.bfloat16), pytest.warns(UserWarning, match="inside an autocast block"):
        model(BATCH).float().sum().backward()
    model(BATCH).sum().backward()


def test_calls_that_share_casts_are_said_once() -> None:
    model = memfit.fit(nn.Linear(8, 8), BATCH, progress=False)
    for cached in (False, True):
        with torch.autocast("cpu", torch.bfloat16, cache_enabled=cached):
            loss = (model(BATCH) - model(BATCH.sin())).float().sum()
        if cached:
            with pytest.warns(UserWarning, match="under autocast go back in one pass"):
                loss.backward()
        else:
            loss.backward()


def test_deterministic_algorithms_switched_before_backward_are_refused_by_name() -> None:
    model = memfit.fit(nn.Linear(8, 8), BATCH, progress=False)
    loss = model(BATCH).sum()
    torch.use_deterministic_algorithms(True)
    try:
        with pytest.raises(memfit.ExecutionError, match="deterministic algorithms were switched"):
            loss.backward()
    finally:
        torch.use_deterministic_algorithms(False)


def test_kernels_switched_before_backward_are_said_once() -> None:
    model = memfit.fit(nn.Linear(8, 8), BATCH, progress=False)
    loss = model(BATCH).sum()
    torch.backends.mkldnn.set_flags(False)
    try:
        with pytest.warns(UserWarning, match="switched between forward and backward of Linear"):
            loss.backward()
        model(BATCH).sum().backward()
    finally:
        torch.backends.mkldnn.set_flags(True)
