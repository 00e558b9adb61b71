"""Outcomes of many seeds on disk: a line each while they run, a summary by class at the end."""

import dataclasses
import json
import statistics
from collections import Counter
from pathlib import Path
from typing import Any

import torch

from generated.oracle import ESTIMATE, INVALID, REFUSED, SOUND, Outcome
from memfit.files import write_atomically

_SEEDS_SHOWN = 20  # of a class


class Record:
    """Outcomes by seed, of one version of torch. A line that was cut off by a kill is run again."""

    def __init__(self, path: Path, kernels: str) -> None:
        self._path, self._kernels = path, kernels
        self._lines = path.with_name(f".{path.stem}-{kernels}-{torch.__version__}.jsonl")
        self._outcomes: dict[int, Outcome] = {}
        for line in self._lines.read_text(encoding="utf-8").splitlines() if self._lines.exists() else ():
            try:
                outcome = Outcome(**json.loads(line))
            except (ValueError, TypeError):
                continue
            self._outcomes[outcome.seed] = outcome

    def __contains__(self, seed: int) -> bool:
        return seed in self._outcomes

    def add(self, outcome: Outcome) -> None:
        self._outcomes[outcome.seed] = outcome
        with self._lines.open("a", encoding="utf-8") as file:
            file.write("\n" + json.dumps(dataclasses.asdict(outcome)))

    def save(self) -> None:
        """Write the summary beside those of other kernels."""
        saved = json.loads(self._path.read_text(encoding="utf-8")) if self._path.exists() else {}
        saved[self._kernels] = {"torch": torch.__version__, **self._content()}
        write_atomically(self._path, json.dumps(saved, indent=1) + "\n")

    def summary(self) -> str:
        return json.dumps(self._content(), indent=1)

    def _content(self) -> dict[str, Any]:
        outcomes = [each for each in self._outcomes.values() if each.kind != INVALID]
        classes: dict[tuple[str, str], list[int]] = {}
        for each in outcomes:
            if each.kind not in SOUND or each.kind == REFUSED:
                classes.setdefault(each.signature, []).append(each.seed)
        return {
            "models": len(outcomes),
            "outcomes": dict(Counter(each.kind for each in outcomes).most_common()),
            "captured": dict(Counter(each.captured for each in outcomes if each.captured).most_common()),
            "classes": [
                {"kind": kind, "reason": reason, "count": len(seeds), "seeds": sorted(seeds)[:_SEEDS_SHOWN]}
                for (kind, reason), seeds in sorted(classes.items(), key=lambda item: -len(item[1]))
            ],
            "estimates": _errors([(each.estimated_bytes, each.eager_bytes) for each in outcomes]),
            "predictions": _errors([(each.predicted_bytes, each.peak_bytes) for each in outcomes]),
            "estimates off": sum(each.kind == ESTIMATE for each in outcomes),
            **_of_kernels(outcomes),
            "median seconds of planning": _median([each.plan_seconds for each in outcomes]),
        }


def _of_kernels(outcomes: list[Outcome]) -> dict[str, Any]:
    """How many compiled kernels ran, if there were any, and how far their models came from eager's numbers."""
    having = [each for each in outcomes if each.kernels]
    if not having:
        return {}
    differences = sorted(each.far for each in having)
    return {
        "models with compiled kernels": len(having),
        "compiled kernels": sum(each.kernels for each in having),
        "rejected kernels": sum(each.rejected for each in outcomes),
        "differences": {"median": float(f"{_median(differences):.2g}"), "largest": float(f"{differences[-1]:.2g}")},
    }


def _errors(pairs: list[tuple[int | None, int | None]]) -> dict[str, float]:
    """How far one number is from another, relative to the other."""
    errors = sorted((one - other) / other for one, other in pairs if one is not None and other)
    if not errors:
        return {}
    sizes = sorted(map(abs, errors))
    return {
        "median": round(_median(sizes), 5),
        "99%": round(sizes[int(0.99 * (len(sizes) - 1))], 5),
        "lowest": round(errors[0], 5),
        "highest": round(errors[-1], 5),
    }


def _median(numbers: list[float]) -> float:
    return round(statistics.median(numbers), 6) if numbers else 0.0
