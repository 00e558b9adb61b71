"""The micro-batches of a batch, each size and precision captured once."""

import logging
from typing import Any

from memfit.capture.with_loss import WithLoss
from memfit.measure.peak import held_bytes
from memfit.recipe import Budget, Recipe
from memfit.step.batches import Split, map_tensors
from memfit.step.captured_loss import fields_of
from memfit.step.piece import Piece
from memfit.step.precision import in_bfloat16

log = logging.getLogger(__name__)


class Captures:
    """Pieces of one batch. What they are does not depend on a budget, so that choices under several can share them."""

    def __init__(
        self,
        subject: WithLoss,
        batch: Any,
        split: Split,
        recipe: Recipe,
        *,
        budget: Budget = None,  # that capturing and measuring keeps to
        external_bytes: int = 0,  # live beside the model and the batch
    ) -> None:
        self.subject = subject
        self._budget = budget
        self._external_bytes = external_bytes
        self._batch = batch
        self._split = split
        self._recipe = recipe
        self._known: dict[tuple[int, str | None], Piece] = {}

    def piece(self, count: int, precision: str | None) -> Piece:
        """One of `count` micro-batches."""
        if (count, precision) not in self._known:
            log.info("capturing one of %d micro-batches", count)
            self._known[count, precision] = self._captured(count, precision)
        return self._known[count, precision]

    def live_bytes(self) -> int:
        """Count what lives beside captures: the model with its gradients, the batch, the optimizer."""
        return held_bytes([self.subject]) + self._external_bytes

    def _captured(self, count: int, precision: str | None) -> Piece:
        pieces = [self._batch] if count == 1 else list(self._split(self._batch, count))
        piece = map_tensors(in_bfloat16, pieces[0]) if precision == "pure-bf16" else pieces[0]
        everything = [self._batch, pieces]
        return Piece.captured(
            self.subject,
            fields_of(piece),
            everything,
            self._recipe,
            precision,
            self._budget,
            self._external_bytes,
        )
