"""Will ResNet-50 fit, where does the memory go, and is the answer true?

Predicts the peak of a training step before it runs, then runs the step and compares; then runs
the model through its captured graphs and compares the numbers bit for bit.
"""

import copy

import torch
import torch.nn.functional as F
from rich.console import Console

import memfit
from memfit.cli.torchvision_repair import prepare
from memfit.measure.peak import measure_peak
from memfit.report.tables import print_estimate
from memfit.units import format_bytes

prepare()  # torchvision's wheel beside a CPU build of torch
import torchvision

batch_size = 8
pixels = 128
learning_rate = 1e-3

console = Console()
torch.manual_seed(0)
model = torchvision.models.resnet50()
batch = (torch.randn(batch_size, 3, pixels, pixels), torch.randint(1000, (batch_size,)))


def loss(model, batch):
    images, labels = batch
    return F.cross_entropy(model(images), labels)


# 1. Ask before running.
with console.status("capturing the model and measuring its operators"):
    estimate = memfit.estimate(model, batch, loss=loss, optimizer="adamw")
print_estimate(console, estimate)
for device in ("T4", "A100-40GB", "512MiB"):
    console.print(f"fits {device}: {estimate.fits(device)}")

# 2. Run the step and see.
optimizer = torch.optim.AdamW(model.parameters(), lr=learning_rate)


def step():
    optimizer.zero_grad()
    loss(model, batch).backward()
    optimizer.step()


with console.status("running two real steps"):
    step()  # optimizer state exists from the second step on
    optimizer.zero_grad()
    measured = measure_peak(step, resident=[model, optimizer, batch])
    optimizer.zero_grad()
error = estimate.peak_bytes / measured.peak_bytes - 1
console.print(
    f"\npredicted {format_bytes(estimate.peak_bytes)}, measured {format_bytes(measured.peak_bytes)}: {error:+.4%}"
)

# 3. The captured graphs compute exactly what the model computes.
captured = memfit.fit(copy.deepcopy(model), batch[0])
for each in (model, captured):
    loss(each, batch).backward()
equal = all(
    torch.equal(one.grad, other.grad) for one, other in zip(model.parameters(), captured.parameters(), strict=True)
)
console.print(f"gradients of the captured model equal eager's bit for bit: {equal}")
memfit.remove(captured)
