"""Batches of a problem, one loader or several, in an order that can be taken up again exactly.

Note [Taking up a loader]
    A loader's order is decided by the generator it draws from when its iterator is made. So the state of that
    generator is remembered at the start of every epoch; to take up again, the epoch is started from it and as
    many batches are passed over as had been drawn.
"""

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch.utils import _pytree as pytree
from torch.utils.data import DataLoader, DistributedSampler, RandomSampler

from memfit.errors import InvalidInput


class LoaderCursor:
    """Goes round and round one loader."""

    def __init__(self, loader: Iterable[Any], owner: str) -> None:
        self.loader = loader
        self.epoch = 0
        self._owner = owner
        self._drawn = 0
        self._at_start: list[torch.Tensor] = []
        self._iterator: Iterator[Any] | None = None

    def draw(self, on_epoch_end: Callable[[], None]) -> Any:
        if self._iterator is None:
            self._start()
        try:
            batch = next(self._iterator)  # type: ignore[arg-type]
        except StopIteration:
            on_epoch_end()
            self.epoch += 1
            self._start()
            batch = self._first()
        self._drawn += 1
        return batch

    def peek(self) -> Any:
        """A first batch; the order of those to come stays what it is."""
        now = self._generators()
        try:
            return next(iter(self.loader))
        except StopIteration:
            raise InvalidInput(_no_batch(self._owner)) from None
        finally:
            self._set_generators(now)

    def state_dict(self) -> dict[str, Any]:
        return {"epoch": self.epoch, "drawn": self._drawn, "at_start": self._at_start}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """See Note [Taking up a loader]."""
        self.epoch, self._iterator = state["epoch"], None
        if not state["at_start"]:
            return
        now = self._generators()
        self._set_generators(state["at_start"])
        self._start()
        for _ in range(state["drawn"]):
            self._first()
        self._drawn = state["drawn"]
        self._set_generators(now)

    def _start(self) -> None:
        sampler = getattr(self.loader, "sampler", None)
        if isinstance(sampler, DistributedSampler):
            sampler.set_epoch(self.epoch)
        self._at_start = self._generators()
        self._drawn = 0
        self._iterator = iter(self.loader)

    def _first(self) -> Any:
        assert self._iterator is not None
        try:
            return next(self._iterator)
        except StopIteration:
            raise InvalidInput(_no_batch(self._owner)) from None

    def _generators(self) -> list[torch.Tensor]:
        return [torch.get_rng_state(), *(generator.get_state() for generator in self._own_generators())]

    def _set_generators(self, states: list[torch.Tensor]) -> None:
        torch.set_rng_state(states[0])
        for generator, state in zip(self._own_generators(), states[1:], strict=False):
            generator.set_state(state)

    def _own_generators(self) -> list[torch.Generator]:
        holders = (self.loader, getattr(self.loader, "sampler", None))
        found = [getattr(holder, "generator", None) for holder in holders]
        return list({id(each): each for each in found if isinstance(each, torch.Generator)}.values())


def _no_batch(owner: str) -> str:
    return (
        f"a train_data_loader of the problem {owner!r} gives no batch; give one that has data (drop_last=True drops "
        "everything where the data are fewer than a batch)"
    )


def split_over_ranks(loader: Any, rank: int, world_size: int, owner: str) -> Any:
    """The same loader, giving each rank its own share of the data; the batch size is that of a rank."""
    if not isinstance(loader, DataLoader) or isinstance(loader.sampler, DistributedSampler):
        return loader
    if loader.batch_sampler is None or loader.batch_size is None:
        raise InvalidInput(
            f"the loader of the problem {owner!r} has its own batch sampler, which cannot be split over "
            f"{world_size} ranks; give it a DistributedSampler"
        )
    sampler: DistributedSampler[Any] = DistributedSampler(
        loader.dataset,
        num_replicas=world_size,
        rank=rank,
        shuffle=isinstance(loader.sampler, RandomSampler),
        drop_last=loader.drop_last,
    )
    return DataLoader(
        loader.dataset,
        batch_size=loader.batch_size,
        sampler=sampler,
        num_workers=loader.num_workers,
        collate_fn=loader.collate_fn,
        pin_memory=loader.pin_memory,
        drop_last=loader.drop_last,
        timeout=loader.timeout,
        worker_init_fn=loader.worker_init_fn,
        generator=loader.generator,
        persistent_workers=loader.persistent_workers,
    )


def moved(batch: Any, device: torch.device) -> Any:
    """A batch with its tensors on a device."""
    return pytree.tree_map_only(torch.Tensor, lambda tensor: tensor.to(device, non_blocking=True), batch)
