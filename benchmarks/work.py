"""``python -m benchmarks.work``: count what each contestant's step does, for ``results/work.json``.

Nothing is timed. A step's multiplications, the bytes that its operators read and write, its operators and
its calls of Python functions are the same on every machine, and say what its time can be at best: large
models take the time of multiplications and bytes, small ones that of operators and of the Python between them.
"""

from __future__ import annotations

import argparse
import json
import sys
import warnings
from collections.abc import Sequence
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

from benchmarks.contestants import CONTESTANTS, QUANTITIES, Call, Gap
from benchmarks.problems import PROBLEMS
from benchmarks.run import RESULTS, environment, line_up, write_results
from packprop.engine.tensors.nesting import tensors_in

COUNTED = [name for name in PROBLEMS if not name.startswith("growth-")]
WARM = 2
"""Steps before the one that is counted: the first ones of a shape check what later ones rely on."""
KINDS = ("multiplications", "bytes", "operators", "calls")
TOUCH_NOTHING = frozenset(
    ("empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided", "set_", "_unsafe_view")
)
"""Operators beside views that neither read nor write entries."""


class Work(TorchDispatchMode):
    """Counts multiplications of matrix products, bytes read and written, and operators; views cost nothing.

    >>> a, b = torch.ones(2, 3), torch.ones(3, 4)
    >>> with Work() as work:
    ...     product = (a @ b).mT
    >>> work.multiplications, work.bytes, work.operators
    (24, 104, 2)
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch's own
        self.multiplications = self.bytes = self.operators = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Call the operator, and count it."""
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        self.operators += 1
        packet = func.overloadpacket
        if func.is_view or packet.__name__ in TOUCH_NOTHING:
            return result
        touched = {id(tensor): tensor for tensor in tensors_in((args, kwargs, result))}
        self.bytes += sum(map(_bytes, touched.values()))
        if packet is torch.ops.aten.convolution_backward:
            self.multiplications += _of_convolution_backward(*args)
        elif packet in flop_registry:
            self.multiplications += flop_registry[packet](*args, **kwargs, out_val=result) // 2
        elif packet is _onednn_product():
            first, second = args[:2]
            self.multiplications += first.numel() * second.shape[0]
        return result


def _of_convolution_backward(arriving: Tensor, images: Tensor, weight: Tensor, *options: Any) -> int:
    """Return the multiplications of both gradients, as far as they are asked for; PyTorch forgets the groups.

    >>> images, weight = torch.ones(1, 4, 5, 5), torch.ones(4, 2, 3, 3, requires_grad=True)
    >>> result = torch.conv2d(images, weight, groups=2)
    >>> with Work() as work:
    ...     result.sum().backward()
    >>> work.multiplications == 9 * 4 * 2 * 9  # positions, outputs, inputs of a group, kernel
    True
    """
    transposed, asked = options[4], options[7]
    positions = images if transposed else arriving
    return positions.numel() * weight.shape[1:].numel() * sum(asked[:2])


def _onednn_product() -> Any:
    return getattr(torch.ops.mkldnn, "_linear_pointwise", None)


def _bytes(tensor: Tensor) -> int:
    """Return the bytes of different entries: those of expanded axes are read once."""
    if tensor.layout != torch.strided:
        return 0
    entries = 1
    for size, stride in zip(tensor.shape, tensor.stride(), strict=True):
        entries *= size if stride else min(size, 1)
    return entries * tensor.element_size()


def count(call: Call) -> dict[str, int]:
    """Return what one warm step does."""
    for _ in range(WARM):
        call()
    with Work() as work:
        call()
    return {kind: getattr(work, kind) for kind in KINDS[:-1]} | {"calls": python_calls(call)}


def python_calls(call: Call) -> int:
    """Count the calls of Python functions, those of the function itself and of autograd's hooks included.

    >>> python_calls(lambda: {} if sorted([2, 1], key=lambda number: number) else {})
    3
    """
    number = 0

    def note(frame: Any, event: str, argument: Any) -> None:
        nonlocal number
        number += event == "call"

    sys.setprofile(note)
    try:
        call()
    finally:
        sys.setprofile(None)
    return number


def main(arguments: Sequence[str] | None = None) -> None:
    """Count, print and write."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.work", description=__doc__)
    parser.add_argument("problems", nargs="*", help="default: all; a partial run writes nothing by default")
    parser.add_argument(
        "--update", action="store_true", help="put these problems into the results that are there"
    )
    parser.add_argument("--contestant", action="append", default=[], help="only this and plain; repeatable")
    options = parser.parse_args(arguments)
    warnings.filterwarnings("ignore", message="Full backward hook is firing")
    console = Console(width=110)
    records: list[dict[str, Any]] = []
    for problem in options.problems or COUNTED:
        shown = Table(title=f"{PROBLEMS[problem].title}: over plain", title_justify="left")
        for head in ("quantity", "contestant", *KINDS):
            shown.add_column(head, justify="left" if head in ("quantity", "contestant") else "right")
        for quantity in PROBLEMS[problem].quantities:
            task, wanted = PROBLEMS[problem].build(), QUANTITIES[quantity]
            plain: dict[str, int] = {}
            for name in line_up(problem, quantity, options.contestant):
                try:
                    found = count(CONTESTANTS[name].prepare(task, wanted))
                except (Gap, NotImplementedError, AttributeError):  # as in the suites: see there
                    continue
                plain = plain or found
                records.append({"problem": problem, "quantity": quantity, "contestant": name} | found)
                shown.add_row(quantity, name, *(f"{found[kind] / plain[kind]:.2f}" for kind in KINDS))
        console.print(shown)
    is_whole = not options.problems and not options.contestant
    if is_whole or options.update:
        before = RESULTS / "work.json"
        kept = json.loads(before.read_text())["records"] if options.update and before.exists() else []
        found = {record["problem"] for record in records}
        records = [record for record in kept if record["problem"] not in found] + records
        write_results("work", environment(torch.get_num_threads(), 1, 1), records=records)


if __name__ == "__main__":
    main()
