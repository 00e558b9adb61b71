"""One plan for all ranks.

    every rank: capture -> say what was found        first rank: compare -> plan -> say the plan
    every rank: check the plan's digest -> apply     (`fit`: and say whether that worked)

Ranks that run by different plans would still compute the same numbers, but a rank with another graph, another torch or
another shape is a mistake that shows hours later, as a hang. So all is compared before anything is planned.
"""

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from importlib.metadata import version
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from memfit import api
from memfit.capture.sample import Sample
from memfit.describe import describe_sample, describe_states
from memfit.distributed.board import PATIENCE_S, Board
from memfit.distributed.buckets import BucketPolicy
from memfit.distributed.share import rank_memory
from memfit.distributed.wrapped import inner
from memfit.errors import CaptureError, InvalidInput, RankError, first_line
from memfit.execute.attach import planned_forwards, remove, removed
from memfit.measure.optimizer import OptimizerLike, optimizer_name
from memfit.plan.plan import Plan
from memfit.prepare import planned_graph, traced_for
from memfit.recipe import EXACT, Budget, Recipe

_NOT_WHOLE = "cannot be captured whole"


def plan(
    model: nn.Module,
    sample: Any,
    *,
    budget: Budget,
    optimizer: OptimizerLike | None = None,
    shard: str | None = "ddp",
    buckets: BucketPolicy | None = None,
    group: Any = None,
    patience: float = PATIENCE_S,
    **keywords: Any,
) -> Plan:
    """Plan on the first rank, for all: the same plan is returned on every rank of `group`.

    Call it on every rank, each with its share of a batch. Ranks whose model, sample, torch or options differ make all
    of them raise the same `RankError`. The budget is one rank's: with `shard="ddp"` the buckets of DDP are part of
    it, with "zero1" the optimizer's state is this rank's share, and None counts the model alone. `patience` is how
    many seconds a rank may be without a sign of life; the first may plan as long as it likes. Without a process group
    it is `memfit.plan`, whose keywords it takes.
    """
    model = inner(model)
    if not is_several(group):
        return api.plan(model, sample, budget=budget, optimizer=optimizer, **keywords)
    board = Board(group, patience_s=patience)
    with board.busy():
        return _agreed_plan(board, model, sample, budget, optimizer, shard, buckets, keywords)


def fit(
    model: nn.Module,
    sample: Any,
    budget: Budget = None,
    *,
    optimizer: OptimizerLike | None = None,
    shard: str | None = "ddp",
    buckets: BucketPolicy | None = None,
    group: Any = None,
    patience: float = PATIENCE_S,
    **keywords: Any,
) -> nn.Module:
    """Plan once for all ranks and apply on each: `memfit.fit` for a data-parallel run.

    The model may be inside DistributedDataParallel already, or put there afterwards; what was given is returned. If
    the plan cannot be applied on one rank, it is applied on none and all raise the same error. Keywords as for
    `plan`.
    """
    own = inner(model)
    if not is_several(group):
        api.fit(own, sample, budget, optimizer=optimizer, **keywords)
        return model
    board = Board(group, patience_s=patience)
    with board.busy():
        if budget is None and not keywords.get("recompute"):
            _compared(board, _findings(own, sample, _recipe(keywords), {"budget": None}))
            _together(board, own, lambda: api.fit(own, sample, optimizer=optimizer, **keywords))
            return model
        agreed = _agreed_plan(board, own, sample, budget, optimizer, shard, buckets, keywords)
        _together(board, own, lambda: api.apply(agreed, own, sample))
    return model


def is_several(group: Any = None) -> bool:
    """Whether there is a process group with more than one rank."""
    if not dist.is_available() or not dist.is_initialized():
        return False
    if dist.get_rank(group) < 0:
        raise InvalidInput("this rank is not in the group that was given; call it on the ranks of the group alone")
    return dist.get_world_size(group) > 1


def _agreed_plan(
    board: Board,
    model: nn.Module,
    sample: Any,
    budget: Budget,
    optimizer: OptimizerLike | None,
    shard: str | None,
    buckets: BucketPolicy | None,
    keywords: Mapping[str, Any],
) -> Plan:
    options = {"budget": budget, "optimizer": optimizer and optimizer_name(optimizer), "shard": shard, **keywords}
    findings = _findings(model, sample, _recipe(keywords), options)

    def decide(words: Sequence[str]) -> str:
        _compare(words)
        memory = rank_memory(model, optimizer, shard=shard, world_size=board.size, buckets=buckets)
        made = api.plan(model, sample, budget=budget, optimizer=memory, **keywords).to_json()
        return json.dumps({"plan": made, "digest": _digest(made)})

    said = json.loads(board.decided(json.dumps(findings), decide))
    if _digest(said["plan"]) != said["digest"]:
        raise RankError(f"the plan arrived damaged on rank {board.rank}: its digest differs from the first rank's")
    return Plan.from_json(said["plan"])


def _compared(board: Board, findings: Mapping[str, Any]) -> None:
    def decide(words: Sequence[str]) -> str:
        _compare(words)
        return ""

    board.decided(json.dumps(findings), decide)


def _together(board: Board, model: nn.Module, act: Any) -> None:
    """Do something to the model of every rank, or of none."""
    failure: BaseException | None = None
    before = planned_forwards(model)
    try:
        act()
    except Exception as error:
        failure = error

    def decide(words: Sequence[str]) -> str:
        _raise_failures("could not run the model by the plan", words)
        return ""

    try:
        board.decided("" if failure is None else _told(failure), decide)
    except RankError as error:
        if not before:
            remove(model)
        raise error from failure


def _findings(model: nn.Module, sample: Any, recipe: Recipe, options: Mapping[str, Any]) -> dict[str, Any]:
    """What all ranks must have in common; a rank that fails says so in its place, see Note [Nobody is left waiting]."""
    try:
        example = Sample.of(sample)
        return {
            "version of memfit": version("memfit"),
            "version of torch": torch.__version__,
            "model": [type(model).__name__, *describe_states(model)],
            "sample": describe_sample(example),
            "options": {name: str(value) for name, value in options.items() if not callable(value)},
            **_graph_findings(model, example, recipe),
        }
    except Exception as error:  # whatever it is: the others must not wait for this rank
        return {"failure": _told(error)}


def _graph_findings(model: nn.Module, example: Sample, recipe: Recipe) -> dict[str, str]:
    with removed(model):
        try:
            with traced_for(model, example, recipe, with_hooks=False) as joint:
                return {"graph": planned_graph(joint, recipe).digest()}
        except CaptureError as error:
            return {"graph": _NOT_WHOLE, "reason": _told(error)}  # planned region by region, if so on all ranks


def _compare(words: Sequence[str]) -> None:
    """Refuse ranks that differ, by rank and by what differs."""
    findings = [json.loads(word) for word in words]
    reasons = [each.pop("reason", "") for each in findings]
    failures = [each.get("failure", "") for each in findings]
    is_whole_somewhere = any(each.get("graph") != _NOT_WHOLE for each in findings)
    _raise_failures("could not capture the model", reasons if is_whole_somewhere and any(reasons) else failures)
    differing = [line for rank, each in enumerate(findings) for line in _differences(rank, each, findings[0])]
    if differing:
        more = f"; and {len(differing) - 3} more" if len(differing) > 3 else ""
        raise RankError(
            f"the ranks do not run the same: {'; '.join(differing[:3])}{more}. Build the same model with the same "
            "options and give samples of the same shape on every rank"
        )


def _differences(rank: int, own: Mapping[str, Any], first: Mapping[str, Any]) -> Iterator[str]:
    for name, value in own.items():
        if value != first[name]:
            found, expected = _apart(value, first[name])
            yield f"rank {rank} differs from rank 0 in the {name} ({found} against {expected})"
            return  # the first difference explains the others


def _apart(value: Any, expected: Any) -> tuple[str, str]:
    """The part of two findings in which they differ."""
    if isinstance(value, list):
        value, expected = _first_apart([*enumerate(value)], [*enumerate(expected)])
    elif isinstance(value, dict):
        value, expected = _first_apart([*value.items()], [*expected.items()])
    return str(value), str(expected)


def _first_apart(values: list[Any], expected: list[Any]) -> tuple[Any, Any]:
    own = next((value for place, value in values if (place, value) not in expected), "nothing more")
    other = next((value for place, value in expected if (place, value) not in values), "nothing more")
    return own, other


def _raise_failures(what: str, failures: Sequence[str]) -> None:
    failed = [f"rank {rank} {what}: {failure}" for rank, failure in enumerate(failures) if failure]
    if failed:
        more = f"; and {len(failed) - 2} more ranks" if len(failed) > 2 else ""
        raise RankError(f"{'; '.join(failed[:2])}{more}. No rank goes on")


def _told(error: BaseException) -> str:
    return f"{type(error).__name__}: {first_line(error)}"


def _recipe(keywords: Mapping[str, Any]) -> Recipe:
    """As far as it decides what is captured."""
    allow = keywords.get("allow", EXACT)
    return Recipe(
        allow=(allow,) if isinstance(allow, str) else tuple(allow),
        **{name: keywords[name] for name in ("outputs", "backward_from") if name in keywords},
    )


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()
