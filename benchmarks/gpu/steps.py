"""The steps: each yields cases by name, and each case is a function that returns a record.

A record with ``"skipped"`` says why there is none. What raises an error is recorded as ``"error"``.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch

import packprop
from benchmarks.clipping import opacus_ghost
from benchmarks.contestants import CONTESTANTS, Gap, Quantity
from benchmarks.gpu.agreement import agreement, programs, tests
from benchmarks.gpu.device import (
    Cases,
    Options,
    exact_matrix_products,
    in_turns,
    kernels_of,
    peak_of,
    settle,
    work_of,
)
from benchmarks.gpu.problems import LARGE, MEDIUM, SMALL, built, extended, passed
from benchmarks.problems import Task
from benchmarks.run import Record
from packprop import extensions
from packprop.engine.memory.plan import BudgetTooSmall
from packprop.engine.tensors.nesting import tensors_in
from packprop.errors import PackpropWarning


class Step(NamedTuple):
    """A step, and the minutes after which it is stopped.

    Args:
        title: What it measures.
        minutes: The limit.
        cases: Its cases.
        figures: The entries of a record that the summary shows.
    """

    title: str
    minutes: float
    cases: Callable[[Options], Cases]
    figures: tuple[str, ...]


# ---------------------------------------------------------------------------------- memory


PLANNED = ("BatchGrad", "BatchL2Grad", "Variance", "DiagGGNMC", "KFAC", "DiagGGNExact")


def memory(options: Options) -> Cases:
    """Compare plans with peaks, keep within budgets, and run out of memory."""
    makers = SMALL if options.small else MEDIUM
    names = ("mlp",) if options.small else tuple(MEDIUM)
    asked = [(name, quantity) for name in names for quantity in PLANNED[: 2 if options.small else None]]
    cases: Cases = {
        f"{name}, {quantity}": partial(_planned, makers, name, quantity, options)
        for name, quantity in asked
        if (name, quantity) != ("gpt", "DiagGGNExact")  # one column for each position and word
    }
    return cases | {"out of memory": partial(_out_of_memory, options)}


def _planned(makers: Any, name: str, quantity: str, options: Options) -> Record:
    task = extended(built(makers, name, options.device))
    make, batch = getattr(extensions, quantity), (task.inputs, task.targets)
    there = [*task.model.parameters(), *task.model.buffers(), *batch]
    passed(task)  # libraries take memory of their own at their first call
    free = packprop.plan(task.model, task.loss, batch, [make()])
    try:
        packprop.plan(task.model, task.loss, batch, [make()], memory=1)
        least = free.peak
    except BudgetTooSmall as error:
        least = min(free.peak, error.floor)
    points = []
    for share in (1.0, 0.5, 0.0):
        budget = int(least + share * (free.peak - least))
        plan = packprop.plan(task.model, task.loss, batch, [make()], memory=budget)
        for parameter in task.model.parameters():
            vars(parameter).pop(make().savefield, None)
        task.model.zero_grad()
        real = peak_of(partial(_two_steps, task, make, plan), there, options)
        points.append({"budget": budget, "predicted": plan.peak, "measured": real["bytes"], "by": real["by"]})
    ratios = [point["measured"] / point["predicted"] for point in points]
    return {
        "measured_over_predicted": ratios,
        "budgets_held": all(point["measured"] <= point["budget"] for point in points),
        "points": points,
    }


def _two_steps(task: Task, make: Callable[[], Any], plan: Any) -> None:
    """Plans are for loops: the results of a step are there during the next one."""
    for _ in range(2):
        passed(task, make(), memory=plan)


def _out_of_memory(options: Options) -> Record:
    """Leave the allocator less than a pass would like to take; compare its values with those of a free one."""
    if not options.on_gpu:
        return {"skipped": "only an accelerator's allocator can be told to run out of memory"}
    exact_matrix_products()
    task = extended(built(MEDIUM, "convolutions", options.device))
    passed(task, extensions.DiagGGNExact())
    expected = [p.diag_ggn_exact.clone() for p in task.model.parameters()]  # type: ignore[attr-defined]  # saved
    start = torch.cuda.memory_allocated()
    peak = peak_of(lambda: passed(task, extensions.DiagGGNExact()), [], options)["bytes"]
    total = torch.cuda.get_device_properties(0).total_memory
    found: Record = {"free_peak": peak, "tried": []}
    for share in (0.9, 0.8, 0.7, 0.6, 0.5):
        settle(options)
        limit = int(start + share * peak)
        torch.cuda.set_per_process_memory_fraction(limit / total)
        try:
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                passed(task, extensions.DiagGGNExact())
            said = [str(each.message) for each in caught if issubclass(each.category, PackpropWarning)]
            pairs = zip(task.model.parameters(), expected, strict=True)
            off = max((p.diag_ggn_exact - other).abs().max().item() for p, other in pairs)  # type: ignore[attr-defined]  # saved
            largest = max(other.abs().max().item() for other in expected)
            found["tried"].append({"share": share, "warnings": said[:3], "difference": off / largest})
        except torch.OutOfMemoryError as error:
            found["tried"].append({"share": share, "gave_up": str(error)[:300]})
        finally:
            torch.cuda.set_per_process_memory_fraction(1.0)
    found["planned_again"] = any(each.get("warnings") for each in found["tried"])
    return found


# ----------------------------------------------------------------------------------- speed


SPEED = {"norms": "BatchL2Grad", "products": "BatchDotGrad", "variance": "Variance", "KFAC": "KFAC"}
PEERS = {
    "norms": {"Opacus": "Opacus, ghost norms", "torch.func": "torch.func"},
    "variance": {"torch.func": "torch.func"},
}


ADAPTED = {("qwen-7b, adapters", quantity) for quantity in ("products", "variance", "KFAC")}
"""Left out: nobody else computes them for a model of this size."""


def speed(options: Options) -> Cases:
    """Time quantities of gradients, factors and clipping in bfloat16, in turns with plain passes and peers."""
    makers, names = (SMALL, ("gpt", "llama", "adapters")) if options.small else (LARGE, tuple(LARGE))
    return {
        f"{name}, {quantity}": partial(_speed, makers, name, quantity, options)
        for quantity in ("norms", "clipping", "variance", "KFAC", "products")
        for name in names
        if (name, quantity) not in ADAPTED
    }


def _speed(makers: Any, name: str, quantity: str, options: Options) -> Record:
    task = extended(built(makers, name, options.device, torch.bfloat16))
    calls: dict[str, Callable[[], Any]] = {"plain": partial(passed, task)}
    peers: dict[str, Callable[[], Callable[[], Any]]] = {}
    if quantity == "clipping":
        calls["packprop"] = partial(_clipped, task)
        peers["Opacus"] = lambda: opacus_ghost(built(makers, name, options.device, torch.bfloat16))
    else:
        calls["packprop"] = partial(passed, task, getattr(extensions, SPEED[quantity])())
        for shown, contestant in PEERS.get(quantity, {}).items():
            peers[shown] = partial(
                CONTESTANTS[contestant].prepare,
                built(makers, name, options.device, torch.bfloat16),
                Quantity((SPEED[quantity],)),
            )
    found: Record = {"parameters": sum(p.numel() for p in task.model.parameters()), "skipped_peers": {}}
    found["batch"] = [*task.inputs.shape]
    for peer, prepare in peers.items():
        try:
            calls[peer] = prepare()
            calls[peer]()
        except (Gap, ImportError, torch.OutOfMemoryError, RuntimeError, NotImplementedError) as error:
            calls.pop(peer, None)
            found["skipped_peers"][peer] = f"{type(error).__name__}: {error}"[:300]
    timings = in_turns(calls, options)
    if options.on_gpu:
        kernels = {key: kernels_of(calls[key], options) for key in ("plain", "packprop")}
        found["device_over_plain"] = kernels["packprop"]["device_seconds"] / kernels["plain"]["device_seconds"]
        found |= {f"{key} kernels": each for key, each in kernels.items()}
    for key, call in calls.items():
        task.model.zero_grad()
        _forget(task)
        there = [*task.model.parameters(), task.inputs, task.targets]
        timings[key]["peak"] = peak_of(call, there, options)["bytes"]
    first = timings["plain"]
    return found | {
        "time_over_plain": {key: each["over_plain"] for key, each in timings.items()},
        "peak_over_plain": {key: each["peak"] / first["peak"] for key, each in timings.items()},
        "plain_seconds": first["seconds"],
        "timings": timings,
    }


def _clipped(task: Task) -> None:
    task.model.zero_grad()
    loss = task.loss(task.model(task.inputs), task.targets)
    with packprop.clipped_gradients(max_norm=1.0):
        loss.backward()


def _forget(task: Task) -> None:
    """Drop what passes have saved on parameters."""
    for parameter in task.model.parameters():
        for field in [getattr(extensions, name)().savefield for name in SPEED.values()]:
            vars(parameter).pop(field, None)


# ------------------------------------------------------------------------ kernels and waits


COUNTED = ("plain", "BatchGrad", "BatchL2Grad", "Variance", "DiagGGNMC", "KFAC")


def kernels(options: Options) -> Cases:
    """Count kernels and waits of a step that has run before."""
    makers, names = (SMALL, ("mlp", "gpt")) if options.small else (MEDIUM, tuple(MEDIUM))
    return {
        f"{name}, {quantity}": partial(_kernels, makers, name, quantity, options)
        for name in names
        for quantity in COUNTED
    }


def _kernels(makers: Any, name: str, quantity: str, options: Options) -> Record:
    task = extended(built(makers, name, options.device))
    asked = [] if quantity == "plain" else [getattr(extensions, quantity)()]
    for _ in range(3):
        passed(task, *asked)
    found = work_of(partial(passed, task, *asked), options)
    if options.on_gpu:
        found["warned_waits"] = _warned(partial(passed, task, *asked))
    return found


def _warned(call: Callable[[], Any]) -> list[str]:
    """Return where a call waits for the device, as ``torch.cuda.set_sync_debug_mode`` sees it."""
    with warnings.catch_warnings(record=True) as caught, _watched_waits():
        warnings.simplefilter("always")
        call()
    return [f"{Path(each.filename).name}:{each.lineno}" for each in caught if "synchroniz" in str(each.message)]


@contextmanager
def _watched_waits() -> Iterator[None]:
    torch.cuda.set_sync_debug_mode("warn")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


# ---------------------------------------------------------------------------------- graphs


BACKENDS: dict[str, dict[str, Any]] = {
    "cudagraphs": {"backend": "cudagraphs"},
    "replayed": {"backend": "eager"},
    "reduce-overhead": {"mode": "reduce-overhead"},
}


def graphs(options: Options) -> Cases:
    """Time compiled steps, with CUDA graphs and without, beside ordinary ones."""
    makers, names = (SMALL, ("mlp",)) if options.small else (MEDIUM, tuple(MEDIUM))
    quantities = ("BatchL2Grad",) if options.small else ("BatchL2Grad", "Variance", "KFAC")
    backends = tuple(BACKENDS) if options.on_gpu else ("replayed",)
    return {
        f"{name}, {quantity}, {backend}": partial(_graphs, makers, name, quantity, backend, options)
        for backend in backends  # the one that compiles for a minute comes last
        for name in names
        for quantity in quantities
    }


def _graphs(makers: Any, name: str, quantity: str, backend: str, options: Options) -> Record:
    exact_matrix_products()
    eager, own = (extended(built(makers, name, options.device)) for _ in range(2))
    make = getattr(extensions, quantity)
    field, sampled = make().savefield, quantity == "KFAC"
    step = packprop.compile(own.model, own.loss, make(), **BACKENDS[backend])
    calls = {
        "plain": partial(passed, eager),
        "eager": partial(passed, eager, make()),
        "compiled": partial(step, own.inputs, own.targets),
    }
    for _ in range(6):  # within these it is traced, compiled and recorded
        own.model.zero_grad()
        calls["compiled"]()
    calls["eager"]()
    pairs = list(zip(own.model.parameters(), eager.model.parameters(), strict=True))
    both = [tuple(map(list, map(tensors_in, (vars(a)[field], vars(b)[field])))) for a, b in pairs]
    largest = max(other.abs().max().item() for _, others in both for other in others)
    off = max((x - y).abs().max().item() for mine, others in both for x, y in zip(mine, others, strict=True))
    timings = in_turns(calls, options)
    found: Record = {"time_over_plain": {key: each["over_plain"] for key, each in timings.items()}}
    if not sampled:  # each of them draws its own numbers
        found["difference"] = off / largest
    return found | {"says": str(step), "timings": timings}


STEPS: dict[str, Step] = {
    "tests": Step("tests on the device", 8, tests, ("passed", "failed", "skipped")),
    "programs": Step("random programs", 3, programs, ("programs", "passed", "failed", "refused")),
    "agreement": Step("agreement with the CPU", 5, agreement, ("agree", "largest_difference")),
    "memory": Step("plans and peaks", 4, memory, ("measured_over_predicted", "budgets_held", "planned_again")),
    "speed": Step(
        "large models in bfloat16", 8, speed, ("time_over_plain", "device_over_plain", "peak_over_plain")
    ),
    "kernels": Step("kernels and waits", 3, kernels, ("kernels", "synchronizations", "operations")),
    "graphs": Step("compiled steps", 6, graphs, ("time_over_plain", "difference")),
}
"""In this order; their limits are more than what they should take."""
