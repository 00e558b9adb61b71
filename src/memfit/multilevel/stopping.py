"""Stop when validation no longer gets better."""

from typing import Any

from memfit.errors import InvalidInput


class EarlyStopping:
    """Counts validations without improvement."""

    def __init__(self, *, metric: str, mode: str, tolerance: int) -> None:
        self.best: float | None = None
        self.waited = 0
        self._metric = metric
        self._sign = 1.0 if mode == "min" else -1.0
        self._tolerance = tolerance

    def is_over(self, metrics: dict[str, Any]) -> bool:
        """Whether the last validations brought nothing better."""
        if self._metric not in metrics:
            raise InvalidInput(
                f"early stopping looks at {self._metric!r}, validation returned "
                f"{', '.join(map(repr, metrics)) or 'nothing'}; return it, or set early_stopping_metric="
            )
        value = float(metrics[self._metric]) * self._sign
        if self.best is None or value < self.best:
            self.best, self.waited = value, 0
        else:
            self.waited += 1
        return self.waited >= self._tolerance

    def state_dict(self) -> dict[str, Any]:
        return {"best": self.best, "waited": self.waited}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.best, self.waited = state["best"], state["waited"]
