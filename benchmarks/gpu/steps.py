"""The steps: each yields cases by name, and each case is a function that returns a record.

A record with ``"skipped"`` says why there is none. What raises an error is recorded as ``"error"``.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

import packprop
from benchmarks.clipping import opacus_ghost
from benchmarks.contestants import CONTESTANTS, Gap, Quantity
from benchmarks.gpu.device import (
    Options,
    exact_matrix_products,
    in_turns,
    peak_of,
    settle,
    work_of,
)
from benchmarks.gpu.problems import LARGE, MEDIUM, SMALL, built, moved
from benchmarks.matrix import counts
from benchmarks.measure import ROOT
from benchmarks.problems import Task
from benchmarks.run import Record
from packprop import extensions
from packprop.engine.algebra import kronecker
from packprop.engine.memory.plan import BudgetTooSmall
from packprop.engine.tensors.nesting import tensors_in
from packprop.errors import PackpropError, PackpropWarning

Cases = dict[str, Callable[[], Record]]


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


def passed(task: Task, *asked: Any, memory: Any = None) -> Tensor:
    """One forward and backward pass of an extended model; returns the loss."""
    task.model.zero_grad()
    loss: Tensor = task.loss(task.model(task.inputs), task.targets)
    if asked:
        with packprop.backpack(*asked, memory=memory):
            loss.backward()
    else:
        loss.backward()
    return loss.detach()


def extended(task: Task) -> Task:
    """Extend a task's model and loss; its passes without extensions cost what they cost before."""
    packprop.extend(task.model)
    packprop.extend(task.loss)
    return task


# ---------------------------------------------------------------------------------- tests


TESTS = {
    "cases": ["tests/extensions/test_cases.py"],
    "laws": ["tests/extensions/test_laws.py", "tests/extensions/test_token_passes.py"],
    "branches on a GPU": ["tests/eager/test_accelerators.py"],
}
SMOKE = {"cases": ["tests/extensions/test_cases.py", "-k", "test_everything and linear-2d"]}


def tests(options: Options) -> Cases:
    """Run the cases and the laws with ``PACKPROP_TEST_DEVICE``."""
    return {
        name: partial(_run_tests, arguments, options)
        for name, arguments in (SMOKE if options.small else TESTS).items()
    }


def _run_tests(arguments: list[str], options: Options) -> Record:
    surroundings = {**os.environ, "PACKPROP_TEST_DEVICE": options.device, "OMP_NUM_THREADS": "1"}
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder, "report.xml")
        command = [sys.executable, "-m", "pytest", "-q", "-x" if options.small else "--maxfail=200"]
        command += ["-m", "not thorough", f"--junitxml={report}", *arguments]
        command += ["-n", str(options.jobs)] if options.jobs > 1 else []
        done = subprocess.run(command, cwd=ROOT, env=surroundings, capture_output=True, text=True, check=False)
        if not report.exists():
            raise RuntimeError((done.stdout + done.stderr).strip()[-2000:])
        found = counts(report.read_text())
    failed = [line for line in done.stdout.splitlines() if line.startswith(("E   ", "FAILED", "ERROR"))]
    return found | {"failures": found["failures"][:60], "said": failed[:60]}


# ------------------------------------------------------------------------------- agreement


def source() -> torch.Generator:
    """The same draws on every device: they come from the CPU."""
    return torch.Generator().manual_seed(0)


def _drawing(name: str, **options: Any) -> Any:
    return getattr(extensions, name)(generator=source(), **options)


ASKED: dict[str, Callable[[], Any]] = {
    **{
        name: getattr(extensions, name)
        for name in (
            *("BatchGrad", "BatchL2Grad", "SumGradSquared", "Variance", "BatchDotGrad"),
            *("DiagGGNExact", "BatchDiagGGNExact", "SqrtGGNExact", "KFLR", "DiagHessian", "BatchDiagHessian"),
        )
    },
    **{
        name: partial(_drawing, name)
        for name in ("DiagGGNMC", "BatchDiagGGNMC", "SqrtGGNMC", "KFAC", "DiagHessianMC")
    },
    # fewer draws than rows leave some eigenvectors arbitrary, along which fresh draws have eigenvalues
    "EKFAC": partial(_drawing, "EKFAC", mc_samples=16),
    **{name: getattr(extensions, name) for name in ("HMP", "GGNMP", "PCHMP")},
}
PRECISIONS = {"float32": torch.float32, "bfloat16": torch.bfloat16}
TOLERANCES = {"float32": 2e-4, "bfloat16": 0.1}
"""Differences from single precision on the CPU, over the largest entry of the same value of all parameters."""


def agreement(options: Options) -> Cases:
    """Compare every extension with single precision on the CPU, with the same weights and draws."""
    names = ("mlp",) if options.small else tuple(SMALL)
    return {
        f"{name}, {precision}": partial(_agreement, name, precision, options)
        for name in names
        for precision in PRECISIONS
    }


def _agreement(name: str, precision: str, options: Options) -> Record:
    exact_matrix_products()
    differences, others = {}, {}
    for extension, make in ASKED.items():
        reference = _values(name, make, "cpu", torch.float32, PRECISIONS[precision])
        found = _values(name, make, options.device, PRECISIONS[precision])
        if isinstance(reference, str) or isinstance(found, str):
            same = isinstance(reference, str) and isinstance(found, str)
            others[extension] = (
                f"both refuse: {reference}" if same else f"CPU: {reference}; here: {found}"[:500]
            )
            continue
        largest = max(tensor.abs().max().item() for tensor in reference) or 1.0
        pairs = zip(found, reference, strict=True)
        differences[extension] = max((mine - other).abs().max().item() for mine, other in pairs) / largest
    bound = TOLERANCES[precision]
    beyond = {key: value for key, value in differences.items() if not value <= bound}
    unequal = [key for key, text in others.items() if not text.startswith("both refuse")]
    return {
        "agree": not beyond and not unequal,
        "tolerance": bound,
        "largest_difference": max(differences.values(), default=None),
        "beyond": beyond,
        "differences": differences,
        "refused": others,
    }


def _values(
    name: str,
    make: Callable[[], Any],
    device: str,
    dtype: torch.dtype,
    rounded: torch.dtype | None = None,
) -> list[Tensor] | str:
    """Return what an extension saves, on the CPU in single precision; or what it says instead."""
    task = built(SMALL, name, "cpu", rounded or dtype)
    task = extended(moved(task, device, dtype))
    extension = make()
    try:
        passed(task, extension)
        saved = [getattr(p, extension.savefield) for p in task.model.parameters()]
        if callable(saved[0]):
            parameters = task.model.parameters()
            vectors = (torch.linspace(-1, 1, p.numel()).view_as(p).to(p) for p in parameters)
            saved = [product(vector) for product, vector in zip(saved, vectors, strict=True)]
    except (PackpropError, RuntimeError, TypeError) as error:
        return f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
    dense = [kronecker.dense(each) if isinstance(each, kronecker.Eigen) else each for each in saved]
    return [tensor.float().cpu() for each in dense for tensor in tensors_in(each)]


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
        real = peak_of(partial(passed, task, make(), memory=plan), there, options)
        points.append({"budget": budget, "predicted": plan.peak, "measured": real["bytes"], "by": real["by"]})
    ratios = [point["measured"] / point["predicted"] for point in points]
    return {
        "measured_over_predicted": ratios,
        "budgets_held": all(point["measured"] <= point["budget"] for point in points),
        "points": points,
    }


def _out_of_memory(options: Options) -> Record:
    """Leave the allocator less than a pass would like to take; compare its values with those of a free one."""
    if not options.on_gpu:
        return {"skipped": "only an accelerator's allocator can be told to run out of memory"}
    exact_matrix_products()
    task = extended(built(MEDIUM, "gpt", options.device))
    passed(task, extensions.Variance())
    expected = [p.variance.clone() for p in task.model.parameters()]  # type: ignore[attr-defined]  # saved
    start = torch.cuda.memory_allocated()
    peak = peak_of(lambda: passed(task, extensions.Variance()), [], options)["bytes"]
    total = torch.cuda.get_device_properties(0).total_memory
    found: Record = {"free_peak": peak, "tried": []}
    for share in (0.9, 0.8, 0.7, 0.6, 0.5):
        settle(options)
        limit = int(start + share * (peak - start))
        torch.cuda.set_per_process_memory_fraction(limit / total)
        try:
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                passed(task, extensions.Variance())
            said = [str(each.message) for each in caught if issubclass(each.category, PackpropWarning)]
            pairs = zip(task.model.parameters(), expected, strict=True)
            off = max((p.variance - other).abs().max().item() for p, other in pairs)  # type: ignore[attr-defined]  # saved
            largest = max(other.abs().max().item() for other in expected)
            found["tried"].append({"share": share, "warnings": said[:3], "difference": off / largest})
        except torch.OutOfMemoryError as error:
            found["tried"].append({"share": share, "gave_up": str(error)[:300]})
        finally:
            torch.cuda.set_per_process_memory_fraction(1.0)
    found["planned_again"] = any(each.get("warnings") for each in found["tried"])
    return found


# ----------------------------------------------------------------------------------- speed


SPEED = {"norms": "BatchL2Grad", "variance": "Variance", "KFAC": "KFAC"}
PEERS = {
    "norms": {"Opacus": "Opacus, ghost norms", "torch.func": "torch.func"},
    "variance": {"torch.func": "torch.func"},
}


def speed(options: Options) -> Cases:
    """Time norms, variance, factors and clipping in bfloat16, in turns with plain passes and peers."""
    makers, names = (SMALL, ("gpt", "llama")) if options.small else (LARGE, tuple(LARGE))
    return {
        f"{name}, {quantity}": partial(_speed, makers, name, quantity, options)
        for name in names
        for quantity in (*SPEED, "clipping")
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
    "replayed": {"backend": "eager"},
    "cudagraphs": {"backend": "cudagraphs"},
    "reduce-overhead": {"mode": "reduce-overhead"},
}


def graphs(options: Options) -> Cases:
    """Time compiled steps, with CUDA graphs and without, beside ordinary ones."""
    makers, names = (SMALL, ("mlp",)) if options.small else (MEDIUM, tuple(MEDIUM))
    quantities = ("BatchL2Grad",) if options.small else ("BatchL2Grad", "Variance", "KFAC")
    backends = tuple(BACKENDS) if options.on_gpu else ("replayed",)
    return {
        f"{name}, {quantity}, {backend}": partial(_graphs, makers, name, quantity, backend, options)
        for name in names
        for quantity in quantities
        for backend in backends
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
    "agreement": Step("agreement with the CPU", 5, agreement, ("agree", "largest_difference")),
    "memory": Step("plans and peaks", 4, memory, ("measured_over_predicted", "budgets_held", "planned_again")),
    "speed": Step("bfloat16, large models", 8, speed, ("time_over_plain", "peak_over_plain")),
    "kernels": Step("kernels and waits", 3, kernels, ("kernels", "synchronizations", "operations")),
    "graphs": Step("compiled steps", 6, graphs, ("time_over_plain", "difference")),
}
"""In this order; their limits are more than what they should take."""
