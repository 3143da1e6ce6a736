"""Joins the structures of all uses of a parameter into one."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from packprop.engine.algebra.order import fold_to
from packprop.engine.algebra.structures import Dense, Lookup, Outer, Structure, Tied, rows


def join(parts: Sequence[Structure]) -> Structure:
    """Join all uses of a parameter into one structure: concatenate positions, or add rows."""
    first = parts[0]
    if len(parts) == 1:
        return first
    outers = [part for part in parts if isinstance(part, Outer)]
    if len(outers) == len(parts):
        same = all(part.fold is outers[0].fold and part.shape[2:] == outers[0].shape[2:] for part in outers)
        if same:
            cotangents = [part.cotangent for part in outers if part.cotangent is not None]
            return Outer(
                torch.cat([part.given_inputs for part in outers], 1),
                torch.cat(cotangents, 2) if cotangents else None,
                outers[0].fold,
                held=outers[0].held,
                real=_real(outers),
            )
    lookups = [part for part in parts if isinstance(part, Lookup)]
    if len(lookups) == len(parts):
        lookups = _each_once(lookups)
        cotangents = [part.cotangent for part in lookups if part.cotangent is not None]
        return Lookup(
            torch.cat([part.index for part in lookups], 1),
            torch.cat(cotangents, 2) if cotangents else None,
            lookups[0].entries,
            lookups[0].dtype,
        )
    if outers and lookups and len(outers) + len(lookups) == len(parts):
        outer, lookup = join(outers), join(lookups)
        if isinstance(outer, Outer) and isinstance(lookup, Lookup) and _is_table(outer, lookup):
            return Tied((outer, lookup))
    if any(part.rows is None for part in parts):
        return Dense(None)
    total = rows(first)
    for part in parts[1:]:
        total = total + rows(part)
    return Dense(total)


def _real(parts: Sequence[Outer]) -> Tensor | None:
    """Return the number of inputs of all uses together; ``None`` if all samples have the same positions."""
    if all(part.real is None for part in parts):
        return None
    numbers = [math.prod(part.shape[:3]) if part.real is None else part.real for part in parts]
    return torch.stack([torch.as_tensor(number, device="cpu") for number in numbers]).sum()


def _each_once(lookups: Sequence[Lookup]) -> list[Lookup]:
    """Merge parts that take rows from the same look-up: the cotangents of the rows add up."""
    found: dict[int, Lookup] = {}
    for part in lookups:
        key = id(part if part.shared is None else part.shared)
        if key in found and part.cotangent is not None:
            before = found[key].cotangent
            part = replace(part, cotangent=part.cotangent if before is None else before + part.cotangent)
        found[key] = part
    return [*found.values()]


def _is_table(outer: Outer, lookup: Lookup) -> bool:
    """Tell whether the outputs of an affine use are the rows of a table."""
    if outer.cotangent is None or lookup.cotangent is None:
        return False
    shape = torch.Size([lookup.entries, lookup.cotangent.shape[3]])
    return (
        outer.fold is fold_to(shape)
        and outer.shape[3] == shape[1]
        and len(outer.cotangent) == len(lookup.cotangent)
    )
