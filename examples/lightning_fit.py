"""Train an autoencoder with Lightning, with one callback more, inside a budget.

python examples/lightning_fit.py
"""

import logging
import tempfile
import warnings

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from memfit.cli.torchvision_repair import prepare

prepare()  # torchvision beside a CPU build of torch

import lightning as L

from memfit.integrations.lightning import MemfitCallback
from memfit.units import format_bytes

warnings.filterwarnings("ignore", message=".*does not have many workers.*")
logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)


def layers(given, made, width=256):
    hidden = [each for _ in range(3) for each in (nn.Linear(width, width), nn.GELU())]
    return nn.Sequential(nn.Linear(given, width), nn.GELU(), *hidden, nn.Linear(width, made))


class AutoEncoder(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.encoder, self.decoder = layers(784, 3), layers(3, 784)
        self.losses = []

    def training_step(self, batch, batch_idx):
        (images,) = batch
        images = images.flatten(1)
        loss = nn.functional.mse_loss(self.decoder(self.encoder(images)), images)
        self.log("train_loss", loss)
        self.losses.append(loss.item())
        return loss

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=1e-3)


def train(callbacks, folder):
    L.seed_everything(0, verbose=False)
    model = AutoEncoder()
    images = torch.rand(4096, 28, 28)
    loader = DataLoader(TensorDataset(images), batch_size=1024, shuffle=True)
    trainer = L.Trainer(
        max_epochs=2, callbacks=callbacks, accelerator="cpu", default_root_dir=folder, logger=False,
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    trainer.fit(model, loader)
    trainer.save_checkpoint(f"{folder}/run.ckpt")
    return model


with tempfile.TemporaryDirectory() as folder:
    plain = train([], folder)
    memfit_callback = MemfitCallback(budget=0.8, measure_every=1)  # the one line
    fitted = train([memfit_callback], folder)
    again = AutoEncoder.load_from_checkpoint(f"{folder}/run.ckpt")  # knows nothing of memfit

steps = len(plain.losses)
same = fitted.losses[-steps:] == plain.losses  # the rehearsals before training are noted too
equal = all(torch.equal(again.state_dict()[name], value) for name, value in plain.state_dict().items())
budget = memfit_callback.fitted.budget_bytes
print(memfit_callback.fitted)
print("\n".join(memfit_callback.captures))
print(f"losses equal bit for bit: {same}, weights: {equal}")
print(f"highest measured peak {format_bytes(memfit_callback.peak_bytes)}, budget {format_bytes(budget)}")
if not (same and equal and 0 < memfit_callback.peak_bytes <= budget):
    raise SystemExit("the fitted run differs, or is over its budget")
