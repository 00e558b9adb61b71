"""One process of a data-parallel run: every method, then an early stop that only one rank wants."""

import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from reweighting import reweighting, run
from safetensors.torch import save_file

from memfit.multilevel import Config, Engine, EngineConfig

METHODS = {
    "darts": Config(type="darts"),
    "sama": Config(type="sama"),
    "neumann": Config(type="neumann", neumann_iterations=3, neumann_alpha=0.1),
    "cg": Config(type="cg", cg_iterations=3, cg_damping=1.0),
    "nystrom": Config(type="nystrom", nystrom_rank=4, nystrom_damping=1.0),
    "unrolled": Config(type="unrolled", unroll_steps=2, gradient_clipping=0.1),
}
BATCH = 16


class Stubborn(Engine):
    """A validation that gets better on all ranks but the first."""

    def validation(self) -> dict[str, Any]:
        return {"loss": 1.0 if self.ranks.rank == 0 else -float(self.global_step)}


def trained(method: str, batch_size: int, *, distributed: bool) -> dict[str, torch.Tensor]:
    config = EngineConfig(distributed=distributed)
    engine = reweighting(lower=METHODS[method], dtype=torch.float64, batch_size=batch_size, engine=config)
    return {f"{method}.{number}": value for number, value in enumerate(run(engine, 3))}


def main(folder: Path) -> None:
    found: dict[str, torch.Tensor] = {}
    for method in METHODS:
        found |= trained(method, BATCH // 2, distributed=True)
    config = EngineConfig(
        train_iters=50, valid_step=1, strategy="distributed", early_stopping=True, early_stopping_tolerance=2
    )
    engine = reweighting(engine=config, engine_class=Stubborn)
    engine.run()
    found["stopped"] = torch.tensor(engine.global_step)
    engine.save(folder / "engine")
    reweighting(engine=config, engine_class=Stubborn).load(folder / "engine")
    save_file(found, folder / f"rank{dist.get_rank()}.safetensors")
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
