"""One training step around any model.

    forward, backward (piece by piece) -> unscale -> clip -> update -> drop gradients -> schedule

Every technique has a file of its own; this one is the order in which they run.
"""

import dataclasses
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.utils import _pytree as pytree

from memfit.capture.with_loss import WithLoss
from memfit.errors import InvalidInput, NonFiniteLoss
from memfit.internal import in_sentences, internal_errors
from memfit.progress import ProgressLike, progress_line
from memfit.recipe import Budget
from memfit.step.accumulation import Accumulation, total_of
from memfit.step.batches import Split, map_tensors, row_count, split_batch
from memfit.step.captured_loss import CapturedLoss, with_loss
from memfit.step.checkpoint import Checkpoint, value_of, write_checkpoint
from memfit.step.choice import Choice
from memfit.step.choose import choose
from memfit.step.losses import Loss, Term, Weight, check_reduction, counted, term_of
from memfit.step.mixing import check_separable
from memfit.step.optimizers import check_without_closure, parameters_of
from memfit.step.policy import StepPolicy
from memfit.step.precision import Scaler, autocast, in_bfloat16, make_pure
from memfit.step.random_state import random_state, set_random_state
from memfit.step.replicas import Replicas
from memfit.step.restore import check_model, restore_model, restore_optimizer
from memfit.step.updater import Updater
from memfit.step.wishes import Report, Wishes


@dataclasses.dataclass
class Position:
    """How far training has come."""

    updates: int = 0  # of the parameters
    skipped: int = 0  # because fp16 gradients overflowed
    batches: int = 0  # that were given


class Step:
    """A training step: `step(batch)` runs forward, backward and update, and returns the loss.

    `loss(model, batch)` is yours and returns a scalar (a mean over samples, or a sum if `reduction="sum"`), or
    `memfit.Mean(sum, count)` where samples count differently. The other keywords are those of `StepPolicy`, in whose
    place a whole `policy` can be given. All techniques leave the numbers as the plain step has them, up to the
    order of sums, except lower precisions and what `allow` names.

    With a `budget` (bytes, "6GiB", or a fraction of what the plain step takes) the techniques that are not given are
    chosen for the least predicted time a sample, when the first batch comes or at once from a `sample` batch.
    `choice` says what was chosen, `choice.explain()` why; given to another step, it saves choosing again.
    """

    @in_sentences("setting up steps of")
    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        loss: Loss,
        *,
        policy: StepPolicy | None = None,
        budget: Budget = None,
        choice: Choice | None = None,
        sample: Any = None,
        time_limit: float = 20.0,
        report: Report | None = None,
        progress: ProgressLike = None,
        reduction: str = "mean",
        weight: Weight | None = None,
        split: Split | None = None,
        scheduler: Any = None,
        seed: int = 0,
        **techniques: Any,
    ) -> None:
        """`weight(batch)` counts what a mean is over; `split(batch, pieces)` cuts; `seed` is of stochastic rounding.

        `time_limit` is in seconds, for the searches of a choice; `report` is called with every alternative, `progress`
        is as for `memfit.plan`.
        """
        check_without_closure(optimizer)
        check_reduction(reduction)
        self.model = model
        self.optimizer = optimizer
        self.loss = loss
        self.scheduler = scheduler
        self.choice: Choice | None = None  # made under a budget
        self._wishes = None if budget is None else _wishes(budget, policy, techniques, time_limit, report)
        self._given = choice
        self._progress = progress
        self.position = Position()
        self.gradient_norm: torch.Tensor | None = None  # before it was clipped, in the last update
        self._reduction = reduction
        self._weight = weight
        self._split = split or split_batch
        self._accumulation = Accumulation()
        self._device = _device_of(optimizer)
        self._seed = seed
        self._captured: CapturedLoss | None = None
        self._replicas = Replicas(model, self._device)
        if choice is not None:
            _check_alone(choice, budget, policy, techniques)
            policy, techniques = choice.policy, {}
        self._use(_policy(policy, techniques) if self._wishes is None else self._wishes.policy())
        if sample is not None:
            self.choose(sample)

    def _use(self, policy: StepPolicy) -> None:
        self.policy = policy
        self._scaler = Scaler(self._device.type) if policy.precision == "fp16" else None
        model = self.model if self._captured is None else self._captured.subject
        self._updater = Updater(model, self.optimizer, policy, self._device, self._seed)
        if policy.precision == "pure-bf16":
            make_pure(self.model, self.optimizer)

    def choose(self, batch: Any) -> Choice:
        """Choose the techniques for batches like this one under the budget, if that has not been done."""
        if self.choice is None:
            with internal_errors(f"choosing how to train {type(self.model).__name__}"):
                choice, subject = self._chosen(batch)
            if choice.plan is not None:
                self._captured = CapturedLoss(subject, self.loss, choice.plan)
            self._use(choice.policy)
            self.choice = choice
        return self.choice

    def _chosen(self, batch: Any) -> tuple[Choice, WithLoss]:
        if self._given is not None:
            return self._given, with_loss(self.model, self.loss, batch)
        if self._wishes is None:
            raise InvalidInput('nothing is chosen without a budget; give one, for example budget="6GiB"')
        with progress_line(self._progress, "choosing techniques") as line:
            wishes = self._wishes.told(line)
            return choose(self.model, self.optimizer, self.loss, batch, wishes, split=self._split)

    # Running

    def __call__(self, batch: Any) -> torch.Tensor:
        """Run one batch; every `accumulate` batches the parameters are updated."""
        if self._wishes is not None or self._given is not None:
            self.choose(batch)
        if self.policy.micro_batches * self.policy.accumulate > 1 and "batch-statistics" not in self.policy.allow:
            check_separable(self.model)
        ends = self._accumulation.batches + 1 == self.policy.accumulate
        try:
            if not self._accumulation.batches:
                self._abandon()  # what somebody else may have left
            if not self.position.updates:
                self._updater.allocate(self._parameters)
            loss = total_of(self._run(batch, ends=ends))
            self._accumulation.batches += 1
            self.position.batches += 1
            if ends:
                self._update(loss)
        except BaseException as error:
            self._abandon()
            self.position.batches += isinstance(error, NonFiniteLoss)  # whoever resumes does not meet it again
            raise
        return loss

    def flush(self) -> None:
        """Update with what has been accumulated so far, if anything: at the end of a short epoch."""
        if self._accumulation.batches:
            if self._accumulation.denominator is not None:
                share, _ = self._replicas.share_of(self._accumulation.weight)
                self._accumulation.settle(self._parameters, share)
            self._replicas.average_gradients(self._parameters)
            self._update(None)

    def epoch(self, loader: Iterable[Any]) -> Iterator[torch.Tensor]:
        """Run all batches of a loader and flush at its end; the losses come one by one."""
        for batch in loader:
            yield self(batch)
        self.flush()

    def close(self) -> None:
        """Give back what a tier takes. The optimizer's state is then gone."""
        self._updater.close()

    # Saving and resuming

    def state_dict(self) -> dict[str, Any]:
        """Everything that the next step depends on: model, optimizer, schedule, scale, generators, position."""
        self._updater.settle()
        model, optimizer = self._replicas.module.state_dict(), self.optimizer.state_dict()
        gradients = {number: each.grad for number, each in enumerate(self._parameters) if each.grad is not None}
        return {"model": model, "optimizer": optimizer, **self.progress_dict(), "gradients": gradients}

    def progress_dict(self) -> dict[str, Any]:
        """What the next step depends on beside model, optimizer and gradients."""
        return {
            "scheduler": None if self.scheduler is None else self.scheduler.state_dict(),
            "scaler": None if self._scaler is None else self._scaler.state_dict(),
            "rounding": None if self._updater.rounding is None else self._updater.rounding.state(),
            "random": random_state(),
            "position": dataclasses.asdict(self.position),
            "accumulation": dataclasses.asdict(self._accumulation),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on where a state was taken: the next step gives the numbers it would have given there."""
        check_model(self._replicas.module, state["model"])
        restore_optimizer(self.optimizer, state["optimizer"], self._updater.adopt)
        restore_model(self._replicas.module, state["model"])
        self._updater.settle()
        for number, parameter in enumerate(self._parameters):
            parameter.grad = value_of(state["gradients"].get(number))
        self.load_progress_dict(state)

    def load_progress_dict(self, state: Mapping[str, Any]) -> None:
        """Go on where `progress_dict` was taken; model and optimizer are put back by others."""
        for part, name in ((self.scheduler, "scheduler"), (self._scaler, "scaler")):
            if part is not None and state[name] is not None:
                part.load_state_dict(pytree.tree_map(value_of, state[name]))
        if self._updater.rounding is not None and state["rounding"] is not None:
            self._updater.rounding.load_state(value_of(state["rounding"]))
        self.position = Position(**state["position"])
        self._accumulation = Accumulation(**state["accumulation"])
        set_random_state(pytree.tree_map(value_of, state["random"]))

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the state into one safetensors file, whole or not at all."""
        write_checkpoint(Path(path), self.state_dict())

    def load(self, path: str | os.PathLike[str]) -> None:
        """Go on from a file that `save` wrote; model, optimizer and scheduler are built as they were."""
        self.load_state_dict(Checkpoint(Path(path)).state())

    # One batch

    def _run(self, batch: Any, *, ends: bool) -> list[Term]:
        pieces = self._pieces(batch)
        others = len(pieces) * self.policy.accumulate * self._replicas.count
        weigh = _Weights(pieces, self._weight, alone=others == 1)
        terms: list[Term] = []
        failure = ""
        for number, piece in enumerate(pieces):
            closes = number == len(pieces) - 1
            with self._replicas.passing(is_last=ends and closes):
                term = self._forward(piece, lambda number=number: weigh.of(number))  # type: ignore[misc]
                failure = failure or _failure(term)
                share = self._checked(term, failure, closes=closes, ends=ends)
                expected = weigh.total(term) * self.policy.accumulate
                if not failure:
                    self._backward(term, expected, share if ends else None)
                elif self._replicas.is_sharded:
                    term.value.backward()  # the others wait for it
            terms.append(dataclasses.replace(term, value=term.value.detach()))
        return terms

    def _checked(self, term: Term, failure: str, *, closes: bool, ends: bool) -> float | None:
        """Stop at a loss that is not finite; on several ranks at the end of the batch, on all of them.

        What is returned, then, is what gradients are divided by, see Note [Replicas] in `replicas.py`.
        """
        if failure and not self._replicas.wait_for_each_other:
            raise self._not_finite(failure)
        if not closes:
            return None
        share, failures = self._replicas.share_of(self._accumulation.weight + term.weight, failed=bool(failure))
        if failures:
            if ends or self._replicas.is_sharded:
                term.value.backward()  # which was prepared in the forward pass; the gradients are dropped
            raise self._not_finite(failure or f"is not finite on {failures} of {self._replicas.size} ranks")
        return share

    def _pieces(self, batch: Any) -> Sequence[Any]:
        if self.policy.micro_batches == 1:
            return [batch]
        pieces = self._split(batch, self.policy.micro_batches)
        if len(pieces) != self.policy.micro_batches:
            raise InvalidInput(
                f"split returned {len(pieces)} pieces where {self.policy.micro_batches} micro-batches were asked for"
            )
        return pieces

    def _forward(self, piece: Any, weight: Callable[[], float]) -> Term:
        if self.policy.precision == "pure-bf16":
            piece = map_tensors(in_bfloat16, piece)
        with autocast(self.policy.precision, self._device.type):
            returned = self.loss(self.model, piece) if self._captured is None else self._captured(piece)
            return term_of(returned, self._reduction, weight)

    def _backward(self, term: Term, expected: float, share: float | None) -> None:
        """`share` is given for the last pass before an update."""
        factor = self._accumulation.seed(
            term,
            expected=expected,
            share=share,
            parameters=self._parameters,
            ranks=self._replicas.count,
        )
        seed = torch.full_like(term.value.detach(), factor)
        if self._scaler is not None:
            seed = self._scaler.scaled(seed)
        with self._updater.around_backward(term.value, self._parameters, is_last=share is not None):
            term.value.backward(gradient=seed)

    def _not_finite(self, found: str) -> NonFiniteLoss:
        number = self.position.updates + self.position.skipped + 1
        return NonFiniteLoss(
            f"the loss of step {number} {found}; nothing was updated and the gradients so far were dropped; look at "
            "the batch and the learning rate, or go on with the next batch",
            step=number,
        )

    # One update

    def _update(self, loss: torch.Tensor | None) -> None:
        if self._scaler is not None and not self._scaler.unscale(self._parameters):
            self.position.skipped += 1
        else:
            if self.policy.clip_norm is not None:
                everything = dict.fromkeys([*self.model.parameters(), *self._parameters])  # in the plain run's order
                self.gradient_norm = nn.utils.clip_grad_norm_(everything, self.policy.clip_norm)
            self._updater.apply(self._parameters)
            self.position.updates += 1
            self._schedule(loss)
        self._abandon()

    def _schedule(self, loss: torch.Tensor | None) -> None:
        if isinstance(self.scheduler, torch.optim.lr_scheduler.ReduceLROnPlateau):
            if loss is not None:
                self.scheduler.step(loss)
        elif self.scheduler is not None:
            self.scheduler.step()

    def _abandon(self) -> None:
        """Drop all gradients."""
        self._accumulation = Accumulation()
        for parameter in self._parameters:
            parameter.grad = None

    @property
    def _parameters(self) -> list[nn.Parameter]:
        return parameters_of(self.optimizer)


class _Weights:
    """How much the pieces of a batch count, see Note [Weights] in `losses.py`."""

    def __init__(self, pieces: Sequence[Any], weight: Weight | None, *, alone: bool) -> None:
        self._pieces = pieces
        self._weight = weight
        self._alone = alone  # the only piece of its update: any weight does
        self._known: list[float] | None = None

    def of(self, number: int) -> float:
        return 1.0 if self._alone else self._all()[number]

    def total(self, term: Term) -> float:
        """Of the batch, as far as it can be known when one of its pieces has run."""
        if self._alone or not term.is_divided:
            return max(term.weight, 1.0) * len(self._pieces)
        return sum(self._all())

    def _all(self) -> list[float]:
        if self._known is None:
            count = row_count if self._weight is None else lambda piece: counted(self._weight, piece)
            self._known = [float(count(piece)) for piece in self._pieces]
        return self._known


def _failure(term: Term) -> str:
    """What is wrong with a loss, if anything."""
    value = term.value.detach()
    return "" if bool(torch.isfinite(value)) else f"is {value.item()}"


def _policy(policy: StepPolicy | None, techniques: dict[str, Any]) -> StepPolicy:
    known = [field.name for field in dataclasses.fields(StepPolicy)]
    unknown = [name for name in techniques if name not in known]
    if unknown:
        raise InvalidInput(f"Step takes no {unknown[0]!r}; techniques are {', '.join(known)}")
    if policy is not None and techniques:
        raise InvalidInput(f"a policy and {', '.join(techniques)} were given; put everything into the policy")
    return policy or StepPolicy(**techniques)


def _check_alone(choice: Choice, budget: Budget, policy: StepPolicy | None, techniques: dict[str, Any]) -> None:
    others = [name for name, given in (("budget", budget), ("policy", policy)) if given is not None]
    if others or techniques:
        raise InvalidInput(
            f"a choice and {', '.join([*others, *techniques])} were given; the {choice.model}'s choice has everything "
            "in it, so give it alone, or leave it out and choose anew"
        )


def _wishes(
    budget: Budget, policy: StepPolicy | None, techniques: dict[str, Any], time_limit: float, report: Report | None
) -> Wishes:
    if policy is not None:
        raise InvalidInput("a policy and a budget were given; give what is fixed as keywords, the rest is chosen")
    fixed = dict(techniques)
    allow = fixed.pop("allow", ())
    return Wishes(
        budget=budget,
        allow=(allow,) if isinstance(allow, str) else tuple(allow),
        directory=fixed.pop("directory", None),
        fixed=fixed,
        time_limit_s=time_limit,
        report=report,
    )


def _device_of(optimizer: Optimizer) -> torch.device:
    devices = {parameter.device for parameter in parameters_of(optimizer)}
    if not devices:
        raise InvalidInput("the optimizer has no parameters; make it from those of the model")
    return next(iter(devices))
