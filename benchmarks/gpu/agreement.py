"""Steps about values: the tests on a device, and the agreement of every extension with the CPU."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.gpu.device import Cases, Options, exact_matrix_products
from benchmarks.gpu.problems import SMALL, built, extended, moved, passed, source
from benchmarks.matrix import counts
from benchmarks.measure import ROOT
from benchmarks.run import Record
from packprop import extensions
from packprop.engine.algebra import kronecker
from packprop.engine.tensors.nesting import tensors_in
from packprop.errors import PackpropError

TESTS = {
    "cases": ["tests/extensions/test_cases.py"],
    "laws": ["tests/extensions/test_laws.py", "tests/extensions/test_token_passes.py"],
    "branches on a GPU": [
        "tests/eager/test_accelerators.py",
        "tests/eager/test_closures.py",
        "tests/memory/test_plans.py",
        "tests/compiled/test_compilers.py::test_cuda_graphs",
    ],
}
SMOKE = {"cases": ["tests/extensions/test_cases.py", "-k", "test_everything and linear-2d"]}


def tests(options: Options) -> Cases:
    """Run the cases and the laws with ``PACKPROP_TEST_DEVICE``."""
    return {
        name: partial(_run_tests, arguments, options)
        for name, arguments in (SMOKE if options.small else TESTS).items()
    }


def programs(options: Options) -> Cases:
    """Compare random programs with plain autograd on the device."""
    return {f"after {passes} passes": partial(_hunt, passes, options) for passes in (1, 4)}


def _surroundings(options: Options) -> dict[str, str]:
    return {**os.environ, "PACKPROP_TEST_DEVICE": options.device, "OMP_NUM_THREADS": "1"}


def _run_tests(arguments: list[str], options: Options) -> Record:
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder, "report.xml")
        command = [sys.executable, "-m", "pytest", "-q", "-x" if options.small else "--maxfail=400"]
        command += [f"--junitxml={report}", *arguments]
        command += ["-n", str(options.jobs)] if options.jobs > 1 else []
        done = _run(command, options)
        if not report.exists():
            raise RuntimeError((done.stdout + done.stderr).strip()[-2000:])
        found = counts(report.read_text())
    failed = [line for line in done.stdout.splitlines() if line.startswith(("E   ", "FAILED", "ERROR"))]
    return found | {"failures": found["failures"][:60], "said": failed[:200]}


def _run(command: list[str], options: Options) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command, cwd=ROOT, env=_surroundings(options), capture_output=True, text=True, check=False
    )


def _hunt(passes: int, options: Options) -> Record:
    """Compare random programs with plain autograd; what is counted are answers."""
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder, "report.json")
        command = [sys.executable, "-m", "tests.hunt", "--report", str(report), "--jobs", str(options.jobs)]
        command += ["--graphs", "4"] if options.small else ["--graphs", "4000", "--seconds", "40"]
        command += ["--passes", str(passes)]
        done = _run(command, options)
        if not report.exists():
            raise RuntimeError((done.stdout + done.stderr).strip()[-2000:])
        found = json.loads(report.read_text())
    answers = sum((Counter(statuses) for statuses in found["counts"].values()), Counter[str]())
    return {
        "programs": found["programs"],
        "passed": answers["right"],
        "failed": len(found["failures"]),
        "refused": answers["refused"],
        "counts": found["counts"],
        "failures": found["failures"][:20],
    }


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
ROUNDING = 2.0
"""In low precision, times the difference that the CPU has itself: rounding flips draws and signs."""


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
    differences: dict[str, float] = {}
    others: dict[str, str] = {}
    bounds: dict[str, float] = {}
    unequal: list[str] = []
    dtype = PRECISIONS[precision]
    for extension, make in ASKED.items():
        reference = _values(name, make, "cpu", torch.float32, dtype)
        found = _values(name, make, options.device, dtype)
        said = {place: text for place, text in (("CPU", reference), ("here", found)) if isinstance(text, str)}
        if isinstance(reference, str) or isinstance(found, str):
            others[extension] = "; ".join(f"{place}: {text}" for place, text in said.items())
            is_known = len(said) == 2 or "_cudnn_rnn_backward" in others[extension]
            unequal += [] if is_known else [extension]
            continue
        if [each.shape for each in found] != [each.shape for each in reference]:
            others[extension] = "values of another form: cuDNN's recurrent layers are no affine uses"
            continue
        differences[extension] = _difference(found, reference)
        bounds[extension] = TOLERANCES[precision]
        if not differences[extension] <= bounds[extension] and dtype != torch.float32:
            usual = _values(name, make, "cpu", dtype)
            if not isinstance(usual, str):
                bounds[extension] = max(bounds[extension], ROUNDING * _difference(usual, reference))
    if any("another form" in text for text in others.values()):  # the factors have other eigenvectors
        differences.pop("EKFAC", None)
    beyond = {key: value for key, value in differences.items() if not value <= bounds[key]}
    return {
        "agree": not beyond and not unequal,
        "tolerance": TOLERANCES[precision],
        "wider": {key: bound for key, bound in bounds.items() if bound > TOLERANCES[precision]},
        "largest_difference": max(differences.values(), default=None),
        "beyond": beyond,
        "differences": differences,
        "refused": others,
    }


def _difference(found: list[Tensor], reference: list[Tensor]) -> float:
    """Return the largest difference between entries, over the largest entry."""
    largest = max(tensor.abs().max().item() for tensor in reference) or 1.0
    pairs = zip(found, reference, strict=True)
    return max((mine - other).abs().max().item() for mine, other in pairs) / largest


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
        parameters = [p for p in task.model.parameters() if p.requires_grad]
        saved = [getattr(p, extension.savefield) for p in parameters]
        if callable(saved[0]):
            vectors = (torch.linspace(-1, 1, p.numel()).view_as(p).to(p) for p in parameters)
            saved = [product(vector) for product, vector in zip(saved, vectors, strict=True)]
    except (PackpropError, RuntimeError, TypeError) as error:
        return f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
    dense = [kronecker.dense(each) if isinstance(each, kronecker.Eigen) else each for each in saved]
    return [tensor.float().cpu() for each in dense for tensor in tensors_in(each)]
