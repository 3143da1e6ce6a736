"""Sums of sharded parameters in checkpoints: each rank writes its own shards, and nothing safe is lost."""

from __future__ import annotations

import errno
import shutil
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed
from torch import Tensor, nn

import packprop
from packprop import BadInput, PackpropError, Result, extensions
from packprop.applications.dataset.folder import Folder
from packprop.applications.dataset.rank_files import RankFiles
from packprop.applications.dataset.run import Run
from packprop.engine.tensors.nesting import tensors_in
from tests.dataset.on_ranks import SIZE, network, samples
from tests.dataset.test_sharded import pytestmark as needs_sharding
from tests.dataset.test_sharded import sharded
from tests.dataset.test_shards import assert_same
from tests.distributed.processes import in_processes
from tests.selection import thorough

pytestmark = needs_sharding


def compute(model: nn.Module, folder: Path | None, **options: Any) -> Result:
    given = [extensions.Variance(), extensions.DiagGGNExact(), extensions.KFLR()]
    options = {"batch_size": SIZE, "progress": False, "checkpoint": folder, "every": 1} | options
    return packprop.compute(model, nn.CrossEntropyLoss(), samples(), given, **options)


def expected() -> Result:
    return compute(network(), None, every="1h", ranks="own")


def same_on_disk(rank: int, folder: Path) -> Path:
    """Both ranks work in copies of a folder that a run was kept in."""
    copy = folder.with_name(f"{folder.name}-copy")
    torch.distributed.barrier()
    if rank == 0:
        shutil.rmtree(copy, ignore_errors=True)
        shutil.copytree(folder, copy)
    torch.distributed.barrier()
    return copy


def written(rank: int, folder: Path) -> None:
    """No rank puts a whole sum together, and no file of a rank holds one; the last two checkpoints stay."""
    from torch.distributed.tensor import DTensor

    largest: list[int] = []
    write, keep = Folder.written, Run._keep

    def watched(self: Folder, number: int, rank: int, tensors: Any) -> Any:
        largest.append(sum(tensor.numel() for tensor in tensors if tensor.dtype == torch.float64))
        return write(self, number, rank, tensors)

    def whole(self: DTensor, **options: Any) -> Tensor:
        raise AssertionError("a whole tensor was put together")

    def kept_in_parts(self: Run) -> None:
        with pytest.MonkeyPatch.context() as inside:
            inside.setattr(DTensor, "full_tensor", whole)
            keep(self)

    model = sharded()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Folder, "written", watched)
        patch.setattr(Run, "_keep", kept_in_parts)
        result = compute(model, folder)
    assert_same(result.whole(), expected())
    factors = sum(tensor.numel() for value in result["kflr"].values() for tensor in tensors_in(value))
    own = 3 * sum(parameter.to_local().numel() for parameter in model.parameters())  # type: ignore[attr-defined]  # DTensors
    assert own <= max(largest) < own + factors + 32  # and some numbers, such as those of rows
    kept = [path.stem.partition("-")[2] for path in sorted(folder.glob("checkpoint-*"))]
    assert sorted(path.stem.split("-")[1] for path in folder.glob("state-*")) == sorted([*kept, *kept])
    assert len(kept) == 2


def damaged(rank: int, folder: Path) -> None:
    """Where a file of a rank is not what was written, or is missing, the work goes on from the one before."""
    changes: list[Callable[[Path], None]] = [
        lambda path: path.write_bytes(path.read_bytes()[:-9] + b"123456789"),
        lambda path: path.unlink(),
    ]
    for change in changes:
        copy = same_on_disk(rank, folder)
        if rank == 0:
            change(max(copy.glob("state-*-1-*")))
        torch.distributed.barrier()
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            found = compute(sharded(), copy)
        told = ["the run continues from the one before" in str(each.message) for each in caught]
        assert sum(told) == (rank == 0)
        assert_same(found.whole(), expected())


def killed_before_the_end_of_a_checkpoint(rank: int, folder: Path) -> None:
    """What ranks had written when they were killed is neither read nor kept."""
    copy = same_on_disk(rank, folder)
    if rank == 0:
        max(copy.glob("checkpoint-*")).unlink()
        (copy / "state-000002-2-0.safetensors").touch()
        (copy / "state-000009-1-0.safetensors.part").touch()
    torch.distributed.barrier()
    assert_same(compute(sharded(), copy).whole(), expected())
    assert not [*copy.glob("*.part"), *copy.glob("state-*-2-0.safetensors")]


def full_disk(rank: int, folder: Path) -> None:
    """A rank that cannot write is told of once, and the work goes on; the next checkpoint is written."""
    calls = []
    write = Folder.written

    def failing(self: Folder, *given: Any) -> Any:
        calls.append(None)
        if len(calls) == 2 and rank == 1:
            raise OSError(errno.ENOSPC, "No space left on device")
        return write(self, *given)

    with pytest.MonkeyPatch.context() as patch, warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        patch.setattr(Folder, "written", failing)
        found = compute(sharded(), folder)
    told = [str(each.message) for each in caught if "could not be written" in str(each.message)]
    if rank == 0:
        assert len(told) == 1
        assert "rank 1: [Errno 28] No space left on device" in told[0]
        assert "the first 2 batches, 10 samples" in told[0]
    else:
        assert not told
    assert_same(found.whole(), expected())
    assert len([*folder.glob("state-*-1-*")]) == 2


def other_disks(rank: int, folder: Path) -> None:
    """A rank that does not see the folder is named before the work, on all ranks."""
    read = Path.read_text

    def elsewhere(self: Path, *given: Any, **options: Any) -> str:
        if self.name == "ranks.part" and rank == 1:
            raise FileNotFoundError(errno.ENOENT, "No such file or directory")
        return read(self, *given, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Path, "read_text", elsewhere)
        with pytest.raises(BadInput, match=r"rank 1, the folder .*\n.*each rank writes its own shards"):
            compute(sharded(), folder)
    assert rank or not [*folder.glob("*.part")]


def cannot_be_read(rank: int, folder: Path) -> None:
    """A rank that cannot read its part stops all of them."""

    def failing(self: RankFiles, *given: Any) -> Iterator[Any]:
        yield []
        raise PackpropError("", "", "Input/output error", "")

    with pytest.MonkeyPatch.context() as patch:
        if rank == 1:
            patch.setattr(RankFiles, "shards", failing)
        with pytest.raises(PackpropError, match="Input/output error"):
            compute(sharded(), same_on_disk(rank, folder))


def sharded_otherwise(rank: int, folder: Path) -> None:
    """Other units, replicas of shards, or no shards at all go on from the shards that are there."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    inner = network()
    fully_shard(inner[0])  # type: ignore[index]  # a Sequential
    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("replicas", "shards"))
    for model in (inner, sharded(mesh=mesh), network()):
        copy = same_on_disk(rank, folder)
        if rank == 0:
            max(copy.glob("checkpoint-*")).unlink()
        torch.distributed.barrier()
        assert_same(compute(model, copy).whole(), expected())


def every_check(rank: int, folder: Path) -> None:
    kept = folder / "kept"
    written(rank, kept)
    for check in (damaged, killed_before_the_end_of_a_checkpoint, cannot_be_read, sharded_otherwise):
        check(rank, kept)
    full_disk(rank, folder / "full")
    other_disks(rank, folder / "other")


@thorough
def test_shards_are_safe(tmp_path: Path) -> None:
    in_processes(every_check, 2, tmp_path)
    copy = tmp_path / "alone"
    shutil.copytree(tmp_path / "kept", copy)
    max(copy.glob("checkpoint-*")).unlink()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert_same(compute(network(), copy), expected())
