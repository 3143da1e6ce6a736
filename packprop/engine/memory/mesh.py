"""Models that are sharded over devices: the memory of one device, on a machine that has none.

# NOTE [Planned shards]
Under ``fully_shard`` a device holds a shard of each parameter, of its gradient and of each result of its shape;
a result is whole until the pass is over. While a unit (a module that ``fully_shard`` was called on) computes,
its parameters are whole, and so are those of the next unit, which are on their way. Parameters of the model
itself stay whole from the forward to the backward pass. Gradients are whole until all of the unit's are there;
then they are copied, and summed over devices into shards. So the dry run counts shards at their share of the
whole, and gradients at their share once their unit has them all. Throughout the step, it also counts whole
parameters of the two largest units and of the model itself, and one copy of the gradients of the largest unit.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from torch import Tensor, nn
from torch.nn import Parameter

from packprop.engine.memory.live import LiveBytes
from packprop.engine.tensors.sharding import class_before_sharding, is_distributed, sharded_units, unit_modules
from packprop.errors import BadInput

UNSHARDED = "unsharded parameters"


@dataclass(frozen=True)
class Mesh:
    """A mesh of devices that a model is sharded over.

    Args:
        shape: Numbers of devices along each axis: the last axis shards parameters, the others copy the shards.
        units: Classes of the modules that ``fully_shard`` is called on, besides the model itself; ``None`` for
            the entries of every ``nn.ModuleList``.
    """

    shape: tuple[int, ...]
    units: tuple[type[nn.Module], ...] | None = None

    @property
    def shards(self) -> int:
        """The number of shards of each parameter."""
        return self.shape[-1]

    def __str__(self) -> str:
        return " x ".join(map(str, self.shape))


def mesh_of(
    asked: str, shape: int | Sequence[int] | None, units: Iterable[type[nn.Module]] | None
) -> Mesh | None:
    """Return the mesh that a user asks for; ``None`` without a shape.

    Raises:
        BadInput: If the shape is not made of positive numbers, or units are given without one.
    """
    if shape is None:
        if units is not None:
            instead = "also give mesh_shape: the devices that the units are sharded over"
            raise BadInput(asked, "units", "there is no mesh", instead)
        return None
    sizes = (shape,) if isinstance(shape, int) else tuple(shape)
    if not sizes or not all(type(size) is int and size > 0 for size in sizes):
        raise BadInput(
            asked,
            f"mesh_shape={shape!r}",
            "these are no numbers of devices",
            "give the number of shards (64,), or copies and shards (8, 8), as for init_device_mesh",
        )
    return Mesh(sizes, None if units is None else tuple(units))


def require_not_sharded_yet(asked: str, model: nn.Module) -> None:
    """Refuse a model that ``fully_shard`` was called on: it cannot be copied.

    Raises:
        BadInput: With the mesh and the units to plan for in its place.
    """
    units = unit_modules(model)
    if not units:
        return
    wholes = [shard for unit in sharded_units([model]) for _, shard in unit.pairs]  # after a forward pass
    shards = [each for each in (*model.parameters(), *wholes) if is_distributed(each)]
    shape = tuple(shards[0].device_mesh.shape) if shards else (1,)  # type: ignore[attr-defined]  # a DTensor
    inner = dict.fromkeys(class_before_sharding(unit).__name__ for unit in units if unit is not model)
    raise BadInput(
        asked,
        "the model, whose parameters fully_shard (FSDP2) has sharded between processes already",
        "packprop plans with a copy of the model, and a model cannot be copied after fully_shard",
        "make the plan before you call fully_shard, or for another instance, such as one on the meta device: "
        f"packprop.plan(..., mesh_shape={shape}, units=[{', '.join(inner)}])",
    )


class Shards:
    """Limits the count of a dry run to one device; see NOTE [Planned shards].

    Args:
        model: The model of the dry run.
        live: The count, which has the parameters already.
        mesh: The mesh that the model is sharded over.
    """

    def __init__(self, model: nn.Module, live: LiveBytes, mesh: Mesh) -> None:
        self._live, self._count = live, mesh.shards
        self._shapes = {parameter.shape for parameter in model.parameters()}
        units = _units(model, mesh)
        self._waiting = [[each for each in unit if each.requires_grad] for unit in units]
        live.scale(model.parameters(), 1 / self._count)
        if self._count > 1:
            root, *others = map(_size, units)
            live.reserve(UNSHARDED, root + sum(sorted(others)[-2:]))
            live.reserve("gradients on their way", max(map(_size, self._waiting)))

    def settle(self) -> None:
        """Count gradients at their share, once their unit has them all."""
        waiting: list[list[Parameter]] = []
        for unit in self._waiting:
            gradients = [each.grad for each in unit if each.grad is not None]
            if len(gradients) < len(unit):
                waiting.append(unit)
            else:
                self._live.scale(gradients, 1 / self._count)
        self._waiting = waiting

    def share(self, tensor: Tensor) -> float:
        """Return the share of a saved result that is left on a device when the pass is over."""
        return 1 / self._count if tensor.shape in self._shapes else 1.0


def _units(model: nn.Module, mesh: Mesh) -> list[list[Parameter]]:
    """Return the parameters of the model itself, then those of each unit; each once."""
    if mesh.units is None:
        modules = [each for list_ in model.modules() if isinstance(list_, nn.ModuleList) for each in list_]
    else:
        modules = [
            module for module in model.modules() if isinstance(module, mesh.units) and module is not model
        ]
    taken: set[int] = set()
    units = []
    for module in reversed(modules):  # inner ones first: an outer one does not shard them again
        own = [each for each in module.parameters() if id(each) not in taken]
        taken.update(map(id, own))
        units.append(own)
    root = [each for each in model.parameters() if id(each) not in taken]
    return [root, *(unit for unit in reversed(units) if unit)]


def _size(unit: Iterable[Tensor]) -> int:
    return sum(parameter.nbytes for parameter in unit)
