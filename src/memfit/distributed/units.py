"""The parts of a model that FSDP2 shards by themselves, found as regions to plan.

Note [Units]
    A unit is what `fully_shard` was called on; it gathers its parameters when its forward begins and lets go of
    them when it ends. A unit without others inside is one region, if it can be captured. Of a unit with others inside
    (the root), what lies between them is looked at part by part. A region never crosses the border of a unit,
    because communication happens there.

Note [Whole parameters]
    Outside its passes a unit has only its shard of each parameter. To be captured it gathers them, which all
    ranks do together, unit after unit in the order of the model; nothing else in the search communicates, so a rank
    that finds something else still comes to the same meetings.
"""

import contextlib
from collections.abc import Iterator

from torch import nn
from torch.distributed.fsdp import FSDPModule

from memfit.capture.calls import noted_calls
from memfit.capture.sample import Sample
from memfit.errors import InvalidModel
from memfit.recipe import Recipe
from memfit.regions.find import Regions, RegionSearch, region_recipe


def check_sharded(model: nn.Module) -> None:
    """Refuse a model whose root was not given to `fully_shard`, or one that a step cannot be measured of."""
    if not isinstance(model, FSDPModule):
        raise InvalidModel(
            f"this {type(model).__name__} is not sharded: call torch.distributed.fsdp.fully_shard on its units and "
            "then on the model itself, or plan it as it is with memfit.plan"
        )
    if not model.training:
        raise InvalidModel(f"this {type(model).__name__} is in eval mode; call model.train() first")
    meshes = (getattr(each, "device_mesh", None) for each in model.parameters())
    elsewhere = next((mesh.device_type for mesh in meshes if mesh is not None and mesh.device_type != "cpu"), None)
    if elsewhere is not None:
        raise InvalidModel(
            f"this {type(model).__name__} is on {elsewhere}, and a sharded step is measured on CPU alone so far; shard "
            "it over a CPU mesh, or plan one rank's model with memfit.distributed.plan"
        )


def units_of(model: nn.Module) -> dict[str, FSDPModule]:
    """All units by their paths, in the order of the model."""
    return {path: module for path, module in model.named_modules() if isinstance(module, FSDPModule)}


def settle(model: nn.Module) -> None:
    """Let every unit finish what it does when it first gathers its parameters, and have only its shards."""
    for unit in units_of(model).values():
        with whole(unit):
            pass


@contextlib.contextmanager
def whole(unit: FSDPModule) -> Iterator[None]:
    """Have the whole parameters of a unit for a while; all ranks together."""
    unit.unshard()
    try:
        yield
    finally:
        unit.reshard()


def find_units(model: nn.Module, sample: Sample, recipe: Recipe, *, timed: bool) -> Regions:
    """The regions of a sharded model, see Note [Units]. One step is run in which units keep nothing."""
    simple = [unit for unit in units_of(model).values() if isinstance(unit, nn.Module) and not _has_units(unit)]
    around = [part for part in _outside(model) if not _has_units(part)]
    calls = noted_calls(model, sample, backward_from=recipe.backward_from, of=[*simple, *around], checkpointed=simple)
    search = _UnitSearch(model, calls, region_recipe(recipe), 1, timed=timed, keeps_nothing=True)
    search.run(model)
    return Regions(found=tuple(search.found), left_eager=search.left_eager)


class _UnitSearch(RegionSearch):
    """Looks for regions unit by unit, see Note [Whole parameters]."""

    def run(self, model: nn.Module) -> None:
        for path, unit in units_of(model).items():
            assert isinstance(unit, nn.Module)
            with whole(unit):
                if _has_units(unit):
                    self.left_eager[path] = "it holds units that are sharded by themselves"
                    self.look_into(path, unit)
                else:
                    super().look_at(path, unit)

    def look_at(self, path: str, module: nn.Module) -> None:
        if isinstance(module, FSDPModule):
            return  # has its own turn
        if _has_units(module):
            self.look_into(path, module)
        else:
            super().look_at(path, module)


def _has_units(module: nn.Module) -> bool:
    return any(isinstance(part, FSDPModule) for part in module.modules() if part is not module)


def _outside(module: nn.Module) -> Iterator[nn.Module]:
    """The parts that lie in units which hold others."""
    for part in module.children():
        if isinstance(part, FSDPModule) and not _has_units(part):
            continue
        yield part
        yield from _outside(part)
