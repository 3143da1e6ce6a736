"""Under ``fully_shard``, values are those of one process, and on the shards that the module holds."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import packprop
from packprop import extensions
from packprop.engine import user_pass
from packprop.engine.distributed import AllRanks
from packprop.errors import PackpropError
from tests.distributed.processes import in_processes, needs_groups, outcomes_of, run_each
from tests.distributed.test_joint_pass import ASKED, FIELDS, Tied, cross_entropy, data, values
from tests.selection import thorough

pytestmark = [
    needs_groups,
    pytest.mark.skipif(not hasattr(torch.cpu.Stream, "record_event"), reason="cannot shard on the CPU"),
]

SIZES = (5, 2)


class Deep(nn.Module):
    """Blocks, each a unit; a head that the root has."""

    def __init__(self, recompute: bool = False, frozen: bool = False) -> None:
        super().__init__()
        self.recompute = recompute
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(4, 4), nn.Tanh()) for _ in range(3))
        self.norm, self.head = nn.LayerNorm(4), nn.Linear(4, 3)
        if frozen:
            self.blocks[1].requires_grad_(False)
            self.head.weight.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))  # type: ignore[no-any-return]  # a module's call is Any


class Recomputed(nn.Module):
    """A block that is run again in the backward pass; it is sharded as a whole."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(self.inner, x, use_reentrant=False)  # type: ignore[no-any-return]  # torch's own


def recomputed() -> nn.Module:
    model = Deep()
    model.blocks = nn.ModuleList(Recomputed(block) for block in model.blocks)
    return model


def shard(model: nn.Module, parts: bool = True, inside: bool = False, **options: Any) -> nn.Module:
    from torch.distributed.fsdp import fully_shard

    for block in getattr(model, "blocks", ()) if parts else ():
        fully_shard(block.inner if inside else block, **options)
    return fully_shard(model, **options)


def made(build: Callable[[], nn.Module], dtype: torch.dtype = torch.float64) -> nn.Module:
    torch.manual_seed(3)
    return build().to(dtype)


def whole(named: dict[str, list[Tensor]]) -> dict[str, list[Tensor]]:
    return {
        key: [getattr(t, "full_tensor", lambda t=t: t)() for t in tensors] for key, tensors in named.items()
    }


def one_process(build: Callable[[], nn.Module]) -> dict[str, list[Tensor]]:
    model = packprop.extend(made(build))
    x, y = (torch.cat(each) for each in zip(*data(SIZES), strict=True))
    with packprop.backpack(*(make() for make in ASKED)):
        cross_entropy()(model(x), y).backward()
    return values(model, FIELDS)


def assert_same(model: nn.Module, expected: dict[str, list[Tensor]], **tolerance: float) -> None:
    found = values(model, FIELDS)
    for key, tensors in found.items():
        field, _, name = key.partition(" of ")
        parameter = model.get_parameter(name)
        for value in tensors:
            placed = getattr(value, "placements", None)
            if field in ("sum_grad_squared", "variance", "diag_ggn_exact", "diag_h"):
                assert placed == parameter.placements, key
                assert value.to_local().shape == parameter.to_local().shape, key
            else:
                assert placed is None, key
    found = whole(found)
    assert found.keys() == expected.keys()
    for key, tensors in expected.items():
        for mine, other in zip(found[key], tensors, strict=True):
            torch.testing.assert_close(mine, other, **(tolerance or dict(rtol=1e-9, atol=1e-12)), msg=key)


def compare(rank: int, build: Callable[[], nn.Module], before: bool = False, **options: Any) -> None:
    """Values and gradients of two passes."""
    model = made(build)
    if before:
        packprop.extend(model)
    model = packprop.extend(shard(model, **options))
    plain = shard(made(build), **options)
    x, y = data(SIZES)[rank]
    expected = one_process(build)
    for _ in range(2):
        with packprop.backpack(*(make() for make in ASKED), ranks=AllRanks(gather=True)) as context:
            cross_entropy()(model(x), y).backward()
        assert context.rows == (range(5, 7) if rank else range(5))
        assert_same(model, expected)
        nn.functional.cross_entropy(plain(x), y).backward()
    gradients = [p.grad for p in plain.parameters()]
    for parameter, other in zip(model.parameters(), gradients, strict=True):
        assert (parameter.grad is None) == (other is None)
        if other is not None:
            torch.testing.assert_close(parameter.grad.full_tensor(), other.full_tensor())


def kinds_of_sharding(rank: int) -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import CPUOffloadPolicy

    compare(rank, Deep)
    compare(rank, Deep, before=True)
    compare(rank, Deep, parts=False)
    compare(rank, Deep, reshard_after_forward=False)
    compare(rank, Deep, reshard_after_forward=True)
    compare(rank, Deep, offload_policy=CPUOffloadPolicy(pin_memory=False))
    for shape in ((1, 2), (2, 1)):  # replicas, and shards of each
        compare(rank, Deep, mesh=init_device_mesh("cpu", shape, mesh_dim_names=("replicas", "shards")))
    compare(rank, Tied)
    compare(rank, lambda: Deep(frozen=True))
    compare(rank, recomputed)
    compare(rank, recomputed, inside=True)  # units that are put together again where a checkpoint runs them


def mixed_precision(rank: int) -> None:
    """Functions run in the lower precision; sums are in at least single precision."""
    from torch.distributed.fsdp import MixedPrecisionPolicy

    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    model = packprop.extend(shard(made(Deep, torch.float32), mp_policy=policy))
    x, y = data(SIZES)[rank]
    asked = [make() for make in ASKED if make is not extensions.DiagHessian]
    with packprop.backpack(*asked, ranks=AllRanks(gather=True)):
        cross_entropy()(model(x.float()).float(), y).backward()
    expected = {key: value for key, value in one_process(Deep).items() if not key.startswith("diag_h")}
    found = whole(values(model, FIELDS))
    assert found.keys() == expected.keys()
    for key, tensors in expected.items():
        for mine, other in zip(found[key], tensors, strict=True):
            assert mine.dtype == (torch.bfloat16 if key.startswith("grad_batch") else torch.float32), key
            scale = other.abs().max().item()
            torch.testing.assert_close(mine.double(), other, rtol=0, atol=0.06 * scale, msg=key)


def accumulation(rank: int) -> None:
    """Gradients are exchanged in the last of several passes; values in each."""
    model, plain = packprop.extend(shard(made(Deep))), shard(made(Deep))
    x, y = data(SIZES)[rank]
    expected = one_process(Deep)
    for last in (False, True):
        for each in (model, plain):
            each.set_requires_gradient_sync(last)
            each.set_is_last_backward(last)
        with packprop.backpack(*(make() for make in ASKED), ranks=AllRanks(gather=True)):
            cross_entropy()(model(x), y).backward()
        assert_same(model, expected)
        nn.functional.cross_entropy(plain(x), y).backward()
    for mine, other in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(mine.grad.full_tensor(), other.grad.full_tensor())


def other_sweeps_on_each_rank(rank: int) -> None:
    """One rank looks for its samples in every pass, and takes many chunks of columns; the other does not."""
    model = packprop.extend(shard(made(Deep)))
    for step in range(3):
        sizes = (6 + step, 2)  # one rank has another shape in each step
        parts = data(sizes)
        x, y = parts[rank]
        with packprop.backpack(extensions.DiagGGNExact(), extensions.Variance(), ranks="all"):
            cross_entropy()(model(x), y).backward()
        reference = packprop.extend(made(Deep))
        with packprop.backpack(extensions.DiagGGNExact(), extensions.Variance()):
            x, y = (torch.cat(each) for each in zip(*parts, strict=True))
            cross_entropy()(reference(x), y).backward()
        for mine, other in zip(model.parameters(), reference.parameters(), strict=True):
            torch.testing.assert_close(mine.variance.full_tensor(), other.variance)
            torch.testing.assert_close(mine.diag_ggn_exact.full_tensor(), other.diag_ggn_exact)


def empty_on_one_rank(rank: int) -> None:
    model = packprop.extend(shard(made(Deep)))
    parts = data((4, 0))
    x, y = parts[rank]
    with packprop.backpack(*(make() for make in ASKED), ranks="all"):
        out = model(x)
        (cross_entropy()(out, y) if len(x) else out.sum() * 0).backward()
    reference = packprop.extend(made(Deep))
    with packprop.backpack(*(make() for make in ASKED)):
        cross_entropy()(reference(parts[0][0]), parts[0][1]).backward()
    expected, found = values(reference, FIELDS), whole(values(model, FIELDS))
    for key, tensors in found.items():
        for mine, other in zip(tensors, expected[key], strict=True):
            if "batch" in key and rank == 1:
                assert mine.shape[0] == 0
            else:
                torch.testing.assert_close(mine, other, msg=key)


def own_samples(rank: int) -> None:
    """What has a row for each sample is there without any exchange of values, too."""
    model = packprop.extend(shard(made(Deep)))
    x, y = data(SIZES)[rank]
    seen = []
    asked = (extensions.BatchGrad(), extensions.BatchL2Grad(), extensions.BatchDiagGGNExact())
    with packprop.backpack(*asked, extension_hook=seen.append):
        cross_entropy()(model(x), y).backward()
    reference = packprop.extend(made(Deep))
    with packprop.backpack(*asked):
        cross_entropy()(reference(x), y).backward()
    for mine, other in zip(model.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(mine.grad_batch, other.grad_batch)
        torch.testing.assert_close(mine.batch_l2, other.batch_l2)
        torch.testing.assert_close(mine.diag_ggn_exact_batch, other.diag_ggn_exact_batch)
    assert {type(module) for module in seen} == {type(model.head), type(model.norm)}
    assert len(seen) == 5


def own_loss_of_one_sample(rank: int) -> None:
    """Whether the user's own loss mixes samples is looked at without calling hooks of the units."""

    def loss_of(model: nn.Module, x: Tensor, seen: list[Tensor]) -> Tensor:
        out = model(x)
        out.register_hook(seen.append)
        return out.cosh().log().mean(1).mean()

    parts = data((3, 1))
    x, _ = parts[rank]
    reference = packprop.extend(made(Deep))
    with packprop.backpack(extensions.BatchL2Grad()):
        loss_of(reference, torch.cat([x for x, _ in parts]), []).backward()
    for ranks in (AllRanks(share="samples", gather=True), "own"):
        model = packprop.extend(shard(made(Deep), reshard_after_forward=True))
        seen: list[Tensor] = []
        with packprop.backpack(extensions.BatchL2Grad(), ranks=ranks):
            loss_of(model, x, seen).backward()
        assert len(seen) == 1
        for mine, other in zip(model.parameters(), reference.parameters(), strict=True):
            expected = other.batch_l2
            if ranks == "own":
                expected = expected[(slice(3), slice(3, 4))[rank]] * (4 / len(x)) ** 2
            torch.testing.assert_close(mine.batch_l2, expected)


def nothing_stays_whole(rank: int) -> None:
    """After a pass all units are sharded; while it sweeps, two are whole at most."""
    from torch.distributed.fsdp import FSDPModule

    from packprop.engine.tensors.sharding import sharded_units

    model = packprop.extend(shard(made(Deep), reshard_after_forward=True))
    x, y = data(SIZES)[rank]
    most, unshard = [0], FSDPModule.unshard

    def counted(module: Any, *arguments: Any) -> Any:
        found = unshard(module, *arguments)
        most[0] = max(most[0], sum(unit.is_whole for unit in sharded_units([model])))
        return found

    FSDPModule.unshard = counted
    with packprop.backpack(extensions.DiagGGNExact(), ranks="all"):
        cross_entropy()(model(x), y).backward()
    FSDPModule.unshard = unshard
    assert 1 <= most[0] <= 2
    assert not any(unit.is_whole for unit in sharded_units([model]))


CHECKS = [
    kinds_of_sharding,
    mixed_precision,
    accumulation,
    other_sweeps_on_each_rank,
    empty_on_one_rank,
    own_samples,
    own_loss_of_one_sample,
    nothing_stays_whole,
]


@thorough
def test_values_are_on_the_shards() -> None:
    in_processes(run_each, 2, CHECKS)


def message_of(run: Callable[[], None]) -> str:
    with pytest.raises(PackpropError) as raised:
        run()
    return str(raised.value)


def result_on_another_mesh() -> Any:
    """What a ``shard_placement_fn`` may return; ``None`` in versions where it may not."""
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.fsdp._fully_shard import _fsdp_common as parts

    if not hasattr(parts, "ShardPlacementResult"):
        return None
    mesh = DeviceMesh.from_group(torch.distributed.new_group([0, 1]), "cpu", mesh_dim_names=("others",))
    return parts.ShardPlacementResult(None, parts.FSDPMeshInfo(mesh, shard_mesh_dim=0))


def refusals(rank: int) -> dict[str, str]:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    x, y = data(SIZES)[rank]
    found = {}

    def refused(name: str, model: nn.Module, *asked: Any, penalty: bool = False, **options: Any) -> None:
        loss = cross_entropy()(model(x), y)
        if penalty:
            loss = loss + sum(p.square().sum() for p in model.parameters()).full_tensor()

        def run() -> None:
            backward = {key: options.pop(key) for key in ("create_graph",) if key in options}
            with packprop.backpack(*asked, **options):
                loss.backward(**backward)

        found[name] = message_of(run)
        assert not any(vars(p).keys() & {*FIELDS, "hmp", "kfra"} for p in model.parameters())

    model = packprop.extend(shard(made(Deep)))
    refused("sums of one rank", model, extensions.Variance())
    refused("factors of one rank", model, extensions.KFAC())
    refused("products", model, extensions.HMP())
    refused("create_graph", model, extensions.BatchL2Grad(), create_graph=True)
    refused("memory", model, extensions.BatchL2Grad(), memory="1GiB")

    def clipped() -> None:
        value = cross_entropy()(model(x), y)
        with packprop.clipped_gradients(max_norm=1.0):
            value.backward()

    found["clipped"] = message_of(clipped)
    over_data = model, nn.CrossEntropyLoss(), [(x, y)], [extensions.Variance()]
    found["compute"] = message_of(lambda: packprop.compute(*over_data, ranks="own", progress=False))
    inner = shard(made(Deep))
    packprop.extend(inner.head)
    refused("inner", inner, extensions.BatchGrad())
    from torch.distributed.fsdp import fully_shard

    if (result := result_on_another_mesh()) is not None:
        placed = fully_shard(made(Deep), shard_placement_fn=lambda p: result if p.ndim == 1 else None)
        refused("several meshes", packprop.extend(placed), extensions.BatchGrad())
    mesh = init_device_mesh("cpu", (2,))
    columns_then_rows = {"0": ColwiseParallel(), "2": RowwiseParallel()}
    even = made(lambda: nn.Sequential(nn.Linear(4, 4), nn.Sigmoid(), nn.Linear(4, 3)))
    split = parallelize_module(even, mesh, columns_then_rows)
    packprop.extend(split)
    x, y = data(SIZES)[0]  # the same on both ranks, as there
    refused("tensor parallel", split, extensions.BatchL2Grad())
    return found


@thorough
def test_what_cannot_be_had_is_refused() -> None:
    first, second = in_processes(refusals, 2)
    assert first.keys() == second.keys()
    for found in (first, second):
        assert "ranks='all'" in found["sums of one rank"]
        assert "KFAC" in found["factors of one rank"]
        assert "HMP" in found["products"]
        assert "create_graph" in found["create_graph"]
        assert "memory" in found["memory"]
        assert "none can read data alone" in found["compute"]
        assert "each process clips its own samples" in found["clipped"]
        assert "extend the outermost module" in found["inner"]
        assert "parallelize_module" in found["tensor parallel"]
        assert "over one mesh" in found.get("several meshes", "over one mesh")


class Mixing(nn.Module):
    """Mixes the samples where it is told to."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.head = nn.Linear(4, 4), nn.Linear(4, 3)

    def forward(self, x: Tensor, mix: bool) -> Tensor:
        x = torch.tanh(self.first(x))
        return self.head(x - x.mean(0) if mix else x)  # type: ignore[no-any-return]  # a module's call is Any


class Hiding(nn.Module):
    """Would mix the samples, if the weight of one block were not zero."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(4, 4) for _ in range(4))
        nn.init.zeros_(self.blocks[1].weight)
        self.head = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.blocks[0](x))
        x = x + self.blocks[1](x - x.mean(0))
        for block in self.blocks[2:]:
            x = torch.tanh(block(x))
        return self.head(x)  # type: ignore[no-any-return]  # a module's call is Any


def one_refuses(rank: int) -> dict[str, str]:
    """One rank is refused before it sweeps, while it looks for samples, or when it says what it wants."""
    x, y = data(SIZES)[rank]
    found = {}
    for ranks in ("all", "own"):
        model = packprop.extend(shard(made(Mixing)))

        def mixed(model: nn.Module = model, ranks: str = ranks) -> None:
            with packprop.backpack(extensions.BatchL2Grad(), ranks=ranks):
                cross_entropy()(model(x, rank == 1), y).backward()

        found[f"mixed, {ranks}"] = message_of(mixed)
    hiding = packprop.extend(shard(made(Hiding)))

    def hidden() -> None:
        with packprop.backpack(extensions.BatchL2Grad()):
            cross_entropy()(hiding(x), y).backward()

    found["hidden"] = message_of(hidden)
    model = packprop.extend(shard(made(Deep)))

    def missing_sample() -> None:
        with packprop.backpack(extensions.BatchGrad(subsampling=[3]), ranks="all"):
            cross_entropy()(model(x), y).backward()

    found["missing sample"] = message_of(missing_sample)

    def refused_in_walk(*_: Any, **__: Any) -> Any:
        raise PackpropError("A pass was asked for.", "here", "this rank does not walk", "run")

    def before_sweeps() -> None:
        loss = cross_entropy()(model(x), y)
        with pytest.MonkeyPatch.context() as patched:
            if rank == 1:
                patched.setattr(user_pass, "walk", refused_in_walk)
            with packprop.backpack(extensions.BatchL2Grad(), ranks="all"):
                loss.backward()

    found["before sweeps"] = message_of(before_sweeps)
    with packprop.backpack(extensions.Variance(), ranks="all"):  # and all goes on
        cross_entropy()(model(x), y).backward()
    torch.testing.assert_close(
        model.head.weight.variance.full_tensor(), one_process(Deep)["variance of head.weight"][0]
    )
    return found


@thorough
def test_one_rank_that_is_refused_ends_the_pass_of_all() -> None:
    first, second = in_processes(one_refuses, 2)
    for found in (first["mixed, all"], first["mixed, own"], first["missing sample"], first["before sweeps"]):
        assert "rank 1" in found
    assert "mixed" in second["mixed, own"]
    assert "'blocks.1.weight'" in first["hidden"]
    assert "'blocks.1.weight'" in second["hidden"]
    assert "index 3" in second["missing sample"]


def one_does_not_ask(rank: int) -> str:
    model = packprop.extend(shard(made(Deep)))
    x, y = data(SIZES)[rank]
    loss = cross_entropy()(model(x), y)
    if rank == 1:
        loss.backward()
        return ""

    def run() -> None:
        with packprop.backpack(extensions.Variance(), ranks=AllRanks(timeout=1.0)):
            loss.backward()

    return message_of(run)


@thorough
def test_a_rank_that_does_not_come_is_missed() -> None:
    found = outcomes_of(one_does_not_ask, 2, seconds=20)
    assert found[0].value is not None
    assert "not all ranks came within 1 s" in found[0].value
