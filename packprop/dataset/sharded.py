"""Models whose parameters are divided between processes: which of them a data set can go through."""

from __future__ import annotations

from torch import nn

from packprop.dataset.ranks import Ranks
from packprop.errors import BadInput
from packprop.tensors.sharding import has_sharded_units, is_distributed, reshard


def is_sharded_over(asked: str, model: nn.Module, ranks: Ranks, memory: object) -> bool:
    """Whether ``fully_shard`` has sharded the model, so that its ranks go through every batch together.

    Raises:
        BadInput: If it is divided in another way, if this rank is asked to work alone, or within a budget.
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
            "parameters are put together by all ranks at once, so that none can read data alone",
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
            "its gradients are needed as a whole, and ranks do not work on these queries together",
            "give a model that each process has as a whole",
        )


def _divided(model: nn.Module) -> str | None:
    """The name of the first parameter of which this process holds a part."""
    return next((name for name, each in model.named_parameters() if is_distributed(each)), None)
