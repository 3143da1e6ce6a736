"""Runs a function in several processes of one process group, under a hard time limit.

No test makes a group in its own process. A thread of gloo that releases a tensor needs Python's lock, and the
end of a group waits for that thread while it holds the lock: now and then that never ends. So the processes are
children; none of them ends its group, each leaves by `os._exit`, and all are killed when the time is over.
"""

from __future__ import annotations

import faulthandler
import multiprocessing
import os
import pickle
import signal
import socket
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import pytest
import torch

SECONDS = 120.0
"""How long the processes may take, on a busy machine."""

needs_groups = pytest.mark.skipif(
    not (torch.distributed.is_available() and torch.distributed.is_gloo_available()), reason="needs gloo"
)
"""A mark for tests of several processes."""

_STARTER = multiprocessing.get_context("forkserver")
_STARTER.set_forkserver_preload(
    ["torch", "torch.distributed.fsdp", "torch.distributed.device_mesh", "packprop"]
)


class ProcessesFailed(AssertionError):
    """A rank raised, died or did not end in time; the message has what each of them left."""


@dataclass
class Outcome:
    """What became of one rank: what the function returned, or what was printed when it raised or hung."""

    rank: int
    value: Any = None
    error: str | None = None


def in_processes(
    function: Callable[..., Any],
    world: int,
    *arguments: Any,
    seconds: float = SECONDS,
    group: bool = True,
) -> list[Any]:
    """What ``function(rank, *arguments)`` returns in each of ``world`` processes.

    Args:
        function: A function of a module. Each process has one thread, the environment that ``torchrun`` gives,
            and a random state that is its own rank's.
        world: The number of processes.
        arguments: What can be pickled, as what is returned.
        seconds: Then all processes are killed.
        group: Whether the default group is made, of gloo; else the function makes it.

    Raises:
        ProcessesFailed: With the traceback of each rank that raised, or the place where it stood.
    """
    outcomes = outcomes_of(function, world, *arguments, seconds=seconds, group=group)
    failed = [outcome for outcome in outcomes if outcome.error is not None]
    if failed:
        raise ProcessesFailed("\n".join(f"--- rank {each.rank} ---\n{each.error}" for each in failed))
    return [outcome.value for outcome in outcomes]


def run_each(rank: int, checks: Sequence[Callable[[int], None]]) -> None:
    """Run one check after the other; an error says which it was in."""
    for check in checks:
        try:
            check(rank)
        except Exception as error:
            error.add_note(f"in {check.__name__}")
            raise


def outcomes_of(
    function: Callable[..., Any],
    world: int,
    *arguments: Any,
    seconds: float = SECONDS,
    group: bool = True,
    patient: bool = False,
) -> list[Outcome]:
    """What became of each rank; see ``in_processes``.

    ``patient``: whether the other ranks go on when one has failed.
    """
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        port = _free_port()
        work = pickle.dumps((function, arguments))
        children = [
            _STARTER.Process(target=_child, args=(rank, world, folder, port, work, seconds, group))
            for rank in range(world)
        ]
        for child in children:
            child.start()
        try:
            _wait(children, folder, seconds, patient)
        finally:
            (folder / "over").touch()
            for rank, child in enumerate(children):
                if not (folder / f"{rank}.late").exists():
                    child.join(5)
                child.kill()
                child.join()
        return [_outcome(rank, folder, seconds) for rank in range(world)]


def script(text: str, world: int, name: str = "script", seconds: float = SECONDS) -> None:
    """Run a program as ``torchrun`` runs it: in ``world`` processes, which make the group themselves."""
    in_processes(_run_script, world, text, name, seconds=seconds, group=False)


def _run_script(rank: int, text: str, name: str) -> None:
    exec(compile(text, name, "exec"), {"__name__": "__main__"})


def _wait(children: Sequence[BaseProcess], folder: Path, seconds: float, patient: bool) -> None:
    """Return when all have left something, one that is not to be waited for has failed, or time is over."""
    end = time.monotonic() + seconds
    waiting = set(range(len(children)))
    while waiting and time.monotonic() < end:
        for rank in list(waiting):
            raised, dead = (folder / f"{rank}.error").exists(), not children[rank].is_alive()
            if raised or dead or (folder / f"{rank}.value").exists():
                waiting.remove(rank)
            if (raised or dead) and not patient:
                end = min(end, time.monotonic() + 1)  # the others may fail for a reason of their own
        time.sleep(0.02)
    if waiting:
        for rank in waiting:
            (folder / f"{rank}.late").touch()
            if (pid := children[rank].pid) is not None and children[rank].is_alive():
                os.kill(pid, signal.SIGUSR1)  # it writes where each thread stands
        time.sleep(0.3)


def _outcome(rank: int, folder: Path, seconds: float) -> Outcome:
    value, error, late = (folder / f"{rank}.{kind}" for kind in ("value", "error", "late"))
    if value.exists():
        return Outcome(rank, pickle.loads(value.read_bytes()))
    if error.exists():
        return Outcome(rank, None, error.read_text())
    stood = (folder / f"{rank}.stood").read_text() if (folder / f"{rank}.stood").exists() else ""
    if late.exists():
        return Outcome(rank, None, f"it was not done when another had failed, or after {seconds} s:\n{stood}")
    return Outcome(rank, None, f"it died\n{stood}".strip())


def _child(rank: int, world: int, folder: Path, port: int, work: bytes, seconds: float, group: bool) -> None:
    """What one process does: it leaves a value or an error, and stays until the others have, too."""
    signal.alarm(int(seconds) + 10)  # whatever becomes of the process that started this one
    with (folder / f"{rank}.stood").open("w") as stood:
        faulthandler.enable(stood)  # a fault that kills it
        faulthandler.register(signal.SIGUSR1, stood)
        try:
            torch.set_num_threads(1)
            torch.manual_seed(rank)
            os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(world)}
            os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
            function, arguments = pickle.loads(work)
            if group:
                warnings.filterwarnings("ignore", message=".*FSDP.* switch")
                torch.distributed.init_process_group(
                    "gloo",
                    init_method=f"file://{folder / 'rendezvous'}",
                    rank=rank,
                    world_size=world,
                    timeout=timedelta(seconds=seconds),
                )
            _leave(folder / f"{rank}.value", pickle.dumps(function(rank, *arguments)))
        except BaseException:
            _leave(folder / f"{rank}.error", traceback.format_exc().encode())
        sys.stdout.flush()
        sys.stderr.flush()
        while not (folder / "over").exists() and folder.exists():
            time.sleep(0.02)
        os._exit(0)


def _leave(path: Path, content: bytes) -> None:
    """Write a file that is there as a whole or not at all."""
    part = path.with_suffix(".part")
    part.write_bytes(content)
    part.rename(path)


def _free_port() -> int:
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        return int(listening.getsockname()[1])
