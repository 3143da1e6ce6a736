"""What the steps ask of a device: time, memory, kernels, waits; a CPU answers what it can."""

from __future__ import annotations

import gc
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile
from torch.utils._python_dispatch import TorchDispatchMode

from benchmarks.measure import take_turns
from benchmarks.run import Record, environment
from packprop.engine.memory.live import LiveBytes

Call = Callable[[], Any]
Cases = dict[str, Callable[[], Record]]


@dataclass(frozen=True)
class Options:
    """Where and how large.

    Args:
        device: ``"cpu"`` or ``"cuda"``.
        small: Sizes for a test of the scripts, not of the library.
        jobs: Processes of the tests.
    """

    device: str
    small: bool
    jobs: int

    @property
    def on_gpu(self) -> bool:
        return self.device != "cpu"

    @property
    def rounds(self) -> int:
        """Turns of each call that is timed."""
        return 3 if self.small else 5

    def synchronize(self) -> None:
        """Wait until the device has nothing left to do."""
        if self.on_gpu:
            torch.cuda.synchronize()


def surroundings(options: Options) -> Record:
    """Return what a reader needs in order to judge or repeat the figures."""
    found = environment(torch.get_num_threads(), options.rounds, processes=1)
    found |= {"device": options.device, "small": options.small}
    if options.on_gpu:
        properties = torch.cuda.get_device_properties(0)
        found |= {
            "gpu": properties.name,
            "gpu_bytes": properties.total_memory,
            "cuda": torch.version.cuda,
            "cudnn": torch.backends.cudnn.version(),
        }
    return found


def exact_matrix_products() -> None:
    """Turn TF32 off: products of single precision have all their digits."""
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False


def settle(options: Options) -> None:
    """Wait for the device, and give back what nobody holds."""
    gc.collect()
    options.synchronize()
    if options.on_gpu:
        torch.cuda.empty_cache()


def in_turns(calls: Mapping[str, Call], options: Options) -> Record:
    """Time calls in turns; return for each the median seconds, and the median over ``"plain"`` in a turn.

    Each call runs before, so that all are warm.
    """
    for call in [*calls.values(), *calls.values()]:
        call()
    timings = take_turns(calls, options.rounds, least_seconds=0.1, synchronize=options.synchronize)
    return {
        name: {"seconds": each.seconds.median, "over_plain": each.over_plain.median}
        for name, each in timings.items()
    }


def peak_of(call: Call, there_before: Iterable[Tensor], options: Options) -> Record:
    """Return the most bytes of a call, with those tensors that were there before.

    Of a GPU, this is the figure of its allocator, less what else was there, such as the workspaces of
    libraries; of a CPU, the count of tensor storage, which sees less.
    """
    settle(options)
    if options.on_gpu:
        there = sum(tensor.untyped_storage().nbytes() for tensor in there_before)
        beside = torch.cuda.memory_allocated() - there
        torch.cuda.reset_peak_memory_stats()
        call()
        torch.cuda.synchronize()
        return {"bytes": torch.cuda.max_memory_allocated() - beside, "by": "torch.cuda.max_memory_allocated"}
    live = LiveBytes()
    live.own(there_before, "there before")
    with live:
        call()
    return {"bytes": live.peak, "by": "bytes of tensor storage; a CPU's allocator keeps no such record"}


class _Waits(TorchDispatchMode):
    """Counts operations after which Python knows a value; on a GPU, it waits for each of them.

    ``tolist()`` is none of these operations on a CPU: only the profiler of a GPU sees it.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch's own
        self.operations = 0
        self.waits: dict[str, int] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.operations += 1
        name = func.overloadpacket.__name__
        if name in ("_local_scalar_dense", "equal", "nonzero", "masked_select", "_unique2", "unique_dim"):
            self.waits[name] = self.waits.get(name, 0) + 1
        return func(*args, **(kwargs or {}))


def work_of(call: Call, options: Options) -> Record:
    """Return how many operations, kernels and waits for the device one call makes."""
    counted = _Waits()
    with counted:
        call()
    found: Record = {"operations": counted.operations, "waits_of_operations": counted.waits}
    return found | kernels_of(call, options)


def kernels_of(call: Call, options: Options) -> Record:
    """Return the kernels of one call, their time, and how often it waits for them."""
    if not options.on_gpu:
        return {"kernels": None, "synchronizations": None}
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as recorded:
        call()
        torch.cuda.synchronize()
    events = recorded.events()
    on_device = [each for each in events if each.device_type == torch.autograd.DeviceType.CUDA]
    names = [each.name for each in events]
    waits = ("cudaStreamSynchronize", "cudaDeviceSynchronize", "cudaEventSynchronize", "cudaMemcpy")
    return {
        "kernels": sum(not each.name.startswith(("Memcpy", "Memset")) for each in on_device),
        "copies": sum(each.name.startswith("Memcpy") for each in on_device),
        # one of them is our own, at the end
        "synchronizations": sum(name in waits for name in names) - 1,
        "device_seconds": sum(each.device_time for each in on_device) / 1e6,
        "dearest": _dearest(on_device),
    }


def _dearest(on_device: Iterable[Any]) -> list[tuple[str, int, float]]:
    """Return the kernels that take the most time: name, calls, milliseconds of all of them."""
    calls: Counter[str] = Counter()
    times: Counter[str] = Counter()
    for each in on_device:
        calls[each.name] += 1
        times[each.name] += each.device_time
    return [(name[:120], calls[name], round(time / 1000, 3)) for name, time in times.most_common(12)]
