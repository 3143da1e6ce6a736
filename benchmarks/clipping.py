"""``python -m benchmarks.clipping``: clipped gradients beside Opacus; writes ``results/clipping.json``.

Each contestant runs the forward pass, the backward pass and the clipping of one step, by the norm of all
parameters, and leaves the clipped mean in ``.grad``; noise and optimizer are the same for all and left out.
What they leave is compared before anything is measured. Times are ratios to plain passes, in turns in one
process; peaks are those of PyTorch's allocator, each in a fresh process.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

import packprop
from benchmarks.measure import ROOT, allocated, take_turns
from benchmarks.problems import PROBLEMS, Task
from benchmarks.run import environment, write_results
from packprop.extensions import BatchGrad

MAX_NORM = 1.0

NAMES = ("sigmoid-mlp", "3c3d", "convolution", "language-model")
"""Problems."""

Step = Callable[[], None]


def plain(task: Task) -> Step:
    """No clipping: the mean gradient."""

    def step() -> None:
        task.model.zero_grad()
        task.loss(task.model(task.inputs), task.targets).backward()

    return step


def ours(task: Task) -> Step:
    """``clipped_gradients``."""
    packprop.extend(task.model)
    packprop.extend(task.loss)

    def step() -> None:
        task.model.zero_grad()
        loss = task.loss(task.model(task.inputs), task.targets)
        with packprop.clipped_gradients(max_norm=MAX_NORM):
            loss.backward()

    return step


def by_hand(task: Task) -> Step:
    """Rows of ``BatchGrad``, clipped afterwards."""
    packprop.extend(task.model)
    packprop.extend(task.loss)

    def step() -> None:
        task.model.zero_grad()
        loss = task.loss(task.model(task.inputs), task.targets)
        with packprop.backpack(BatchGrad()):
            loss.backward()
        rows: list[Tensor] = [parameter.grad_batch for parameter in task.model.parameters()]  # type: ignore[attr-defined]  # saved
        squares = sum(row.flatten(1).square().sum(1) for row in rows)
        factors = (MAX_NORM / (len(task.inputs) * torch.as_tensor(squares).sqrt())).clamp(max=1)
        for parameter, row in zip(task.model.parameters(), rows, strict=True):
            parameter.grad = torch.tensordot(factors, row, 1)

    return step


def opacus_hooks(task: Task) -> Step:
    """Opacus' per-sample gradients by hooks, clipped by its optimizer."""
    from opacus.grad_sample import GradSampleModule
    from opacus.optimizers import DPOptimizer

    model = GradSampleModule(task.model, loss_reduction="mean")
    optimizer = DPOptimizer(
        torch.optim.SGD(model.parameters(), 0.1),
        noise_multiplier=0.0,
        max_grad_norm=MAX_NORM,
        expected_batch_size=len(task.inputs),
    )

    def step() -> None:
        optimizer.zero_grad(set_to_none=True)
        task.loss(model(task.inputs), task.targets).backward()
        optimizer.pre_step()

    return step


def opacus_ghost(task: Task) -> Step:
    """Opacus' ghost clipping: norms in one backward pass, the weighted gradient in a second one."""
    from opacus.grad_sample import GradSampleModuleFastGradientClipping
    from opacus.optimizers import DPOptimizerFastGradientClipping
    from opacus.utils.fast_gradient_clipping_utils import DPTensorFastGradientClipping

    model = GradSampleModuleFastGradientClipping(
        task.model, loss_reduction="mean", max_grad_norm=MAX_NORM, use_ghost_clipping=True
    )
    optimizer = DPOptimizerFastGradientClipping(
        torch.optim.SGD(model.parameters(), 0.1),
        noise_multiplier=0.0,
        max_grad_norm=MAX_NORM,
        expected_batch_size=len(task.inputs),
    )

    def step() -> None:
        optimizer.zero_grad(set_to_none=True)
        rows = model(task.inputs).movedim(1, -1).flatten(0, -2)
        losses = torch.nn.functional.cross_entropy(rows, task.targets.flatten(), reduction="none")
        own = losses.view(len(task.inputs), -1).mean(1)
        DPTensorFastGradientClipping(model, optimizer, own, "mean").backward()
        optimizer.pre_step()

    return step


CONTESTANTS: dict[str, Callable[[Task], Step]] = {
    "plain": plain,
    "packprop": ours,
    "packprop, BatchGrad by hand": by_hand,
    "Opacus, hooks": opacus_hooks,
    "Opacus, ghost clipping": opacus_ghost,
}


def built(problem: str, contestant: str) -> tuple[Task, Step]:
    """A problem built anew, and one contestant's step on it."""
    torch.manual_seed(0)
    task = PROBLEMS[problem].build()
    return task, CONTESTANTS[contestant](task)


def gradients(task: Task) -> Tensor:
    """All gradients as one vector."""
    return torch.cat([p.grad.flatten() for p in task.model.parameters() if p.grad is not None])


def peak(problem: str, contestant: str, threads: int) -> int | None:
    """Bytes that one step allocates in a fresh process; ``None`` if it fails there."""
    command = [sys.executable, "-m", "benchmarks.clipping", "--peak", problem, contestant]
    done = subprocess.run(
        [*command, "--threads", str(threads)], cwd=ROOT, capture_output=True, text=True, check=False
    )
    return None if done.returncode else int(json.loads(done.stdout.splitlines()[-1]))


def measure(problem: str, rounds: int, threads: int) -> dict[str, Any]:
    """Whether all agree, seconds, ratios to the plain pass of the same turn, and peaks."""
    steps: dict[str, Step] = {}
    left: dict[str, Tensor] = {}
    gaps: dict[str, str] = {}
    for name in CONTESTANTS:
        try:
            task, step = built(problem, name)
            for _ in range(2):
                step()
            left[name] = gradients(task)
            steps[name] = step
        except Exception as error:  # a model that a peer does not take: its words are the result
            gaps[name] = f"{type(error).__name__}: {error}"[:300]
    record: dict[str, Any] = {"problem": problem, "description": PROBLEMS[problem].title, "gaps": gaps}
    scale = left["packprop"].abs().max()
    record["off_by"] = {
        name: float((each - left["packprop"]).abs().max() / scale)
        for name, each in left.items()
        if name != "plain"
    }
    for name, timing in take_turns(steps, rounds).items():
        record[name] = {
            "seconds": vars(timing.seconds),
            "over_plain": vars(timing.over_plain),
            "peak_bytes": peak(problem, name, threads),
        }
    return record


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.clipping", description=__doc__)
    parser.add_argument("--rounds", type=int, default=3, help="turns of each (default 3)")
    parser.add_argument("--threads", type=int, default=1, help="threads of PyTorch (default 1)")
    parser.add_argument("--problems", nargs="+", default=NAMES, help="which problems (default: all)")
    parser.add_argument("--peak", nargs=2, metavar=("PROBLEM", "CONTESTANT"), help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    torch.set_num_threads(options.threads)
    warnings.simplefilter("ignore")  # of hooks on a first layer, whose input needs no gradient
    if options.peak:
        _, step = built(*options.peak)
        step()
        print(json.dumps(allocated(step)))
        return 0
    records = []
    for problem in options.problems:
        records.append(record := measure(problem, options.rounds, options.threads))
        print(problem, record["gaps"] or "", {name: f"{off:.1e}" for name, off in record["off_by"].items()})
        for name in CONTESTANTS:
            if name in record:
                found = record[name]
                size = "-" if found["peak_bytes"] is None else f"{found['peak_bytes'] / 2**20:.0f} MiB"
                print(f"  {name:30s} {found['over_plain']['median']:6.2f} x plain   {size:>10s}", flush=True)
    write_results("clipping", environment(options.threads, options.rounds, 1), records=records)
    return 0


if __name__ == "__main__":
    sys.exit(main())
