"""What there is to try: numbers of micro-batches, precisions, ways to update. What is not tried says why."""

import itertools
from collections.abc import Iterator
from typing import Any

from torch import nn
from torch.optim import Optimizer

from memfit.errors import InvalidInput, first_line
from memfit.recipe import TECHNIQUES
from memfit.step.choice import describe
from memfit.step.ledger import Ledger
from memfit.step.mixing import check_separable
from memfit.step.optimizers import parameters_of
from memfit.step.policy import StepPolicy
from memfit.step.updater import check_updates
from memfit.step.wishes import AUTOCASTS, Wishes


def counts(model: nn.Module, rows: int, wishes: Wishes, ledger: Ledger) -> Iterator[int]:
    """Numbers of micro-batches, each about twice the last; divisors of the batch where there are some."""
    if "micro_batches" in wishes.fixed:
        yield wishes.fixed["micro_batches"]
        return
    yield 1
    try:
        if "batch-statistics" not in wishes.allow:
            check_separable(model)
    except InvalidInput as error:
        ledger.lose("micro-batches", f"refused: {_reason(error)}")
        return
    target = 2
    while target < rows:
        divisors = (each for each in range(target, min(2 * target, rows)) if not rows % each)
        yield next(divisors, target)
        target *= 2
    if rows > 1:
        yield rows


def precisions(wishes: Wishes, ledger: Ledger) -> Iterator[str | None]:
    """The model's own precision first."""
    if "precision" in wishes.fixed:
        yield wishes.fixed["precision"]
        return
    yield None
    for name in AUTOCASTS:
        if name in wishes.allow:
            yield name
        else:
            ledger.lose(name, f"not exact and not allowed; allow=({name!r},) lets it be chosen")
    ledger.lose("pure-bf16", 'not exact; precision="pure-bf16" fixes it')
    missing = [each for each in TECHNIQUES if each not in wishes.recipe.allow]
    if missing:
        ledger.lose(f"plans with {', '.join(missing)}", "not allowed; allow=(...) names what plans may do")
    ledger.lose("a low-bit optimizer", "another optimizer than yours; make one of torchao and give it")


def ways_to_update(model: nn.Module, optimizer: Optimizer, wishes: Wishes, ledger: Ledger) -> Iterator[dict[str, Any]]:
    """Where the optimizer's state is, and when it is used."""
    tiers: list[str | None] = [None]
    if "state_tier" in wishes.fixed:
        tiers = [wishes.fixed["state_tier"]]
    elif next(iter(parameters_of(optimizer))).device.type != "cpu":
        tiers.append("host")
    elif wishes.directory is not None:
        tiers.append("disk")
    else:
        ledger.lose("optimizer state in the disk tier", "not allowed; directory=... says where")
    updates = [wishes.fixed["update"]] if "update" in wishes.fixed else ["after", "inside"]
    for tier, update in itertools.product(tiers, updates):
        way = {"state_tier": tier, "update": update}
        try:
            check_updates(model, optimizer, wishes.policy(**way))
        except InvalidInput as error:
            words = describe(StepPolicy(update=update), planned=False) if tier is None else f"{tier} tier, {update}"
            ledger.lose(words, f"refused: {_reason(error)}")
            continue
        yield way


def way_of(policy: StepPolicy) -> dict[str, Any]:
    """How a policy updates."""
    return {"state_tier": policy.state_tier, "update": policy.update}


def _reason(error: InvalidInput) -> str:
    return first_line(error).partition(";")[0]
