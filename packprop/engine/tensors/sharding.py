"""Parameters that are sharded between processes: the shard that belongs to each whole parameter.

``fully_shard`` leaves a ``DTensor`` on the module, and puts a whole tensor in its place while the module runs.
The graph knows only the whole one. Nothing public relates the two, so this file reads what
``fully_shard.state`` keeps: in its ``_fsdp_param_group`` each ``_unsharded_param`` with its ``sharded_param``.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from packprop.engine.tensors.names import named_parameters
from packprop.errors import PackpropError

FSDP = "torch.distributed.fsdp"
"""The Python module of PyTorch that shards parameters."""


@dataclass(frozen=True, eq=False)
class ShardedUnit:
    """Parameters that ``fully_shard`` puts together at once.

    Args:
        module: A module that ``fully_shard`` was called on.
        pairs: Each whole parameter, once a forward pass has run, with the shard that the module holds.
    """

    module: Any
    pairs: list[tuple[Tensor, nn.Parameter]]

    @property
    def is_whole(self) -> bool:
        """Tell whether its parameters are whole now."""
        return all(whole.untyped_storage().size() > 0 for whole, _ in self.pairs)

    @property
    def is_partly_frozen(self) -> bool:
        """Tell whether some of its parameters are not trained."""
        return not all(shard.requires_grad for _, shard in self.pairs)

    def unshard(self) -> None:
        """Make the parameters whole; all ranks must do so."""
        self.module.unshard()

    def reshard(self) -> None:
        """Release the whole parameters."""
        self.module.reshard()


def _sharding() -> Any:
    """Return the module that shards; ``None`` while nothing can be sharded."""
    sharding = sys.modules.get(FSDP)
    return sharding if sharding is not None and torch.distributed.is_initialized() else None


def sharded_units(modules: Iterable[nn.Module]) -> list[ShardedUnit]:
    """Return all units inside some modules, in the order of the modules.

    Raises:
        PackpropError: If the parameters of a unit are on several meshes.
    """
    units = []
    for state, child in _states(modules).items():
        pairs = _pairs_of(state)
        if pairs is None:
            raise PackpropError(
                "A quantity beyond the gradient was asked for.",
                f"parameters of {type(child).__name__}, which one call of fully_shard puts on several meshes",
                "packprop puts parameters together only if they are all on one mesh",
                "shard all parameters over one mesh, without a shard_placement_fn that names other meshes",
            )
        if pairs:
            units.append(ShardedUnit(child, pairs))
    return units


def _pairs_of(state: Any) -> list[tuple[Tensor, nn.Parameter]] | None:
    """Return whole parameters and shards of one call of ``fully_shard``; ``None`` if it got several meshes."""
    try:
        group = state._fsdp_param_group
    except AssertionError:  # there is not one group, but one for each mesh
        return None
    parameters = () if group is None else group.fsdp_params
    return [
        (each._unsharded_param, each.sharded_param) for each in parameters if hasattr(each, "_unsharded_param")
    ]


def _states(modules: Iterable[nn.Module]) -> dict[Any, nn.Module]:
    """Return the state of each ``fully_shard`` call in some modules, with the first module of the call."""
    sharding = _sharding()
    kind = getattr(sharding, "FSDPModule", ())
    if not kind:
        return {}
    children = {id(child): child for module in modules for child in module.modules()}.values()
    states: dict[Any, nn.Module] = {}
    for child in children:
        if isinstance(child, kind) and (state := sharding.fully_shard.state(child)) is not None:
            states.setdefault(state, child)
    return states


def has_sharded_units(model: nn.Module) -> bool:
    """Tell whether ``fully_shard`` was called on the model or a module inside it."""
    return bool(_states([model]))


def unit_modules(model: nn.Module) -> list[nn.Module]:
    """Return the first module of each call of ``fully_shard`` in the model, perhaps the model itself."""
    return [*_states([model]).values()]


def reshard(model: nn.Module) -> None:
    """Release the whole parameters of all units; a forward pass leaves the outermost unit whole."""
    for unit in _states([model]).values():
        unit.reshard()  # type: ignore[operator]  # a module that fully_shard was called on


@contextlib.contextmanager
def coming_to_units(model: nn.Module, announce: Callable[[int], None]) -> Iterator[None]:
    """Inside, call ``announce`` with the number of each unit that a forward pass is about to make whole."""
    states = _states([model])
    numbers = {state: number for number, state in enumerate(states)}

    def before(module: nn.Module, args: Any) -> None:
        state = _sharding().fully_shard.state(module)
        pairs = _pairs_of(state)
        if not (pairs and ShardedUnit(states[state], pairs).is_whole):
            announce(numbers[state])

    units = [child for child in model.modules() if isinstance(child, _sharding().FSDPModule)]
    handles = [child.register_forward_pre_hook(before, prepend=True) for child in units]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def abandon_forward(model: nn.Module) -> None:
    """Release the parameters that a failed forward pass has left whole.

    A unit whose forward pass failed ignores ``reshard()``, and PyTorch has no public function for this case.
    """
    for state, module in _states([model]).items():
        if any(whole.untyped_storage().size() > 0 for whole, _ in _pairs_of(state) or ()):
            state._fsdp_param_group.post_forward(module, (), None)
        module.reshard()  # type: ignore[operator]  # a module that fully_shard was called on


def class_before_sharding(module: nn.Module) -> type[nn.Module]:
    """Return the class of a module, or the one that it had before ``fully_shard`` derived another from it."""
    kind = getattr(_sharding(), "FSDPModule", ())
    return next(each for each in type(module).__mro__ if not (kind and issubclass(each, kind)))


def shards_by_whole(modules: Iterable[nn.Module]) -> dict[int, nn.Parameter]:
    """Return the shard of each whole parameter, by its identity; skip calls with several meshes."""
    return {id(whole): shard for state in _states(modules) for whole, shard in _pairs_of(state) or ()}


def named_wholes(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield the names of shards with their whole parameters; skip calls with several meshes."""
    pairs = [pair for state in _states([module]) for pair in _pairs_of(state) or ()]
    if pairs:
        names = {id(parameter): name for name, parameter in named_parameters(module)}
        for whole, shard in pairs:
            name = names.get(id(shard), names.get(id(whole)))
            if name is not None:
                yield name, whole


def is_sharded_outside(modules: Iterable[nn.Module], owners: Iterable[Any]) -> bool:
    """Tell whether a ``fully_shard`` hook on a graph, given by its owner, belongs to none of some modules."""
    strangers = {id(each) for each in owners if is_of_sharding(each)}
    return bool(strangers) and bool(strangers - {id(state) for state in _states(modules)})


def is_of_sharding(owner: Any) -> bool:
    """Tell whether a hook with this owner is one of PyTorch's own for sharded parameters."""
    home = owner if hasattr(owner, "__qualname__") else type(owner)
    return str(getattr(home, "__module__", "")).startswith(FSDP)


def is_fully_sharded_before(modules: Iterable[nn.Module]) -> bool:
    """Tell whether ``FullyShardedDataParallel``, the older kind, wraps one of some modules or a part of one."""
    sharding = _sharding()
    if sharding is None:
        return False
    return any(isinstance(c, sharding.FullyShardedDataParallel) for m in modules for c in m.modules())


def placed_where(tensor: Tensor) -> str | None:
    """Return the placement of a ``DTensor``, and its ranks; ``None`` for another tensor."""
    return f"{tensor.placements} on {tensor.device_mesh}" if is_distributed(tensor) else None  # type: ignore[attr-defined]  # a DTensor


def is_distributed(tensor: Tensor) -> bool:
    """Tell whether a tensor is a ``DTensor``, of which this process holds a part."""
    distributed = sys.modules.get("torch.distributed.tensor")
    return distributed is not None and isinstance(tensor, distributed.DTensor)


def own_part(tensor: Tensor) -> Tensor:
    """Return a tensor unchanged, or the part of a ``DTensor`` that this process holds."""
    part: Tensor = tensor.to_local() if is_distributed(tensor) else tensor  # type: ignore[attr-defined]  # a DTensor
    return part


def whole_tensor(tensor: Tensor) -> Tensor:
    """Return a tensor unchanged, or the whole of a ``DTensor``, which all ranks must ask for at once."""
    whole: Tensor = tensor.full_tensor() if is_distributed(tensor) else tensor  # type: ignore[attr-defined]  # a DTensor
    return whole


def whole_from(part: Tensor, shard: Tensor) -> Tensor:
    """Return the ``DTensor`` of the whole parameter's shape of which this rank holds ``part``."""
    from torch.distributed.tensor import DTensor

    mesh, placements = shard.device_mesh, shard.placements  # type: ignore[attr-defined]  # a DTensor
    return DTensor.from_local(part, mesh, placements, run_check=False, shape=shard.shape, stride=shard.stride())


def part_like(value: Tensor, shard: Tensor) -> Tensor:
    """Return this rank's shard of a tensor of the whole parameter's shape, equal on all ranks."""
    part: Tensor = placed_like(value, shard).to_local()  # type: ignore[attr-defined]  # a DTensor
    return part.clone()


def replicated_like(value: Tensor, shard: Tensor) -> Tensor:
    """Return a tensor that is equal on all ranks, as a ``DTensor`` on the mesh of a shard."""
    from torch.distributed.tensor import DTensor, Replicate

    mesh = shard.device_mesh  # type: ignore[attr-defined]  # a DTensor
    return DTensor.from_local(value.to(shard.device), mesh, [Replicate()] * mesh.ndim, run_check=False)


def placed_like(value: Tensor, shard: Tensor) -> Tensor:
    """Return a tensor of the whole parameter's shape, equal on all ranks, as a ``DTensor`` like its shard."""
    mesh, placements = shard.device_mesh, shard.placements  # type: ignore[attr-defined]  # a DTensor
    placed: Tensor = replicated_like(value, shard).redistribute(mesh, placements)  # type: ignore[attr-defined]  # as above
    return placed
