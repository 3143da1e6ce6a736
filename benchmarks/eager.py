"""``python -m benchmarks.eager``: penalties taken at once; writes ``results/eager.json``.

Each figure comes from a fresh process. A round runs every contestant once, in shuffled order; times
are compared within a round, and the median over rounds is what counts. The first step of a process
pays for fresh pages, later ones use them again; seconds of the processor stand beside those of the
clock, for a machine that others use, too. Peaks are those of the resident set above its start, and
of tensor storage (see the notes in ``benchmarks.measure``). What glibc's heap keeps after a tensor
of less than 32 MiB is freed differs by a factor of two between runs of the same program, so the
resident set is shown without it, too: each block of 1 MiB and more mapped by itself.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import random
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from statistics import median
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from benchmarks.measure import (
    MIB,
    ROOT,
    Spread,
    _reset_high_water,
    _settle,
    _status,
)
from benchmarks.run import environment, write_results
from packprop import eager_backward
from packprop.engine.memory.live import LiveBytes

Step = Callable[[], Tensor]
Evaluate = Callable[..., Tensor]


@dataclass(frozen=True)
class Case:
    """A problem, and who solves it: name to a function that makes a training step of a size."""

    title: str
    point: str
    contestants: dict[str, Callable[[bool], Step]]
    reference: str


# ----------------------------------------------------------------- a penalty on every layer

LAYERS, WIDTH, SAMPLES = 12, 256, 2048


def repulsion(rows: Tensor, every: Tensor | None = None) -> Tensor:
    """How close samples are to one another, or to all of ``every``, at four bandwidths."""
    every = rows if every is None else every
    squares = rows.pow(2).sum(1)[:, None] + every.pow(2).sum(1) - 2 * rows @ every.T
    distance = squares.clamp(min=0) / every.shape[1]
    near = [torch.exp(-distance / width) for width in (0.25, 0.5, 1.0, 2.0)]
    return torch.stack([kernel.sum() for kernel in near]).sum() / len(every) ** 2


def penalised(evaluate: Evaluate, small: bool) -> Step:
    """One step of a network with a penalty on each layer, from gradients that are ``None``."""
    torch.manual_seed(0)
    network = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS))
    batch = torch.randn(32 if small else SAMPLES, WIDTH)

    def step() -> Tensor:
        network.zero_grad(set_to_none=True)
        x, loss = batch, torch.zeros(())
        for layer in network:
            x = torch.tanh(layer(x))
            loss = loss + 0.1 * evaluate(repulsion, x)
        loss = loss + x.pow(2).mean()
        loss.backward()
        return torch.cat([p.grad.flatten() for p in network.parameters()])

    return step


def plainly(fn: Evaluate, *inputs: Tensor) -> Tensor:
    """Ordinary autograd."""
    return fn(*inputs)


def by_rows(fn: Evaluate, x: Tensor) -> Tensor:
    """At once, and an eighth of the pairs at a time."""
    return eager_backward(fn, x, x, chunks=8, axes=(0, None))


checkpointed: Evaluate = partial(checkpoint, use_reentrant=False)

# ------------------------------------------------------------------------ a vocabulary head

FEATURES, CLASSES, TOKENS, PIECES = 512, 32_000, 2048, 4


def summed(x: Tensor, weight: Tensor, target: Tensor) -> Tensor:
    """Cross entropy of a linear head, summed over tokens."""
    return F.cross_entropy(F.linear(x, weight), target, reduction="sum")


class SoftmaxInPlace(torch.autograd.Function):
    """Cross entropy that turns its logits into their gradient, where they lie."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, target: Tensor) -> Tensor:
        where = target[:, None]
        picked = logits.gather(1, where)
        total = logits.logsumexp(1, keepdim=True)
        ctx.logits = logits.sub_(total).exp_().scatter_add_(1, where, torch.full_like(picked, -1.0))
        return (total - picked).sum()

    @staticmethod
    def backward(ctx: Any, arriving: Tensor) -> tuple[Tensor, None]:
        return ctx.logits.mul_(arriving), None


def lean(x: Tensor, weight: Tensor, target: Tensor) -> Tensor:
    """The same as ``summed``, with one matrix of logits instead of three."""
    return SoftmaxInPlace.apply(F.linear(x, weight), target)


class LigerStyle(torch.autograd.Function):
    """A head whose forward pass goes through the tokens in pieces and leaves only gradients."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, target: Tensor) -> Tensor:
        value = torch.zeros((), dtype=torch.float32)
        grad_x, grad_weight = torch.empty_like(x), torch.zeros_like(weight)
        pairs = zip(x.chunk(PIECES), target.chunk(PIECES), grad_x.chunk(PIECES), strict=True)
        for rows, classes, place in pairs:
            logits = rows @ weight.T
            where = classes[:, None]
            picked = logits.gather(1, where)
            total = logits.logsumexp(1, keepdim=True)
            value += (total - picked).sum()
            logits.sub_(total).exp_().scatter_add_(1, where, torch.full_like(picked, -1.0))
            torch.mm(logits, weight, out=place)
            grad_weight.addmm_(logits.T, rows)
        ctx.save_for_backward(grad_x, grad_weight)
        return value

    @staticmethod
    def backward(ctx: Any, arriving: Tensor) -> tuple[Tensor, Tensor, None]:
        grad_x, grad_weight = ctx.saved_tensors
        return grad_x.mul_(arriving), grad_weight.mul_(arriving), None


def checkpointed_pieces(x: Tensor, weight: Tensor, target: Tensor) -> Tensor:
    """Cross entropy in pieces, each of them checkpointed."""
    pairs = zip(x.chunk(PIECES), target.chunk(PIECES), strict=True)
    return torch.stack([checkpointed(summed, rows, weight, y) for rows, y in pairs]).sum()


def fused(x: Tensor, weight: Tensor, target: Tensor) -> Tensor:
    """PyTorch's own chunked head."""
    options = nn.LinearCrossEntropyOptions()
    return F.linear_cross_entropy(x, weight, target, reduction="sum", options=options)


def headed(loss: Evaluate, small: bool) -> Step:
    """One step of a vocabulary head: mean cross entropy and its gradients."""
    torch.manual_seed(0)
    count = 16 if small else TOKENS
    x = torch.randn(count, FEATURES, requires_grad=True)
    weight = nn.Parameter(torch.randn(CLASSES, FEATURES) / FEATURES**0.5)
    target = torch.randint(CLASSES, (count,))

    def step() -> Tensor:
        x.grad = weight.grad = None
        (loss(x, weight, target) / count).backward()
        return torch.cat([x.grad.flatten(), weight.grad[::97].flatten()])

    return step


CASES = {
    "penalties": Case(
        f"{LAYERS} layers of width {WIDTH}, {SAMPLES} samples, a repulsion on each layer",
        "the branch is freed at once; nothing is computed twice",
        {
            "plain": partial(penalised, plainly),
            "checkpoint": partial(penalised, checkpointed),
            "eager": partial(penalised, eager_backward),
            "eager, 8 pieces of rows": partial(penalised, by_rows),
        },
        "plain",
    ),
    "head": Case(
        f"{FEATURES} features, {CLASSES} classes, {TOKENS} tokens, {PIECES} pieces",
        "the logits never exist as a whole",
        {
            "plain": partial(headed, summed),
            "checkpoint, pieces": partial(headed, checkpointed_pieces),
            "eager, pieces": partial(headed, partial(eager_backward, summed, chunks=PIECES)),
            "eager, pieces, softmax in place": partial(headed, partial(eager_backward, lean, chunks=PIECES)),
            "F.linear_cross_entropy": partial(headed, fused),
            "Liger-style function": partial(headed, LigerStyle.apply),
        },
        "plain",
    ),
}


# --------------------------------------------------------------------------------- measuring


def here(case: str, contestant: str, steps: int) -> dict[str, Any]:
    """Measure one contestant in this process: memory in its first step, time in those after."""
    make = CASES[case].contestants[contestant]
    make(True)()
    step = make(False)
    _settle()
    start = _reset_high_water()
    seconds, busy = [], []
    for number in range(1 + steps):
        before = time.perf_counter(), time.process_time()
        gradient = step()
        seconds.append(time.perf_counter() - before[0])
        busy.append(time.process_time() - before[1])
        if number == 0:
            resident = None if start is None else _status("VmHWM") - start
        gc.collect()
    tracked = None
    if steps == 0:
        with LiveBytes() as counted:
            step()
        tracked = counted.peak
    norm = gradient.double().norm().item()
    times = {"wall": seconds, "processor": busy}
    return {"resident": resident, "tracked": tracked, "norm": norm, "seconds": times}


def fresh(case: str, contestant: str, steps: int, threads: int) -> dict[str, Any]:
    """Measure one contestant in a process of its own."""
    command = [sys.executable, "-m", "benchmarks.eager", "--here", case, contestant]
    command += ["--steps", str(steps), "--threads", str(threads)]
    # The process that counts tensors also shows the resident set without the allocator's heap.
    heap = {} if steps else {"MALLOC_MMAP_THRESHOLD_": str(MIB)}
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, env=os.environ | heap)
    if done.returncode:
        raise RuntimeError(f"{case}, {contestant}: {done.stderr.strip().splitlines()[-1]}")
    answer: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return answer


def ratios(mine: list[dict[str, Any]], base: list[dict[str, Any]], clock: str, pick: int) -> dict[str, Any]:
    """Seconds of the first step, or the least of later ones, and the same over the reference."""

    def of(run: dict[str, Any]) -> float:
        seconds = run["seconds"][clock]
        return float(min(seconds[1:], default=seconds[0]) if pick else seconds[0])

    own = [of(run) for run in mine]
    over = [second / of(run) for second, run in zip(own, base, strict=True)]
    return {"seconds": vars(Spread.of(own)), "over_reference": vars(Spread.of(over))}


def measure(case: str, rounds: int, steps: int, threads: int) -> list[dict[str, Any]]:
    """Peaks and times of all contestants of a case, in turns."""
    names = list(CASES[case].contestants)
    reference = CASES[case].reference
    if not hasattr(F, "linear_cross_entropy"):
        names = [name for name in names if not name.startswith("F.linear")]
    tracked = {name: fresh(case, name, 0, threads) for name in names}
    taken: dict[str, list[dict[str, Any]]] = {name: [] for name in names}
    shuffle = random.Random(0)
    for _ in range(rounds):
        order = list(names)
        shuffle.shuffle(order)
        for name in order:
            taken[name].append(fresh(case, name, steps, threads))
    records = []
    for name in names:
        mine = taken[name]
        times = {
            f"{part} step, {clock}": ratios(mine, taken[reference], clock, pick)
            for clock in ("wall", "processor")
            for part, pick in (("first", 0), ("later", 1))
        }
        wanted = tracked[reference]["norm"]
        records.append(
            {
                "case": case,
                "contestant": name,
                "resident_bytes": median(run["resident"] for run in mine),
                "resident_bytes_without_heap": tracked[name]["resident"],
                "tracked_bytes": tracked[name]["tracked"],
                "seconds": times,
                "gradient_norm_error": abs(tracked[name]["norm"] - wanted) / wanted,
            }
        )
    return records


def tiny(rounds: int) -> dict[str, Any]:
    """Microseconds of the processor for both passes through a branch with next to no work."""
    x = torch.randn(4, 3, requires_grad=True)
    weight = nn.Parameter(torch.randn(3, 3))
    branches: dict[str, Evaluate] = {
        "(x * x).sum()": lambda x: (x * x).sum(),
        "(x @ weight).tanh().sum()": lambda x: (x @ weight).tanh().sum(),
        "x.pow(2).sum(1)": lambda x: x.pow(2).sum(1),
    }
    found = {}
    for name, fn in branches.items():

        def run(evaluate: Evaluate, fn: Evaluate = fn) -> float:
            start = time.process_time()
            for _ in range(200):
                evaluate(fn, x).sum().backward()
            return (time.process_time() - start) / 200 * 1e6

        run(plainly), run(eager_backward)
        pairs = [(run(plainly), run(eager_backward)) for _ in range(rounds)]
        found[name] = {
            "plain": vars(Spread.of([plain for plain, _ in pairs])),
            "eager": vars(Spread.of([eager for _, eager in pairs])),
            "difference": vars(Spread.of([eager - plain for plain, eager in pairs])),
        }
    return found


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.eager", description=__doc__)
    parser.add_argument("--rounds", type=int, default=7, help="turns of each (default 7)")
    parser.add_argument("--steps", type=int, default=3, help="timed steps a turn (default 3)")
    parser.add_argument("--threads", type=int, default=2, help="torch threads (default 2)")
    parser.add_argument("--case", choices=CASES, action="append", help="only this; repeatable")
    parser.add_argument("--here", nargs=2, metavar=("CASE", "CONTESTANT"), help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    torch.set_num_threads(options.threads)
    if options.here:
        print(json.dumps(here(*options.here, options.steps)))
        return 0
    described = environment(options.threads, options.rounds, processes=options.rounds)
    described["OMP_WAIT_POLICY"] = os.environ.get("OMP_WAIT_POLICY")
    records: list[dict[str, Any]] = []
    for case in options.case or CASES:
        print(f"\n{case}: {CASES[case].title}")
        for record in measure(case, options.rounds, options.steps, options.threads):
            records.append(record)
            times = "".join(
                f"{name}: {row['seconds']['median']:6.2f} s {row['over_reference']['median']:5.2f} x;  "
                for name, row in record["seconds"].items()
            )
            print(
                f"  {record['contestant']:34s}{record['resident_bytes'] / MIB:8.0f} MiB resident,"
                f"{record['resident_bytes_without_heap'] / MIB:6.0f} without heap,"
                f"{record['tracked_bytes'] / MIB:8.0f} MiB tensors;  {times}"
            )
    if options.case:
        return 0
    torch.set_num_threads(1)
    small = tiny(5 * options.rounds)
    for name, row in small.items():
        print(f"  {name:28s}" + "".join(f"{k} {v['median']:6.1f} us  " for k, v in row.items()))
    titles = {name: {"title": case.title, "point": case.point} for name, case in CASES.items()}
    write_results("eager", described, cases=titles, records=records, tiny_branch_microseconds=small)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
