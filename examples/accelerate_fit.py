"""Train a small vision model in a loop of Accelerate, with one line more; and find the largest batch without failing.

python examples/accelerate_fit.py
"""

import itertools

import torch
from accelerate import Accelerator
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import memfit
from memfit.measure.peak import measure_peak
from memfit.units import format_bytes


def make_model():
    torch.manual_seed(0)
    widths = (3, 16, 32, 32)
    blocks = [
        nn.Sequential(nn.Conv2d(given, made, 3, padding=1), nn.BatchNorm2d(made), nn.ReLU(), nn.MaxPool2d(2))
        for given, made in itertools.pairwise(widths)
    ]
    return nn.Sequential(*blocks, nn.Flatten(), nn.Linear(32 * 16, 10))


def loss(model, batch):
    images, classes = batch
    return nn.functional.cross_entropy(model(images), classes)


def train(budget):
    accelerator = Accelerator(cpu=True)
    model = make_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    own = torch.Generator().manual_seed(0)
    data = TensorDataset(torch.randn(256, 3, 32, 32, generator=own), torch.randint(10, (256,), generator=own))
    loader = DataLoader(data, batch_size=64)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    if budget is not None:
        sample = next(iter(loader))
        model = memfit.integrations.accelerate.fit(  # the one line
            accelerator, model, sample, budget, optimizer=optimizer, loss=loss
        )

    losses, peaks = [], []
    for _ in range(2):
        for batch in loader:

            def step(batch=batch):
                value = loss(model, batch)
                accelerator.backward(value)
                optimizer.step()
                optimizer.zero_grad()
                losses.append(value.item())

            if losses:
                peaks.append(measure_peak(step, resident=[model, optimizer.optimizer, batch]).peak_bytes)
            else:  # the first step makes the optimizer's state
                step()
    return model, losses, max(peaks)


_, plain_losses, plain_peak = train(None)
budget = int(0.9 * plain_peak)
model, losses, peak = train(budget)
print(memfit.plan_of(model))
print(f"losses equal bit for bit: {losses == plain_losses}")
print(f"measured peak {format_bytes(peak)}, budget {format_bytes(budget)}, without memfit {format_bytes(plain_peak)}")

# In the place of accelerate.utils.find_executable_batch_size: by prediction, before anything is run.
batch = (torch.randn(8, 3, 32, 32), torch.randint(10, (8,)))
print(memfit.max_batch(make_model(), batch, "64MiB", optimizer="adamw", loss=loss).__repr__())
if losses != plain_losses or peak > budget:
    raise SystemExit("the fitted run differs, or is over its budget")
