"""What an unfinished inner loop remembers, as plain data that can be saved and taken up."""

import dataclasses
from typing import TYPE_CHECKING, Any

from memfit.multilevel.records import Snapshot, StepRecord

if TYPE_CHECKING:
    from memfit.multilevel.problems import Problem


def inner_loop_state(problem: "Problem") -> dict[str, Any] | None:
    """Steps, scores and the snapshot of an inner loop; None where nobody will ask for them."""
    awaited = any(problem.engine.ready[upper][problem] for upper in problem.engine.dependencies.above[problem])
    if problem.inner_loop_start and not awaited:
        return None
    records = problem.trajectory or ([problem.record] if problem.record is not None else [])
    return {
        "records": [_packed_record(problem, record) for record in records],
        "is_trajectory": bool(problem.trajectory),
        "score": {upper.name: score for upper, score in problem.score.items()},
        "snapshot": None if problem.snapshot is None else _packed(problem, problem.snapshot),
    }


def load_inner_loop(problem: "Problem", state: dict[str, Any] | None) -> None:
    """Take up an inner loop; without one, nothing is remembered."""
    problem.record, problem.trajectory, problem.score, problem.snapshot = None, [], {}, None
    if state is None:
        return
    records = [_unpacked_record(problem, packed) for packed in state["records"]]
    problem.record = records[-1] if records else None
    problem.trajectory = records if state["is_trajectory"] else []
    by_name = {other.name: other for other in problem.engine.problems}
    problem.score = {by_name[name]: score for name, score in state["score"].items()}
    problem.snapshot = None if state["snapshot"] is None else _unpacked(problem, state["snapshot"])


def _packed_record(problem: "Problem", record: StepRecord) -> dict[str, Any]:
    fields = {field.name: getattr(record, field.name) for field in dataclasses.fields(record)}
    return fields | {"before": None if record.before is None else _packed(problem, record.before)}


def _unpacked_record(problem: "Problem", packed: dict[str, Any]) -> StepRecord:
    before = packed["before"]
    return StepRecord(**packed | {"before": None if before is None else _unpacked(problem, before)})


def _packed(problem: "Problem", snapshot: Snapshot) -> dict[str, Any]:
    """A snapshot, with numbers of parameters in the place of the parameters themselves."""
    numbers = {id(parameter): number for number, parameter in enumerate(problem.parameter_list)}
    return {
        "parameters": snapshot.parameters,
        "buffers": snapshot.buffers,
        "groups": snapshot.groups,
        "state": {numbers[id(parameter)]: state for parameter, state in snapshot.state.items()},
    }


def _unpacked(problem: "Problem", packed: dict[str, Any]) -> Snapshot:
    snapshot = Snapshot(problem)
    snapshot.parameters, snapshot.buffers = packed["parameters"], packed["buffers"]
    snapshot.groups = packed["groups"]
    snapshot.state = {problem.parameter_list[number]: state for number, state in packed["state"].items()}
    return snapshot
