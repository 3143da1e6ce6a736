"""Time, memory and agreement of contestants.

Time is taken with all contestants in turns in one process, as ratios to ``plain`` of the same
round, so that a machine that slows down slows both sides of a ratio. Memory is taken in a fresh
process for each contestant (``python -m benchmarks.measure``), so that nobody inherits pages from
a neighbour. See the notes for what is counted.
"""

from __future__ import annotations

import gc
import json
import random
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from statistics import median, quantiles
from typing import Any

import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from benchmarks.contestants import CONTESTANTS, QUANTITIES, Call, Gap, Quantity, Results
from benchmarks.problems import PROBLEMS, Task
from benchmarks.tracked import size_of
from packprop.engine.memory.live import LiveBytes
from packprop.engine.tensors.device import return_freed_pages

ROOT = Path(__file__).resolve().parent.parent
MIB = 2**20

# ---------------------------------------------------------------------------------- time


@dataclass(frozen=True)
class Spread:
    """A median with its quartiles."""

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, values: list[float]) -> Spread:
        """Summarise one or more values.

        >>> Spread.of([3.0, 1.0, 2.0])
        Spread(median=2.0, low=1.5, high=2.5)
        """
        if len(values) == 1:
            return cls(values[0], values[0], values[0])
        low, _, high = quantiles(values, n=4, method="inclusive")
        return cls(median(values), low, high)


@dataclass(frozen=True)
class Timing:
    """Seconds of one call, and that over ``plain`` of the same round."""

    seconds: Spread
    over_plain: Spread
    rounds: int
    calls_per_turn: int


def take_turns(
    calls: Mapping[str, Call],
    rounds: int,
    least_seconds: float = 0.05,
    tick: Callable[[], None] = lambda: None,
    synchronize: Callable[[], None] = lambda: None,
) -> dict[str, Timing]:
    """Time contestants in turns; ``calls`` must be warm and must hold ``"plain"``.

    A turn repeats its call until ``least_seconds`` have gone by, as found in one trial turn. As in a
    training loop, what a call returns is freed inside the clock, and what a library leaves on
    parameters stays there until its next call. The order is shuffled anew each round (seeded), so that
    nobody always follows the same neighbour's cache and heap. ``synchronize`` waits for a device: the clock
    starts and stops when it has nothing left to do.
    """
    repeats = {}
    for name, call in calls.items():
        once = _turn(call, 1, synchronize)
        repeats[name] = max(1, min(1000, round(least_seconds / max(once, 1e-6))))
    order = list(calls)
    shuffle = random.Random(0)
    taken: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(rounds):
        shuffle.shuffle(order)
        for name in order:
            taken[name].append(_turn(calls[name], repeats[name], synchronize))
            tick()
    plain = taken["plain"]
    return {
        name: Timing(
            Spread.of(seconds),
            Spread.of([mine / base for mine, base in zip(seconds, plain, strict=True)]),
            rounds,
            repeats[name],
        )
        for name, seconds in taken.items()
    }


def _turn(call: Call, repeats: int, synchronize: Callable[[], None]) -> float:
    gc.collect()
    synchronize()
    start = time.perf_counter()
    for _ in range(repeats):
        call()
    synchronize()
    return (time.perf_counter() - start) / repeats


# -------------------------------------------------------------------------------- memory
#
# NOTE [Which peak]
#
# Resident set: the kernel's own high-water mark, ``VmHWM``, reset to the present value just before
# the call by writing 5 to ``/proc/self/clear_refs``. ``ru_maxrss`` is the wrong one: it cannot be
# reset, so that a spike of an import hides a smaller peak of the call, and it survives ``exec``, so
# that a child starts at the peak of the process that launched it (a child of a 700 MiB parent says
# 710 MiB before its first line; its VmHWM says 9). A sampling thread is the wrong one too: it
# needs the interpreter lock, and short peaks fall between its samples.
#
# Before the start is read, the libraries are imported, weights and data built, and the contestant
# run once on two samples, which pays for what is paid once in a process (thread pools, code
# generation; oneDNN's, for which two samples may be too few, by a product of its own); then what that
# left behind goes back to the system, for pages kept by ``malloc`` could be used again unseen. It
# counts everything, the slack of ``malloc`` included, which differs by tens of MiB from one process to
# the next: hence a median over several.
#
# Allocated: the most bytes that PyTorch's CPU allocator had given out at once since the start, from
# the profiler's record of every allocation: the CPU's own ``torch.cuda.max_memory_allocated``.
#
# Tracked: the most bytes of tensor storage alive at once that were not there before, counted by a
# dispatch mode, which sees operations but not inside them. This is what a plan made under fake
# tensors can promise, and PyTorch's ``MemTracker`` counts the same (on the convolution tutorial, to
# the byte); but that one follows modules through hooks of its own, which meet those of the
# libraries under test. Where allocated is far above tracked, a kernel takes memory for itself:
# grouped and three-dimensional convolutions do, to which the peers' individual gradients come down.


def allocated(call: Call) -> int:
    """Return the peak of PyTorch's CPU allocator in bytes; right once in a process.

    The allocator's record goes on from one profile to the next, with what is still alive of it.
    """
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as recorded:
        call()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "trace.json")
        recorded.export_chrome_trace(str(path))
        events = json.loads(path.read_text())["traceEvents"]
    totals = [e["args"]["Total Allocated"] for e in events if e.get("name") == "[memory]"]
    return max(totals, default=0)


@dataclass(frozen=True)
class Peak:
    """Bytes above the start of one call.

    ``resident`` is the median over fresh processes, all of which ``residents`` lists; 0 and empty
    where the kernel keeps no high-water mark. The others come out the same each time.
    """

    resident: float
    residents: list[int]
    allocated: int
    tracked: int
    results: int


@cache
def peak(problem: str, quantity: str, contestant: str, threads: int, processes: int) -> Peak:
    """Measure one contestant's memory in fresh processes, each limited to most of what is free.

    Raises:
        Gap: it cannot take part, or went over the limit.
    """
    import psutil  # type: ignore[import-untyped]  # steps on a GPU take the rest of this file without it

    limit = int(psutil.virtual_memory().available * 3 // 4)
    command = [sys.executable, "-m", "benchmarks.measure", problem, quantity, contestant]
    command += [str(threads), str(limit)]
    first = _answer_of([*command, "all"])
    residents = [first["resident"]]
    residents += [_answer_of([*command, "resident"])["resident"] for _ in range(1, processes)]
    first["residents"] = [each for each in residents if each is not None]
    first["resident"] = median(first["residents"] or [0])
    return Peak(**first)


def _answer_of(command: list[str]) -> dict[str, Any]:
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    if done.returncode:
        last = (done.stderr.strip().splitlines() or ["no message"])[-1]
        raise Gap(f"its process ended with code {done.returncode}: {last}")
    answer: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    if "gap" in answer:
        raise Gap(answer["gap"])
    return answer


def _peak_here(problem: str, quantity: str, contestant: str, kinds: str) -> dict[str, Any]:
    task, prepare = PROBLEMS[problem].build(), CONTESTANTS[contestant].prepare
    prepare(task.head(2), QUANTITIES[quantity])()
    _start_onednn()
    call = prepare(task, QUANTITIES[quantity])
    _settle()
    start = _reset_high_water()
    results = call()
    resident = None if start is None else _status("VmHWM") - start
    answer = {"resident": resident, "results": size_of(results)}
    if kinds == "resident":
        return answer

    del call, results
    gc.collect()
    answer["allocated"] = allocated(prepare(task, QUANTITIES[quantity]))
    call = prepare(task, QUANTITIES[quantity])
    gc.collect()
    with LiveBytes() as tracked:
        call()
    return answer | {"tracked": tracked.peak}


def _start_onednn() -> None:
    product = getattr(torch.ops.mkldnn, "_linear_pointwise", None)
    if product is not None:
        square = torch.ones(64, 64)
        product(square, square, None, "none", [], "")


def _settle() -> None:
    gc.collect()
    return_freed_pages()


def _status(field: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field + ":"):
            return int(line.split()[1]) * 1024
    raise KeyError(field)


def _reset_high_water() -> int | None:
    """Set VmHWM to what is resident now and return that in bytes; ``None`` outside Linux."""
    try:
        Path("/proc/self/clear_refs").write_text("5")
    except OSError:
        return None
    return _status("VmHWM")


# ----------------------------------------------------------------------------- agreement
#
# NOTE [Agreement]
#
# The first contestant that yields a deterministic quantity is the reference for those after it.
# Monte Carlo quantities are compared with what they estimate: on four samples, the trace of each
# parameter's estimate, averaged over repetitions, against the trace of the exact GGN block, in
# standard errors of that average. KFAC's B is the Monte Carlo estimate of the GGN block of the
# bias beside it; its A holds no chance and is compared like any other number.

RELATIVE, OF_LARGEST = 1e-3, 1e-4
REPETITIONS, SAMPLES, STANDARD_ERRORS = 50, 4, 5.0


def deterministic(results: Results) -> dict[str, Tensor]:
    """Return what holds no chance, one entry for each tensor, by name."""
    entries = {}
    for extension, values in results.items():
        for parameter, value in values.items():
            factors = value if isinstance(value, list | tuple) else [value]
            for index, factor in enumerate(factors):
                chance = extension == "DiagGGNMC" or (extension == "KFAC" and index == 0)
                if not chance:
                    entries[f"{extension} {parameter} {index}"] = factor
    return entries


def compare(entries: Mapping[str, Tensor], reference: Mapping[str, Tensor]) -> dict[str, Any]:
    """Compare the entries that both have; differences are over the largest entry of a tensor."""
    both = entries.keys() & reference.keys()
    worst, equal = 0.0, True
    for key in both:
        mine, other = entries[key], reference[key]
        if mine.shape != other.shape:
            return {
                "equal": False,
                "reason": f"{key}: shape {list(mine.shape)}, reference {list(other.shape)}",
            }
        largest = other.abs().max().item()
        equal &= torch.allclose(mine, other, rtol=RELATIVE, atol=OF_LARGEST * largest)
        worst = max(worst, (mine - other).abs().max().item() / (largest or 1.0))
    return {"equal": equal, "tensors": len(both), "largest_difference": worst}


def expectation(name: str, task: Task, quantity: Quantity) -> dict[str, Any] | None:
    """Compare traces of Monte Carlo estimates with exact ones; ``None`` where there are none, or too many."""
    sampled = tuple(e for e in quantity.extensions if e in ("DiagGGNMC", "KFAC"))
    if not sampled or (task.targets.dim() > 1 and not task.targets.is_floating_point()):
        return None
    few = task.head(SAMPLES)
    exact = CONTESTANTS["torch.func"].prepare(few, Quantity(("DiagGGNExact",)))()["DiagGGNExact"]
    call = CONTESTANTS[name].prepare(few, Quantity(sampled))
    torch.manual_seed(0)
    drawn = [_traces(call()) for _ in range(REPETITIONS)]
    worst = 0.0
    for key in drawn[0]:
        extension, parameter = key.split()
        if extension == "KFAC":
            parameter = parameter.removesuffix("weight").removesuffix("bias") + "bias"
        values = torch.tensor([traces[key] for traces in drawn])
        error = values.std() / REPETITIONS**0.5
        worst = max(worst, abs((values.mean() - exact[parameter].double().sum()) / error).item())
    return {
        "equal": worst < STANDARD_ERRORS,
        "traces": len(drawn[0]),
        "repetitions": REPETITIONS,
        "samples": SAMPLES,
        "largest_deviation_in_standard_errors": worst,
    }


def _traces(results: Results) -> dict[str, float]:
    traces = {}
    for extension, values in results.items():
        for parameter, value in values.items():
            summed = value.double().sum() if extension == "DiagGGNMC" else value[0].double().trace()
            traces[f"{extension} {parameter}"] = summed.item()
    return traces


# -------------------------------------------------------------------- the fresh process

if __name__ == "__main__":
    _problem, _quantity, _contestant, _threads, _limit, _kinds = sys.argv[1:]
    torch.set_num_threads(int(_threads))
    # Better an allocation that fails than a machine that swaps or ends somebody else's process.
    resource.setrlimit(resource.RLIMIT_DATA, (int(_limit), int(_limit)))
    try:
        _answer = _peak_here(_problem, _quantity, _contestant, _kinds)
    except Gap as gap:
        _answer = {"gap": str(gap)}
    except (RuntimeError, MemoryError, NotImplementedError) as error:
        _answer = {"gap": f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"}
    print(json.dumps(_answer))
