"""Checks of models whose parameters are divided between processes."""

from __future__ import annotations

from torch import nn

from packprop.applications.dataset.ranks import Ranks
from packprop.engine.tensors import has_sharded_units, is_distributed, named_parameters, placed_where, reshard
from packprop.errors import BadInput

WHOLE = "whole, or not there"
"""The description of a parameter that is not divided."""


def is_sharded_over(asked: str, model: nn.Module, ranks: Ranks, memory: object) -> bool:
    """Tell whether ``fully_shard`` has sharded the model, so that its ranks go through every batch together.

    Raises:
        BadInput: If the model is divided in another way, if this rank works alone, or with a budget.
    """
    is_sharded = has_sharded_units(model)
    if is_sharded:
        reshard(model)  # after a forward pass the outermost unit is whole
    name = _divided(model)
    if name is None:
        return False
    if not is_sharded:
        raise BadInput(
            asked,
            f"parameter {name!r}, a DTensor that is used as it is",
            "parallelize_module, or distribute_tensor, has split the function that uses it between processes, "
            "each of which has a part of every sample's gradient",
            "use DistributedDataParallel or fully_shard, which give functions whole parameters, or one process",
        )
    if ranks.all is None:
        raise BadInput(
            asked,
            f"ranks='own', with parameter {name!r}, which fully_shard (FSDP2) has sharded between processes",
            "all ranks have to put parameters together at once, so that none can read data alone",
            "leave ranks out, and call compute(...) on all ranks",
        )
    if memory is not None:
        raise BadInput(
            asked,
            f"memory={memory!r}, with parameter {name!r}, which fully_shard (FSDP2) has sharded",
            "a plan of passes over data does not count what is put together, nor what ranks exchange",
            "leave it out, and choose a batch_size; packprop.plan(..., mesh_shape=...) says what a pass takes",
        )
    return True


def require_same_shards(asked: str, model: nn.Module, ranks: Ranks) -> None:
    """Refuse ranks that divide parameters in different ways: a call that reads their values would never end.

    Raises:
        BadInput: On every rank, with the first difference.
    """
    first, *others = ranks.each({name: _divided_how(each) for name, each in named_parameters(model)})
    for rank, other in enumerate(others, 1):
        for name in dict.fromkeys([*first, *other]):
            here, there = first.get(name, WHOLE), other.get(name, WHOLE)
            if here != there:
                raise BadInput(
                    asked,
                    f"rank {rank}, parameter {name!r}",
                    f"it is not divided as on rank 0: {here} there, {there} here",
                    "build the same model, and call fully_shard on the same modules with the same mesh, on "
                    "every rank that takes part; AllRanks(group=...) says which these are",
                )


def _divided_how(parameter: nn.Parameter) -> str:
    placed = placed_where(parameter)
    return WHOLE if placed is None else f"{list(parameter.shape)}, {placed}"


def require_whole_parameters(asked: str, model: nn.Module) -> None:
    """Refuse a model whose parameters are divided between processes.

    Raises:
        BadInput: With the first such parameter.
    """
    name = _divided(model)
    if name is not None:
        raise BadInput(
            asked,
            f"parameter {name!r}, which fully_shard (FSDP2), or the like, has sharded between processes",
            "the call needs whole gradients, and several ranks cannot make it together",
            "give a model that each process has as a whole",
        )


def _divided(model: nn.Module) -> str | None:
    """Return the name of the first parameter of which this process holds only a part; ``None`` without one."""
    return next((name for name, each in named_parameters(model) if is_distributed(each)), None)
