"""Whether numbers stay the same, bit for bit: a digest of every quantity of every case of the tests.

For changes that shall change nothing. All cases are computed in float64 on one thread, with draws from seeded
generators. Save the digests before a change, compare them after it::

    python -m benchmarks.fingerprints --save before.json
    python -m benchmarks.fingerprints --compare before.json

A pass that is refused has the text of its error for a digest.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import json
import sys
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import packprop
from packprop import extensions
from tests.cases import CASES

DRAWS = 2


def asked() -> Iterator[tuple[str, Callable[[], Any]]]:
    """Name and maker of every extension, those of the first order and those that are curvature."""
    for name in extensions.__all__:
        kind = getattr(extensions, name)
        if name in ("Extension", "Row"):
            continue
        fields = getattr(kind, "__dataclass_fields__", {})

        def make(kind: Any = kind, fields: Any = fields) -> Any:
            options: dict[str, Any] = {}
            if "mc_samples" in fields:
                options["mc_samples"] = DRAWS
            if "generator" in fields:
                options["generator"] = torch.Generator().manual_seed(0)
            return kind(**options)

        yield name, make


def flat(value: Any) -> Iterator[Tensor]:
    """The tensors of a saved value, in order."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, (tuple, list)):
        for item in value:
            yield from flat(item)


def digest(parameters: dict[str, nn.Parameter], savefield: str) -> str:
    """Of a value on all parameters, and of their gradients; a function is applied to fixed vectors."""
    found = hashlib.sha256()
    for name, parameter in parameters.items():
        value = getattr(parameter, savefield, None)
        if callable(value):
            with torch.random.fork_rng(devices=[]):
                torch.manual_seed(1)
                value = value(torch.randn(2, *parameter.shape, dtype=parameter.dtype))
        for tensor in [*flat(value), *flat(parameter.grad)]:
            found.update(f"{name} {tuple(tensor.shape)} {tensor.dtype}".encode())
            found.update(tensor.detach().to_dense().contiguous().numpy().tobytes())
    return found.hexdigest()[:16]


def fingerprint(case: Any, size: int, make: Callable[[], Any]) -> str:
    """Digest of one extension on one case, or the error."""
    problem = case.problem(size, case.reductions[0])
    packprop.extend(problem.model)
    losses = problem.loss if isinstance(problem.loss, nn.ModuleList) else [problem.loss]
    for loss in losses:
        if isinstance(loss, nn.Module):
            packprop.extend(loss)
    extension = make()
    torch.manual_seed(0)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            with packprop.record() if case.record else contextlib.nullcontext():
                value = problem.total()
            with packprop.backpack(extension):
                value.backward()
            return digest(problem.parameters, extension.savefield)
    except packprop.PackpropError as error:
        return str(error)


def fingerprints() -> dict[str, str]:
    """All of them, by case and extension."""
    torch.set_num_threads(1)
    found = {}
    for case in CASES:
        for name, make in asked():
            found[f"{case.name} / {name}"] = fingerprint(case, case.sizes[-1], make)
    return found


def main() -> int:
    """Save digests, or compare with saved ones; 1 if there are differences."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    group = parser.add_mutually_exclusive_group(required=True)
    group.add_argument("--save", type=Path, metavar="FILE")
    group.add_argument("--compare", type=Path, metavar="FILE")
    options = parser.parse_args()
    found = fingerprints()
    if options.save is not None:
        options.save.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
        print(f"{len(found)} digests written to {options.save}")
        return 0
    before = json.loads(options.compare.read_text(encoding="utf-8"))
    different = [key for key in before if found.get(key) != before[key]]
    for key in different:
        print(f"{key}\n  before: {before[key]}\n  now:    {found.get(key)}")
    new = len(found.keys() - before.keys())
    print(f"{len(before) - len(different)} of {len(before)} equal, {len(different)} different, {new} new")
    return 1 if different else 0


if __name__ == "__main__":
    sys.exit(main())
