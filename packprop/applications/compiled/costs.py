"""The costs of a replay: its time, and the most memory that it holds at once."""

from __future__ import annotations

import json
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from packprop.engine.tensors import tensors_in

Run = Callable[[Sequence[Tensor]], Sequence[Tensor]]

TURNS = 5
"""The maximum number of timed runs of each function."""

LONGEST = 1.0
"""The seconds after which no further turn starts."""


def seconds_in_turns(runs: Sequence[Run], tensors: Sequence[Tensor]) -> list[float]:
    """Run some functions in turns; return the shortest time of each, in seconds."""
    shortest = [float("inf")] * len(runs)
    begun = time.perf_counter()
    for _ in range(TURNS):
        for number, run in enumerate(runs):
            start = time.perf_counter()
            bool(run(tensors)[0])  # waits for a device
            shortest[number] = min(shortest[number], time.perf_counter() - start)
        if time.perf_counter() - begun > LONGEST:
            break
    return shortest


def peak_of(run: Run, tensors: Sequence[Tensor]) -> int:
    """Return the most bytes allocated at once in a run, inputs and their gradients included.

    Only PyTorch's profiler sees the allocations of compiler-generated code on the CPU.
    """
    gradients = [tensor.grad for tensor in tensors if tensor.is_leaf and tensor.grad is not None]
    there = sum(each.untyped_storage().nbytes() for each in tensors_in([*tensors, *gradients]))
    device = next((tensor.device for tensor in tensors if tensor.device.type == "cuda"), None)
    if device is not None:
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        run(tensors)
        return there + torch.cuda.max_memory_allocated(device) - before
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as recorded:
        run(tensors)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "trace.json")
        recorded.export_chrome_trace(str(path))
        events = json.loads(path.read_text())["traceEvents"]
    taken = [(each["ts"], each["args"]["Bytes"]) for each in events if each.get("name") == "[memory]"]
    alive = most = 0
    for _, size in sorted(taken, key=lambda each: float(each[0])):
        alive += size
        most = max(most, alive)
    return there + most
