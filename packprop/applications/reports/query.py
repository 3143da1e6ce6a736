"""``packprop query``: the stored samples that help, and that harm, some queries."""

from __future__ import annotations

import argparse
import sys
import time
from typing import Any

import torch
from torch import nn

from packprop.applications.dataset.result import Result
from packprop.applications.queries.influence import influence
from packprop.applications.queries.result import WIDTH
from packprop.applications.reports.commands import (
    Commands,
    add_output_options,
    add_run_options,
    new_command,
    positive,
    print_result,
)
from packprop.applications.reports.factory import call_factory, device_named, load_factory, moved
from packprop.errors import BadInput, require_seed
from packprop.store.reading import Store

ASKED = "packprop query was called."

DESCRIPTION = f"""\
The stored samples that help, and that harm, some queries: the largest and the smallest inner products of their
gradients, plain or preconditioned by damped curvature (influence functions).

in
  STORE    a folder that packprop.compute(..., store=...) or a StoreWriter wrote, with BatchGrad or
           Projected(BatchGrad(), d)
  FACTORY  names a function of yours that takes no arguments and returns three things: the model that the
           store was written with, its loss, and the queries, as data of any form that compute takes
  FILE     a file that Result.save wrote, of a result of compute with EKFAC, KFAC, KFLR or a diagonal

out
  tables on standard output, {WIDTH} columns wide, one for each query: products, identifiers and rows of the
  samples that help it most, and of those that harm it most. The gradients are those of a summed loss:
  under cross entropy, those of each sample's own loss. If the curvature is that of a mean loss over N
  samples, product / N is, to first order, the growth of the query's loss without the sample.
"""

EXAMPLES = """\
examples
  packprop query runs/gradients --factory train:queries
  packprop query runs/gradients --factory train:queries --curvature ekfac.safetensors --damping 1e-4
  packprop query runs/gradients --factory train:queries --k 50 --json > found.json

exit status
  0 done, 1 an error inside packprop, 2 wrong input, 130 interrupted

The same from Python:
  found = packprop.influence("runs/gradients", model, loss, queries, curvature=result, damping=1e-4)
"""


def add_query(commands: Commands) -> None:
    """Add the command with its arguments."""
    command = new_command(
        commands, "query", "the stored samples that help, and harm, some queries", DESCRIPTION, EXAMPLES
    )
    add = command.add_argument
    add("store", metavar="STORE", help="folder of the store")
    add("--factory", metavar="FACTORY", required=True, help="package.module:function")
    add(
        "--curvature",
        metavar="FILE",
        help="the curvature that preconditions the gradients of queries (default: none)",
    )
    add("--entry", metavar="NAME", help="the entry of FILE, such as ekfac, if it holds several curvatures")
    add("--damping", type=float, metavar="X", help="added to each block of the curvature, in units of it")
    add(
        "--factored",
        action="store_true",
        help="share the damping between two Kronecker factors, as in Martens and Grosse (2015), 6.3 (default: "
        "invert the damped block exactly)",
    )
    add("--k", type=positive, metavar="N", default=10, help="samples in each list (default: %(default)s)")
    add("--quantity", metavar="NAME", help="grad_batch or grad_batch_projected, if the store has both")
    add(
        "--memory",
        metavar="BYTES",
        default="500MiB",
        help="memory for the current rows and the gradients of queries (default: %(default)s)",
    )
    add_run_options(command)
    add_output_options(command, "the answers")


def query(options: argparse.Namespace) -> None:
    """Run the command.

    Raises:
        BadInput: If an argument of the command is wrong.
    """
    started = time.perf_counter()
    store = Store(options.store)
    curvature = None if options.curvature is None else _curvature(options.curvature, options.entry)
    device = None if options.device is None else device_named(ASKED, options.device)
    factory = load_factory(options.factory, ASKED)
    require_seed(ASKED, options.seed)
    torch.manual_seed(options.seed)
    model, loss, queries = call_factory(factory, options.factory, ASKED)
    model, loss = moved(device, model, loss)
    if isinstance(model, nn.Module) and options.evaluation:
        model.eval()
    found = influence(
        store,
        model,
        loss,
        queries,
        curvature=curvature,
        damping=options.damping,
        factored=options.factored,
        k=options.k,
        quantity=options.quantity,
        memory=options.memory,
        batch_size=options.batch_size,
    )
    print_result(found, options.json, WIDTH)
    if options.json:
        return
    readings = "once" if found.readings == 1 else f"{found.readings} times"
    seconds = time.perf_counter() - started
    print(f"\nread {store.samples:,} samples {readings}, {seconds:.1f} s", file=sys.stderr)


def _curvature(path: str, entry: str | None) -> Any:
    result = Result.load(path)
    if entry is None:
        return result
    if entry not in result:
        raise BadInput(
            ASKED,
            f"--entry {entry}",
            f"{path} holds {', '.join(result)}",
            "name one of these entries",
        )
    return Result({entry: result[entry]}, result.samples, result.loss, result.reduction)
