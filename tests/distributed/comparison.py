"""Values of all ranks beside those of one process that has all samples, for cases of the one list."""

from __future__ import annotations

import traceback
import warnings
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import packprop
from packprop.engine.distributed import AllRanks
from tests.cases import BY_NAME, CASES, Case
from tests.references.oracle import Problem
from tests.references.running import HESSIANS, ROWS, Row, as_tensors, assert_near, extend, rows_for

# Samples of each rank: not equally many.
PARTS = {2: (3, 2), 3: (2, 1, 3)}

# What relates the samples of different ranks to each other is refused by name.
REFUSED = ("BatchDotGrad", "EKFAC", "ExactEKFAC")
ASKED = [row for row in (*ROWS, *HESSIANS) if row.name not in REFUSED]


# Offsets of bags count from the first sample: what is cut out of a batch has others. Two losses are divided by
# weights of their own making, so that no part of the samples says what a rank counts.
NOT_CUT = ("offsets", "none-then-weighted-mean", "none-then-masked-mean")
# A weight that a loss uses, outside of the model, is a shard there.
OUTSIDE = ("two-losses-two-uses-of-one-weight",)
NAMES = [c.name for c in CASES if not c.refuses and not any(part in c.name for part in NOT_CUT)]


@dataclass
class Compared:
    """What came of one case: empty texts where values were compared and are right.

    ``alone``: whether one process refuses it, too.
    """

    name: str
    refused: str = ""
    alone: bool = False
    wrong: str = ""


def summary(found: Sequence[Sequence[Compared]]) -> tuple[list[str], int]:
    """What all ranks found, in lines, and how many cases were wrong on one of them."""
    lines, wrong, refused, alone = [], 0, 0, 0
    for of_ranks in zip(*found, strict=True):
        bad = [each.wrong for each in of_ranks if each.wrong]
        if bad:
            wrong += 1
            lines.append(f"wrong: {of_ranks[0].name}\n{bad[0]}")
        elif of_ranks[0].alone and of_ranks[0].refused:
            alone += 1
        elif any(each.refused for each in of_ranks):
            refused += 1
            lines.append(f"refused: {of_ranks[0].name}: {of_ranks[0].refused}")
    right = len(found[0]) - wrong - refused - alone
    lines.append(f"{right} cases right, {wrong} wrong, {refused} refused, {alone} refused in one process, too")
    return lines, wrong


def cut(tree: Any, take: Callable[[Any, int], Any], start: int, stop: int) -> Any:
    """The samples from ``start`` to ``stop`` of a batch, by what cuts out one."""
    parts = [take(tree, n) for n in range(start, stop)]
    return _joined(tree, parts)


def _joined(whole: Any, parts: Sequence[Any]) -> Any:
    if isinstance(whole, Tensor):
        grown = [axis for axis, size in enumerate(whole.shape) if parts[0].shape[axis] != size]
        return torch.cat([*parts], grown[0]) if grown else parts[0]
    if isinstance(whole, dict):
        return {key: _joined(value, [part[key] for part in parts]) for key, value in whole.items()}
    if isinstance(whole, tuple):
        return tuple(_joined(value, [part[place] for part in parts]) for place, value in enumerate(whole))
    return whole


def rows_of(case: Case) -> list[Row]:
    """What is compared for a case."""
    defined = {row.name for row in (*rows_for(case), *(HESSIANS if len(rows_for(case)) == len(ROWS) else ()))}
    return [row for row in ASKED if row.name in defined]


def compare(rank: int, names: Sequence[str], kind: str) -> list[Compared]:
    """Compare some cases, each on all ranks. ``kind``: how the model is wrapped."""
    warnings.simplefilter("ignore")
    names = [name for name in names if kind != "FSDP2" or name not in OUTSIDE]
    return [_compare_one(rank, BY_NAME[name], kind) for name in names]


def _compare_one(rank: int, case: Case, kind: str) -> Compared:
    parts = PARTS[torch.distributed.get_world_size()]
    found = Compared(case.name)
    for reduction in case.reductions:
        try:
            _check(rank, case, reduction, parts, kind, found)
        except packprop.PackpropError as error:
            found.refused = str(error)
        except Exception:
            found.wrong = traceback.format_exc()
            break
    return found


def _check(
    rank: int, case: Case, reduction: str | None, parts: Sequence[int], kind: str, found: Compared
) -> None:
    start, size = sum(parts[:rank]), sum(parts)
    own = case.problem(size, reduction)
    inputs = cut(own.inputs, case.take_input, start, start + parts[rank])
    targets = cut(own.targets, case.take_target, start, start + parts[rank])
    rows = rows_of(case)
    exact = [row() for row in rows if not row.sampled]
    sampled = [row for row in rows if row.sampled]
    found.alone = True
    try:
        whole = _in_one_process(case, size, reduction, exact)
    except packprop.PackpropError:  # no diagonal of the Hessian
        exact = [each for each in exact if "Hessian" not in each.name]
        whole = _in_one_process(case, size, reduction, exact)
    found.alone = False
    model = WRAPPED[kind](own.model, case)
    share: Any = "terms"

    def run(ranks: Any, asked: Sequence[Any]) -> None:
        own.model.zero_grad()
        loss = _loss(case, own, model, inputs, targets)
        with packprop.backpack(*asked, ranks=ranks) as context:
            loss.backward()
        if ranks != "own":
            assert context.rows == range(start, start + parts[rank])

    try:
        run(AllRanks(share=share, gather=True), exact)
    except packprop.PackpropError as error:
        if "is not known" not in str(error):
            raise
        share = 1.0 if reduction == "sum" else parts[rank] / size
        run(AllRanks(share=share, gather=True), exact)
    for name, parameter in whole.model.named_parameters():
        mine = own.model.get_parameter(name)
        for extension in exact:
            if not hasattr(parameter, extension.savefield):
                assert not hasattr(mine, extension.savefield)
                continue
            expected = as_tensors(getattr(parameter, extension.savefield))
            values = as_tensors(getattr(mine, extension.savefield))
            assert len(values) == len(expected)
            for value, right in zip(values, expected, strict=True):
                _assert_near(value, right, f"{extension.name} of {name}, {reduction}")
    if sampled and kind != "FSDP2":
        _check_sampled(own, run, sampled, reduction, parts, rank)


def _in_one_process(case: Case, size: int, reduction: str | None, asked: Sequence[Any]) -> Problem:
    whole = case.problem(size, reduction)
    loss = _loss(case, whole, whole.model, whole.inputs, whole.targets)
    with packprop.backpack(*asked):
        loss.backward()
    return whole


def _check_sampled(
    own: Problem,
    run: Callable[[Any, Sequence[Any]], None],
    sampled: Sequence[Row],
    reduction: str | None,
    parts: Sequence[int],
    rank: int,
) -> None:
    """What is drawn is the sum, or the list, of what ranks draw by themselves, with the weight of each."""
    fields = [row.attribute for row in sampled]

    def drawn(ranks: Any) -> dict[str, list[Any]]:
        source = torch.Generator().manual_seed(rank)
        run(ranks, [row(source) for row in sampled])
        saved = {name: vars(p) for name, p in own.model.named_parameters()}
        return {
            name: [values.pop(field) for field in fields]
            for name, values in saved.items()
            if fields[0] in values
        }

    together = drawn(AllRanks(share=1.0))
    alone = drawn("own")
    for name, values in together.items():
        used = name in alone  # by this rank's samples
        for field, value, mine in zip(fields, values, alone.get(name, values), strict=True):
            what = f"{field} of {name}, {reduction}"
            if field in ("diag_ggn_mc_batch", "sqrt_ggn_mc"):
                _assert_near(value, mine if used else torch.zeros_like(value), what)
                continue
            weights = [1.0] * len(as_tensors(value))
            if field == "kfac" and len(value) == 2:
                weights[1] = parts[rank] / sum(parts)  # a mean over samples
            for merged, tensor, weight in zip(as_tensors(value), as_tensors(mine), weights, strict=True):
                total = tensor * weight if used else torch.zeros_like(tensor)
                torch.distributed.all_reduce(total)
                _assert_near(merged, total, what)


def _loss(case: Case, problem: Problem, model: nn.Module, inputs: Any, targets: Any) -> Tensor:
    extend(problem)
    if isinstance(model, DistributedDataParallel):
        packprop.extend(model)
    with packprop.record() if case.record else nullcontext():
        return case.whole(model, problem.loss, inputs, targets)


def _assert_near(value: Tensor, expected: Tensor, what: str) -> None:
    value = getattr(value, "full_tensor", lambda: value)()
    assert_near(value, expected, what, 1e-9, 1e-4)


def _data_parallel(model: nn.Module, case: Case) -> nn.Module:
    """DistributedDataParallel, where the case calls its model as it is."""
    if case.output is not Case.output or case.total is not None:
        return model
    if not all(parameter.is_floating_point() for parameter in model.parameters()):
        return model  # gloo does not add up complex numbers
    return DistributedDataParallel(model, find_unused_parameters=True)


def _sharded(model: nn.Module, case: Case) -> nn.Module:
    from torch.distributed.fsdp import fully_shard

    scalars = {parameter for parameter in model.parameters() if not parameter.dim()}  # it takes none
    of_children = [id(p) for child in model.children() for p in child.parameters()]
    if len({*of_children}) == len(of_children):  # what is tied belongs to one unit
        for child in model.children():
            if any(True for _ in child.parameters()):
                fully_shard(child, ignored_params=scalars)
    fully_shard(model, ignored_params=scalars)
    if hasattr(model, "set_reduce_scatter_unused_params"):
        model.set_reduce_scatter_unused_params(True)  # ranks may use other experts
    return model


WRAPPED: dict[str, Callable[[nn.Module, Case], nn.Module]] = {
    "alone": lambda model, case: model,
    "DDP": _data_parallel,
    "FSDP2": _sharded,
}
