"""Runs a multilevel program: who steps when, validation, stopping, saving."""

import contextlib
import logging
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from rich.progress import Progress

from memfit.distributed.ranks import Ranks
from memfit.errors import InvalidInput
from memfit.multilevel.budgets import plan_levels
from memfit.multilevel.configs import EngineConfig
from memfit.multilevel.dependencies import Dependencies, Given
from memfit.multilevel.estimate import CycleEstimate, estimate_cycle
from memfit.multilevel.loggers import Nowhere, Sink, make_sink, write_metrics
from memfit.multilevel.openness import Openness
from memfit.multilevel.problems import Problem
from memfit.multilevel.records import Snapshot
from memfit.multilevel.saving import load_state, save_state
from memfit.multilevel.steps import make_step
from memfit.multilevel.stopping import EarlyStopping
from memfit.multilevel.updates import check_gradient_is_complete
from memfit.step.random_state import random_state, set_random_state

log = logging.getLogger(__name__)


class Engine:
    """Problems, who depends on whom, and the loop over them.

    `dependencies={"u2l": {upper: [lower]}, "l2u": {lower: [upper]}}`: in `u2l` the loss of the lower problem uses
    the upper one's parameters, in `l2u` the loss of the upper one uses the lower one's. The lowest problems step
    in every iteration; those above after `unroll_steps` steps of all problems that their loss uses. Override
    `validation` to return metrics every `valid_step` iterations.
    """

    def __init__(
        self,
        problems: Sequence[Problem],
        config: EngineConfig | None = None,
        dependencies: Mapping[str, Given] | None = None,
        env: Any = None,
    ) -> None:
        self.config = config if config is not None else EngineConfig()
        self.problems = list(problems)
        self.env = env
        self.global_step = 0
        self.dependencies = Dependencies(self.problems, dependencies)
        self.leaves = self.dependencies.leaves()
        self.ranks = Ranks(
            distributed=self.config.is_distributed,
            backend=self.config.backend,
            on_cuda=any(torch.device(problem.device or "cpu").type == "cuda" for problem in self.problems),
        )
        for problem in self.problems:
            problem.initialize(self)
        self._introduce()
        self.routes = {problem: self.dependencies.route(problem) for problem in self.problems}
        self._differentiated = {leg.through for route in self.routes.values() for leg in route.legs}
        self.is_rehearsing = False  # on tensors without memory, for an estimate
        self._check_methods()
        for problem in self.problems:
            check_gradient_is_complete(problem)
        self.openness = Openness(self.problems)
        self.ready = {problem: dict.fromkeys(problem.lowers, False) for problem in self.problems}
        self.stopping = EarlyStopping(
            metric=self.config.early_stopping_metric,
            mode=self.config.early_stopping_mode,
            tolerance=self.config.early_stopping_tolerance,
        )
        self.sink: Sink = (
            make_sink(self.config.logger_type, self.config.logger_dir) if self.ranks.rank == 0 else Nowhere()
        )
        self.watch: Any = None  # told when steps begin and end
        self._needs_plans = any(problem.config.budget is not None for problem in self.problems)

    def validation(self) -> dict[str, Any] | None:
        """Metrics of the program so far; override it. Runs on every rank, the first one decides about stopping."""
        return None

    def run(self) -> None:
        """Step until `train_iters` iterations are done, counting those before a resume, or validation says stop."""
        self.train()
        with self._progress() as advance:
            while self.global_step < self.config.train_iters:
                self.train_step()
                advance()
                if self.global_step % self.config.valid_step == 0 and self.validate():
                    log.info("stopped early at step %d", self.global_step)
                    break
        self.openness.all()

    def train_step(self) -> None:
        """One iteration: a step of every lowest problem, and of those above whose turn it is."""
        self.make_plans()
        self.global_step += 1
        for leaf in self.leaves:
            self._advance(leaf)

    def make_plans(self) -> None:
        """Plan the levels that have a budget, if that was not done yet."""
        if self._needs_plans and not self.is_rehearsing:
            self._needs_plans = False
            plan_levels(self)

    def validate(self) -> bool:
        """Run `validation` and log it; True if it is time to stop."""
        self.openness.all()
        self.eval()
        metrics = self.validation() or {}
        self.train()
        if metrics and self.ranks.rank == 0:
            write_metrics(self.sink, "validation", metrics, step=self.global_step)
        return self.config.early_stopping and self.ranks.agreed(self.stopping.is_over(metrics))

    def estimate(self) -> CycleEstimate:
        """Predict the peak memory of one full cycle, for each level and in total; no parameter changes."""
        return estimate_cycle(self)

    def train(self) -> None:
        for problem in self.problems:
            problem.train()

    def eval(self) -> None:
        for problem in self.problems:
            problem.eval()

    def is_differentiated(self, problem: Problem) -> bool:
        """Whether a problem above differentiates through this one."""
        return problem in self._differentiated

    def is_implemented(self, name: str) -> bool:
        return callable(getattr(self, name, None))

    def save(self, path: str | Path) -> None:
        """Write everything that the next step depends on; call it between iterations. On several ranks, on all."""
        save_state(self._own_path(path), self.state_dict())

    def load(self, path: str | Path) -> None:
        """Go on exactly where a saved engine of the same set-up was."""
        self.load_state_dict(load_state(self._own_path(path)))

    def state_dict(self) -> dict[str, Any]:
        return {
            "global_step": self.global_step,
            "problems": {problem.name: problem.state_dict() for problem in self.problems},
            "ready": {
                problem.name: {lower.name: flag for lower, flag in flags.items()}
                for problem, flags in self.ready.items()
            },
            "stopping": self.stopping.state_dict(),
            "generators": random_state(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        saved, own = set(state["problems"]), {problem.name for problem in self.problems}
        if saved != own:
            raise InvalidInput(
                f"the saved engine has the problems {sorted(saved)}, this one {sorted(own)}; "
                "resume with the same set-up"
            )
        self.global_step = state["global_step"]
        for problem in self.problems:
            problem.load_state_dict(state["problems"][problem.name])
            for lower in problem.lowers:
                self.ready[problem][lower] = state["ready"][problem.name][lower.name]
        self.stopping.load_state_dict(state["stopping"])
        set_random_state(state["generators"])

    def _advance(self, problem: Problem) -> None:
        """A step of a problem whose lowers are ready, and of those above if its inner loop is complete."""
        if not all(self.ready[problem].values()):
            return
        if problem.inner_loop_start:
            self._start_inner_loop(problem)
        problem.count += 1
        self._step(problem, scheduled=not self._rolls_back(problem))
        self.ready[problem] = dict.fromkeys(self.ready[problem], False)
        if problem.count % problem.config.unroll_steps == 0 and problem.count > problem.config.warmup_steps:
            for upper in self.dependencies.above[problem]:
                self.ready[upper][problem] = True
                self._advance(upper)
            problem.inner_loop_start = True
            if self._rolls_back(problem):
                self._redo(problem)

    def _start_inner_loop(self, problem: Problem) -> None:
        problem.inner_loop_start = False
        problem.trajectory = []
        problem.score = {}
        problem.on_inner_loop_start()
        if problem.is_implemented("initial_parameters"):
            with torch.no_grad():
                start = problem.initial_parameters()  # type: ignore[attr-defined]
                for parameter, value in zip(problem.parameter_list, start, strict=True):
                    parameter.copy_(value)
        if self._rolls_back(problem):
            problem.snapshot = Snapshot(problem)

    def _step(self, problem: Problem, *, scheduled: bool, batches: Sequence[Any] | None = None) -> None:
        if self.watch is not None:
            self.watch.step_begins()
        metrics = make_step(problem, batches)
        if self.watch is not None:
            self.watch.step_ended(problem.name)
            return
        if scheduled and problem.scheduler is not None:
            self._schedule(problem, metrics["loss"])
        every = problem.config.log_step
        if every > 0 and problem.count % every == 0 and self.ranks.rank == 0:
            step = problem.count if problem.config.log_local_step else self.global_step
            write_metrics(self.sink, problem.name, metrics, step=step, local_step=problem.count)

    def _schedule(self, problem: Problem, loss: torch.Tensor) -> None:
        if isinstance(problem.scheduler, torch.optim.lr_scheduler.ReduceLROnPlateau):
            loss = loss.clone()
            self.ranks.average([loss])
            problem.scheduler.step(float(loss))
        else:
            problem.scheduler.step()

    def _redo(self, problem: Problem) -> None:
        """Those above have moved: make one step again from where the inner loop started."""
        if problem.snapshot is None or problem.record is None:
            return
        problem.snapshot.restore(problem)
        problem.snapshot = None
        self._step(problem, scheduled=True, batches=problem.record.batches)

    def _rolls_back(self, problem: Problem) -> bool:
        return self.config.roll_back and bool(self.dependencies.above[problem]) and self.is_differentiated(problem)

    def _introduce(self) -> None:
        """Problems see each other, and the engine them, by name."""
        for holder in (self, *self.problems):
            for problem in self.problems:
                if hasattr(holder, problem.name) and getattr(holder, problem.name) is not problem:
                    raise InvalidInput(
                        f"a problem is named {problem.name!r}, which is already an attribute of "
                        f"{getattr(holder, 'name', 'the engine')!r}; rename it"
                    )
                setattr(holder, problem.name, problem)

    def _check_methods(self) -> None:
        for problem in self._differentiated:
            hooks = [name for name in ("grad_callback", "param_callback") if problem.is_implemented(name)]
            if problem.method == "unrolled" and problem.is_second_order and hooks:
                raise InvalidInput(
                    f"the problem {problem.name!r} is differentiated through its steps and has {hooks[0]}, which "
                    'cannot be; write what it does into `update`, or use an implicit method such as type="cg"'
                )

    def _own_path(self, path: str | Path) -> Path:
        path = Path(path)
        return path if self.ranks.rank == 0 else path.with_name(f"{path.name}.rank{self.ranks.rank}")

    @contextlib.contextmanager
    def _progress(self) -> Iterator[Any]:
        if not self.config.progress or self.ranks.rank:
            yield lambda: None
            return
        with Progress() as bar:
            task = bar.add_task("iterations", total=self.config.train_iters, completed=self.global_step)
            yield lambda: bar.advance(task)
