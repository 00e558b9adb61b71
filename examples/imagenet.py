"""Train a model of torchvision on a folder of images under a byte budget, on one process or on many.

python examples/imagenet.py DATA --generate                       a small folder to try it on
torchrun --standalone --nproc-per-node 2 examples/imagenet.py DATA --arch resnet18 --budget 0.8
torchrun --nnodes 2 --nproc-per-node 8 --rdzv-backend c10d --rdzv-endpoint HOST:29400 examples/imagenet.py DATA ...

DATA has the folders train and val, each with one folder of images a class.
"""

import argparse
import os
from pathlib import Path

import numpy
import torch
import torch.distributed as dist
import torch.nn.functional as F
from PIL import Image
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset, DistributedSampler, Subset

import memfit
from memfit import distributed
from memfit.cli.torchvision_repair import prepare

prepare()  # torchvision's wheel beside a CPU build of torch
import torchvision

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("data", type=Path)
parser.add_argument("-a", "--arch", default="resnet50", help="a model of torchvision.models")
parser.add_argument("-b", "--batch-size", type=int, default=256, help="of all ranks together")
parser.add_argument("--epochs", type=int, default=90)
parser.add_argument("--lr", type=float, default=0.1)
parser.add_argument("--momentum", type=float, default=0.9)
parser.add_argument("--weight-decay", type=float, default=1e-4)
parser.add_argument("--pixels", type=int, default=224)
parser.add_argument("--workers", type=int, default=0, help="processes that read images, on every rank")
parser.add_argument("--budget", help="of one rank: 6GiB, a fraction of what the plain step takes (0.6), or smallest")
parser.add_argument("--plan", type=Path, help="a plan file: used if it exists, written if there is a budget")
parser.add_argument("--checkpoints", type=Path, help="a directory; saved after every epoch")
parser.add_argument("--resume", action="store_true", help="go on from the newest checkpoint")
parser.add_argument("--evaluate", action="store_true", help="only measure the accuracy")
parser.add_argument("--generate", action="store_true", help="fill DATA with a few made-up images, and stop")
arguments = parser.parse_args()

several = "RANK" in os.environ  # torchrun says so
if several:
    dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
rank, world_size = (dist.get_rank(), dist.get_world_size()) if several else (0, 1)
device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0))) if torch.cuda.is_available() else "cpu"


def say(words: str) -> None:
    if rank == 0:
        print(words, flush=True)


class Folder(Dataset[tuple[torch.Tensor, int]]):
    """Images by class. What is random about one depends on its number and the epoch alone, so runs go on exactly."""

    def __init__(self, root: Path, *, training: bool) -> None:
        classes = sorted(each.name for each in root.iterdir() if each.is_dir())
        self.images = [(path, label) for label, name in enumerate(classes) for path in sorted((root / name).iterdir())]
        self.classes = len(classes)
        self.training = training
        self.epoch = 0

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, number: int) -> tuple[torch.Tensor, int]:
        path, label = self.images[number]
        with Image.open(path) as opened:
            image = opened.convert("RGB")
        scale = 1.15 * arguments.pixels / min(image.size)
        image = image.resize((round(scale * image.width), round(scale * image.height)))
        own = torch.Generator().manual_seed(self.epoch * len(self) + number)
        places = torch.rand(2, generator=own).tolist() if self.training else (0.5, 0.5)
        left, top = (int(place * (size - arguments.pixels + 1)) for place, size in zip(places, image.size, strict=True))
        image = image.crop((left, top, left + arguments.pixels, top + arguments.pixels))
        pixels = torch.from_numpy(numpy.array(image)).permute(2, 0, 1).float().div_(255)
        if self.training and torch.rand((), generator=own) < 0.5:
            pixels = pixels.flip(2)
        mean, deviation = torch.tensor([0.485, 0.456, 0.406]), torch.tensor([0.229, 0.224, 0.225])
        return (pixels - mean[:, None, None]) / deviation[:, None, None], label


def generate(root: Path) -> None:
    """Four classes that differ in colour."""
    own = numpy.random.default_rng(0)
    for part, count in (("train", 32), ("val", 8)):
        for label in range(4):
            folder = root / part / f"class{label}"
            folder.mkdir(parents=True, exist_ok=True)
            for number in range(count):
                pixels = own.integers(0, 128, (72, 72, 3)) + 32 * numpy.array([label, 3 - label, 1])
                Image.fromarray(pixels.astype(numpy.uint8)).save(folder / f"{number}.png")


def loss(model: nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    return F.cross_entropy(model(batch[0]), batch[1])


def accuracy(model: nn.Module, data: Folder) -> float:
    """Over the images of all ranks."""
    own = Subset(data, range(rank, len(data), world_size))
    counts = torch.zeros(2, dtype=torch.float64, device=device)
    model.eval()  # the model's own forward runs
    with torch.no_grad():
        for images, labels in DataLoader(own, batch_size=per_rank, num_workers=arguments.workers):
            right = model(images.to(device)).argmax(1) == labels.to(device)
            counts += torch.tensor([float(right.sum()), float(len(labels))], dtype=torch.float64, device=device)
    model.train()
    if several:
        dist.all_reduce(counts)
    return float(counts[0] / counts[1])


if arguments.generate:
    generate(arguments.data)
    raise SystemExit
training, validation = Folder(arguments.data / "train", training=True), Folder(arguments.data / "val", training=False)
per_rank = arguments.batch_size // world_size
torch.manual_seed(0)  # the same parameters on every rank
model: nn.Module = getattr(torchvision.models, arguments.arch)(num_classes=training.classes).to(device)
optimizer = torch.optim.SGD(
    model.parameters(), lr=arguments.lr, momentum=arguments.momentum, weight_decay=arguments.weight_decay
)

# The plan is for one rank's share of a batch. It is made on the first rank and is the same on all.
sample = torch.zeros(per_rank, 3, arguments.pixels, arguments.pixels, device=device)
has_plan = torch.tensor(float(arguments.plan is not None and arguments.plan.exists()), device=device)
if several:
    dist.all_reduce(has_plan, op=dist.ReduceOp.MIN)  # nodes without a common folder: only where all have it
if has_plan:
    memfit.apply(memfit.Plan.load(arguments.plan), model, sample)
elif arguments.budget is not None:
    budget = float(arguments.budget) if arguments.budget.replace(".", "", 1).isdigit() else arguments.budget
    plan = distributed.plan(model, sample, budget=budget, optimizer=optimizer)
    say(str(plan).partition("\n  ")[0])
    if arguments.plan is not None and rank == 0:
        plan.save(arguments.plan)
    memfit.apply(plan, model, sample)
trained = DistributedDataParallel(model) if several else model

sampler = DistributedSampler(training, num_replicas=world_size, rank=rank, drop_last=True)
batches = len(sampler) // per_rank
scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, max(1, arguments.epochs * batches))
step = memfit.Step(trained, optimizer, loss, scheduler=scheduler)
done = 0
if arguments.resume and arguments.checkpoints is not None:
    done = distributed.resume(step, arguments.checkpoints)
    say(f"going on after {done} batches")

if arguments.evaluate:
    say(f"accuracy {accuracy(model, validation):.1%}")
    arguments.epochs = 0
for epoch in range(done // max(batches, 1), arguments.epochs):
    training.epoch = epoch
    sampler.set_epoch(epoch)
    rest = Subset(training, list(sampler)[(step.position.batches - epoch * batches) * per_rank : batches * per_rank])
    for images, labels in DataLoader(rest, batch_size=per_rank, num_workers=arguments.workers):
        value = step((images.to(device), labels.to(device)))
    say(f"epoch {epoch}: loss {value:.4f}, accuracy {accuracy(model, validation):.1%}")
    if arguments.checkpoints is not None:
        distributed.save(step, arguments.checkpoints)

if several:
    dist.destroy_process_group()
