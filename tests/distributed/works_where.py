"""The table of docs/guide/distributed.md: what each extension is under each kind of parallel training.

``python -W ignore -m tests.distributed.works_where`` prints it, from runs on two processes.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import packprop
from packprop import extensions
from packprop.engine.tensors.nesting import tensors_in
from tests.distributed.processes import in_processes

SIZES = (3, 2)


def sharded(model: nn.Module) -> nn.Module:
    from torch.distributed.fsdp import fully_shard

    fully_shard(model[0])  # type: ignore[operator]  # a Sequential
    return fully_shard(model)


def split(model: nn.Module) -> nn.Module:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    plan = {"0": ColwiseParallel(), "2": RowwiseParallel()}
    return parallelize_module(model, init_device_mesh("cpu", (2,)), plan)


SETTINGS: list[tuple[str, Callable[[nn.Module], nn.Module], str]] = [
    ("DDP, own", DistributedDataParallel, "own"),
    ("DDP, all", DistributedDataParallel, "all"),
    ("`fully_shard`, own", sharded, "own"),
    ("`fully_shard`, all", sharded, "all"),
    ("`parallelize_module`", split, "own"),
]
SAMPLED = {"DiagGGNMC", "BatchDiagGGNMC", "SqrtGGNMC", "KFAC", "EKFAC", "DiagHessianMC", "HBP"}


def every_extension() -> list[type[extensions.Extension]]:
    return [getattr(extensions, name) for name in extensions.__all__ if name not in ("Extension", "Row")]


def asked_of(extension: type[Any], rank: int) -> Any:
    if extension.__name__ == "HBP":
        return extension(loss_hessian_strategy="exact")
    if extension.__name__ in SAMPLED:
        return extension(generator=torch.Generator().manual_seed(rank))
    return extension()


def batches() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(sum(SIZES), 4, generator=generator, dtype=torch.float64)
    return x, torch.randint(4, (sum(SIZES),), generator=generator)


def network() -> nn.Module:
    torch.manual_seed(0)
    layers = nn.Linear(4, 4), nn.Sigmoid(), nn.Linear(4, 4)
    return packprop.extend(nn.Sequential(*layers).double())


def run(model: nn.Module, asked: Any, part: slice, ranks: str = "own") -> Any:
    """What is saved on the first weight, without gaps between kinds of tensors; products are called."""
    x, y = batches()
    with packprop.backpack(asked, ranks=ranks):
        packprop.extend(nn.CrossEntropyLoss())(model(x[part]), y[part]).backward()
    weight = next(iter(model.parameters()))
    value = getattr(weight, asked.savefield)
    return value(torch.ones_like(weight)) if callable(value) else value


def cell(extension: type[Any], wrap: Callable[[nn.Module], nn.Module], ranks: str, rank: int) -> str:
    """What the extension is in a setting, compared with one process."""
    own = slice(0, SIZES[0]) if rank == 0 else slice(SIZES[0], None)
    if wrap is split:
        own = slice(None)  # the same samples on both ranks
    model = wrap(network())
    try:
        value = run(model, asked_of(extension, rank), own, ranks)
    except packprop.PackpropError:
        return "refused"
    rows = any(row.over_n.grows for row in asked_of(extension, rank).rows)
    if extension.__name__ in SAMPLED - {"HBP"} and ranks == "all":
        expected = None  # what is drawn is compared in comparison.py
    else:
        expected = run(network(), asked_of(extension, rank), slice(None) if ranks == "all" else own)
    found = list(tensors_in(value))
    kinds = {type(tensor).__name__ for tensor in found}
    if expected is not None:
        for mine, other in zip(found, tensors_in(expected), strict=True):
            whole = getattr(mine, "full_tensor", lambda mine=mine: mine)()
            if rows and ranks == "all":
                axis = next(n for n, size in enumerate(other.shape) if size == sum(SIZES) != whole.shape[n])
                other = other.narrow(axis, own.start or 0, whole.shape[axis])
            torch.testing.assert_close(whole, other)
    if rows:
        return "rows"
    return "shards" if "DTensor" in kinds else "whole"


def cells(rank: int) -> list[list[str]]:
    warnings.simplefilter("ignore")
    return [
        [cell(extension, wrap, ranks, rank) for _, wrap, ranks in SETTINGS] for extension in every_extension()
    ]


def table() -> list[str]:
    """The lines of the table; extensions that are alike in all settings share one."""
    first, second = in_processes(cells, 2)
    assert first == second
    alike: dict[tuple[str, ...], list[str]] = {}
    for extension, found in zip(every_extension(), first, strict=True):
        alike.setdefault(tuple(found), []).append(f"`{extension.__name__}`")
    lines = [
        "| extension | " + " | ".join(name for name, _, _ in SETTINGS) + " |",
        "|---" * (len(SETTINGS) + 1) + "|",
    ]
    return lines + [f"| {', '.join(names)} | {' | '.join(found)} |" for found, names in alike.items()]


if __name__ == "__main__":
    print("\n".join(table()))
