"""One of two ranks: a planned model inside DDP on a simulated device, against the eager one there."""

import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import memfit
from accelerator import simulated_device
from memfit import distributed


class HostGroup(dist.ProcessGroup):
    """Talks through host memory: the device has no collectives of its own."""

    def __init__(self, store: Any, rank: int, size: int, timeout: Any) -> None:
        super().__init__(rank, size)
        self._gloo = dist.ProcessGroupGloo(store, rank, size, timeout)

    def getBackendName(self) -> str:  # noqa: N802  (torch's name)
        return simulated_device.NAME

    @property
    def group_name(self) -> str:
        return "ranks of the simulated device"

    def allreduce(self, tensors: list[torch.Tensor], options: Any = None) -> Any:
        return self._through_host(
            tensors, lambda copies: self._gloo.allreduce(copies, options or dist.AllreduceOptions())
        )

    def broadcast(self, tensors: list[torch.Tensor], options: Any = None) -> Any:
        return self._through_host(tensors, lambda copies: self._gloo.broadcast(copies, options))

    def allgather(self, outputs: list[list[torch.Tensor]], tensors: list[torch.Tensor], options: Any = None) -> Any:
        copies = [[each.cpu() for each in output] for output in outputs]
        self._gloo.allgather(copies, [each.cpu() for each in tensors]).wait()
        for output, copied in zip(outputs, copies, strict=True):
            for each, copy in zip(output, copied, strict=True):
                each.copy_(copy)
        return _done(outputs)

    def barrier(self, opts: Any = None) -> Any:
        return self._gloo.barrier()

    def _through_host(self, tensors: list[torch.Tensor], run: Any) -> Any:
        copies = [each.cpu().clone() for each in tensors]
        run(copies).wait()
        for each, copy in zip(tensors, copies, strict=True):
            each.detach().copy_(copy)
        return _done(tensors)


def _done(result: Any) -> Any:
    future: Any = torch.futures.Future()
    future.set_result(result)
    return torch._C._distributed_c10d._create_work_from_future(future)


def make_model() -> nn.Module:
    torch.manual_seed(1)
    blocks = [nn.Sequential(nn.Linear(32, 128), nn.GELU(), nn.Dropout(0.1), nn.Linear(128, 32)) for _ in range(3)]
    return nn.Sequential(*blocks)


def gradients(device: torch.device, rows: torch.Tensor, *, fitted: bool) -> list[torch.Tensor]:
    model = make_model().to(device)
    if fitted:
        plan = distributed.plan(model, rows, budget=0.8, time_limit=0.5)
        assert not plan.is_identity
        memfit.apply(plan, model, rows)
    wrapped = DistributedDataParallel(model)
    torch.manual_seed(2)
    wrapped(rows).square().mean().backward()
    return [each.grad.clone() for each in model.parameters()]


def main(folder: Path, rank: int) -> None:
    torch.set_num_threads(1)
    simulated_device.load()
    device = torch.device(simulated_device.NAME, rank)
    torch.accelerator.set_device_index(rank)
    dist.Backend.register_backend(simulated_device.NAME, HostGroup, devices=["cpu", simulated_device.NAME])
    dist.init_process_group(simulated_device.NAME, init_method=f"file://{folder / 'store'}", rank=rank, world_size=2)
    torch.manual_seed(10 + rank)
    rows = torch.randn(64, 32).to(device)
    plain, planned = (gradients(device, rows, fitted=fitted) for fitted in (False, True))
    assert all(map(torch.equal, plain, planned))
    gathered = [torch.empty_like(plain[0]) for _ in range(2)]
    dist.all_gather(gathered, plain[0])
    assert torch.equal(*gathered)
    assert simulated_device.taken_races() == []
    (folder / f"rank{rank}").write_text("equal")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
