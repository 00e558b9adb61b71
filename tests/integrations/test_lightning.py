"""Lightning with a callback more: the same losses inside the budget, and all its ways to train."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import memfit

L = pytest.importorskip("lightning")

from memfit.integrations.lightning import MemfitCallback, fit  # noqa: E402  (needs lightning)

pytestmark = [pytest.mark.usefixtures("one_thread"), pytest.mark.filterwarnings("ignore")]


def layers(given: int, width: int, made: int) -> nn.Sequential:
    hidden = [each for _ in range(3) for each in (nn.Linear(width, width), nn.GELU(), nn.LayerNorm(width))]
    return nn.Sequential(nn.Linear(given, width), nn.ReLU(), *hidden, nn.Linear(width, made))


def loader(rows: int = 2048) -> DataLoader[Any]:
    own = torch.Generator().manual_seed(0)
    return DataLoader(TensorDataset(torch.randn(rows, 16, generator=own)), batch_size=512, shuffle=True)


class Coder(L.LightningModule):
    """Two parts that the training step calls one after the other."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.encoder, self.decoder = layers(16, 32, 3), layers(3, 32, 16)
        self.losses: list[float] = []

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        (x,) = batch
        loss = F.mse_loss(self.decoder(self.encoder(x)), x)
        self.log("train_loss", loss)
        self.losses.append(float(loss))
        return loss

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


class Forward(Coder):
    """Calls itself."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        made: torch.Tensor = self.decoder(self.encoder(x))
        return made

    def training_step(self, batch: Any) -> dict[str, torch.Tensor]:  # type: ignore[override]
        loss = F.mse_loss(self(batch[0]), batch[0])
        self.losses.append(float(loss))
        return {"loss": loss}


class Manual(Coder):
    """Two optimizers, stepped by hand."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> None:  # type: ignore[override]
        (x,) = batch
        first, second = self.optimizers()
        for optimizer in (first, second):
            self.toggle_optimizer(optimizer)
            loss = F.mse_loss(self.decoder(self.encoder(x)), x)
            optimizer.zero_grad()
            self.manual_backward(loss)
            optimizer.step()
            self.untoggle_optimizer(optimizer)
        self.log("train_loss", loss)
        self.losses.append(float(loss))

    def configure_optimizers(self) -> Any:
        return [torch.optim.Adam(each.parameters(), lr=1e-3) for each in (self.encoder, self.decoder)]


class Validated(Coder):
    """Counts what Lightning does around the steps."""

    def __init__(self) -> None:
        super().__init__()
        self.validations = 0

    def on_before_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        return [batch[0][:, :16]]

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.validations += 1


class TwoLoaders(Coder):
    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        return super().training_step([batch["one"][0] + batch["other"][0]], batch_idx)


def trained(folder: Path, model: Any, callback: Any = None, loaders: Any = None, **options: Any) -> Any:
    settings = {
        "default_root_dir": folder,
        "max_epochs": 2,
        "accelerator": "cpu",
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "logger": False,
        "enable_checkpointing": False,
    } | options
    torch.manual_seed(1)
    trainer = L.Trainer(callbacks=[] if callback is None else [callback], **settings)
    trainer.fit(model, **(loaders or {"train_dataloaders": loader()}))
    return trainer


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        pytest.param(Coder, {"gradient_clip_val": 0.5}, id="parts"),
        pytest.param(Forward, {"accumulate_grad_batches": 2}, marks=pytest.mark.slow, id="accumulated"),
        pytest.param(Forward, {"precision": "bf16-mixed"}, marks=pytest.mark.slow, id="bf16"),
        pytest.param(Manual, {}, marks=pytest.mark.slow, id="manual"),
    ],
)
def test_losses_are_the_same_inside_the_budget(tmp_path: Path, kind: Any, options: Any) -> None:
    plain, planned = kind(), kind()
    steps = trained(tmp_path, plain, **options).global_step
    callback = MemfitCallback(budget=0.85, time_limit=1.0, measure_every=1)
    assert trained(tmp_path, planned, callback, **options).global_step == steps
    assert planned.losses[-len(plain.losses) :] == plain.losses  # those before are of rehearsals
    assert callback.fitted is not None
    assert 0 < callback.peak_bytes <= callback.fitted.budget_bytes
    assert callback.peak_bytes == pytest.approx(callback.fitted.predicted_peak_bytes, rel=0.05)
    assert callback.captures
    assert memfit.plan_of(planned.encoder) is None, "nothing remains when training has ended"
    assert memfit.plan_of(planned) is None


def test_numbers_go_to_the_trainers_own_loggers_and_checkpoints_hold_nothing_of_ours(tmp_path: Path) -> None:
    from lightning.pytorch.loggers import CSVLogger

    planned = Coder()
    trainer = trained(
        tmp_path, planned, MemfitCallback(budget=0.95, time_limit=1.0), logger=CSVLogger(tmp_path), log_every_n_steps=1
    )
    trainer.logger.save()
    written = next(tmp_path.rglob("metrics.csv")).read_text()
    for name in ("memfit/peak_bytes", "memfit/predicted_peak_bytes", "memfit/budget_bytes", "memfit/captures"):
        assert name in written
    assert "train_loss" in written
    trainer.save_checkpoint(tmp_path / "run.ckpt", weights_only=True)
    saved = torch.load(tmp_path / "run.ckpt", weights_only=True)
    assert "memfit" not in str(saved.keys()) + str(saved.get("callbacks"))
    Coder().load_state_dict(saved["state_dict"])


def test_what_cannot_be_planned_is_said_by_name(tmp_path: Path) -> None:
    class Functions(Coder):
        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            return F.linear(batch[0], self.encoder[0].weight).square().mean()

    with pytest.raises(memfit.InvalidInput, match="Functions calls no module"):
        trained(tmp_path, Functions(), MemfitCallback(budget=0.9))

    class Sharded:
        pass

    from memfit.integrations.lightning import _check_strategy

    with pytest.raises(memfit.InvalidInput, match="Sharded"):
        _check_strategy(Sharded(), "lightning.pytorch.strategies")
    with pytest.raises(memfit.InfeasibleBudget):
        trained(tmp_path, Coder(), MemfitCallback(budget="1KiB", time_limit=1.0))


@pytest.mark.parametrize("precision", ["32-true", "bf16-true", pytest.param("bf16-mixed", marks=pytest.mark.slow)])
def test_fabric_trains_the_same(precision: str) -> None:
    losses: dict[bool, list[float]] = {}
    for planned in (False, True):
        torch.manual_seed(0)
        fabric = L.Fabric(accelerator="cpu", precision=precision, devices=1)
        model = layers(16, 32, 16)
        model, optimizer = fabric.setup(model, torch.optim.AdamW(model.parameters(), lr=1e-3))
        own = torch.Generator().manual_seed(0)
        x = torch.randn(512, 16, generator=own)

        def loss(model: Any, batch: torch.Tensor) -> torch.Tensor:
            return F.mse_loss(model(batch), batch)

        if planned:
            assert fit(fabric, model, x, 0.85, optimizer=optimizer, loss=loss, time_limit=1.0) is model
            assert memfit.plan_of(model.module) is not None
        losses[planned] = []
        for _ in range(4):
            optimizer.zero_grad()
            value = loss(model, x)
            fabric.backward(value)
            optimizer.step()
            losses[planned].append(float(value))
    assert losses[True] == losses[False]


def test_persistent_workers_lose_no_batch_and_hooks_are_called(tmp_path: Path) -> None:
    rows = TensorDataset(torch.randn(2048, 20, generator=torch.Generator().manual_seed(0)))
    found = []
    for callback in (None, MemfitCallback(budget=0.85, time_limit=1.0)):
        loaders = {
            "train_dataloaders": DataLoader(rows, batch_size=512, num_workers=1, persistent_workers=True),
            "val_dataloaders": DataLoader(rows, batch_size=1024),
        }
        model = Validated()
        trainer = trained(tmp_path, model, callback, loaders, num_sanity_val_steps=0)
        found.append((trainer.global_step, model.validations, model.losses[-8:]))
    assert found[0] == found[1]
    assert found[0][:2] == (8, 4)


def test_several_loaders_give_a_batch_of_each(tmp_path: Path) -> None:
    found = []
    for callback in (None, MemfitCallback(budget=0.85, time_limit=1.0)):
        model = TwoLoaders()
        loaders = {"train_dataloaders": {"one": loader(), "other": loader()}}
        trainer = trained(tmp_path, model, callback, loaders)
        found.append((trainer.global_step, model.losses[-8:]))
    assert found[0] == found[1]


class Measured(Coder):
    """Keeps a metric of every training step, in tensors that are no buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.error = pytest.importorskip("torchmetrics").MeanSquaredError()

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        loss = super().training_step(batch, batch_idx)
        self.error.update(self.decoder(self.encoder(batch[0])).detach(), batch[0])
        return loss


def test_metrics_know_nothing_of_rehearsals(tmp_path: Path) -> None:
    found = []
    for callback in (None, MemfitCallback(budget=0.95, time_limit=1.0)):
        model = Measured()
        trained(tmp_path, model, callback)
        found.append((int(model.error.total), float(model.error.compute())))
    assert found[0] == found[1]


def test_an_interrupted_rehearsal_leaves_no_plan_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from memfit.integrations.within import RehearsedStep

    model = Coder()

    def interrupt(self: RehearsedStep) -> int:
        if memfit.plan_of(model.encoder) is not None:
            raise KeyboardInterrupt
        return real(self)

    real = RehearsedStep.peak_bytes
    monkeypatch.setattr(RehearsedStep, "peak_bytes", interrupt)
    with pytest.raises((KeyboardInterrupt, SystemExit)):
        trained(tmp_path, model, MemfitCallback(budget=0.85, time_limit=1.0))
    assert memfit.plan_of(model.encoder) is None
    assert memfit.plan_of(model.decoder) is None
