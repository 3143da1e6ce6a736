"""The command ``packprop``: profiles of models, comparisons of them, and queries on a store, from the shell."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import os
import select
import shlex
import subprocess
import sys
import textwrap
import time
import traceback
import warnings
from collections.abc import Callable, Iterator, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, TextIO

import torch

from packprop import examples
from packprop.applications.dataset.checkpoint import require_checkpoint
from packprop.applications.dataset.messages import explanation
from packprop.applications.reports.arguments import parser
from packprop.applications.reports.commands import print_result
from packprop.applications.reports.compare import compare
from packprop.applications.reports.factory import ASKED, call_factory, device_named, load_factory, moved
from packprop.applications.reports.page.libraries import INSTALL, missing
from packprop.applications.reports.page.training import read_lines, training_page
from packprop.applications.reports.profile.files import PAGE, check_folder, write_page
from packprop.applications.reports.profile.result import Profile
from packprop.applications.reports.profile.run import profile
from packprop.applications.reports.profile.table import WIDTH
from packprop.applications.reports.query import query
from packprop.engine.memory import byte_text, resident_peak
from packprop.errors import PackpropError, require_seed

NOT_FINITE = 3
"""The exit status of a profile whose loss or gradient is NaN or infinite."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; return the exit status.

    Args:
        arguments: The arguments of the command line; by default those of the process.
    """
    given = sys.argv[1:] if arguments is None else [*arguments]
    options = parser().parse_args(given)
    options.given = given
    run: Callable[[argparse.Namespace], int | None]
    run = {"profile": _profile, "compare": _compare, "page": _page, "query": query}[options.command]
    try:
        with _warnings_in_short(sys.stderr):
            status = run(options)
            sys.stdout.flush()
    except KeyboardInterrupt:
        kept = getattr(options, "checkpoint", None) or getattr(options, "resume", None)
        end = f"{kept} has the last checkpoint, if there is one" if kept else "nothing was written"
        print(f"interrupted; {end}", file=sys.stderr)
        return 130
    except Exception as error:
        if isinstance(error, BrokenPipeError) and _has_no_reader():
            return 0
        if options.debug:
            traceback.print_exc()
        elif isinstance(error, PackpropError):
            print(f"error: {error}", file=sys.stderr)
        else:
            unexpected = PackpropError(
                f"packprop {options.command} was called.",
                "packprop itself",
                explanation(error),
                "run it again with --debug, and report what it prints",
            )
            print(f"error: {unexpected}", file=sys.stderr)
        return 2 if isinstance(error, PackpropError) else 1
    return status or 0


def _has_no_reader() -> bool:
    """Tell whether whoever reads the output has seen enough, such as `head`; then drop the rest."""
    if not hasattr(select, "poll"):  # not on Windows
        return False
    poll = select.poll()
    poll.register(sys.stdout.fileno(), 0)
    if not any(event & select.POLLERR for _, event in poll.poll(0)):
        return False
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return True


def _compare(options: argparse.Namespace) -> None:
    found = compare(Profile.load(options.first), Profile.load(options.second), options.first, options.second)
    if options.html is not None:
        path = found.save_page(options.html)
        print(f"wrote {path}", file=sys.stderr)
    print_result(found, options.json, WIDTH)


def _page(options: argparse.Namespace) -> None:
    source = Path(options.folder)
    if options.folder.endswith(".jsonl"):  # a Path would drop a slash at the end
        page = training_page(read_lines(source), source.stem)
        path = write_page(options.output or source.with_suffix(".html"), page)
        print(f"open {path} in a browser", file=sys.stderr)
    else:
        path = Profile.load(options.folder).save_page(options.output or source / PAGE)
        print(f"wrote {path}", file=sys.stderr)


def _joined() -> int:
    """Join the processes of ``torchrun``, and return this one's rank; return 0 for a single process."""
    if int(os.environ.get("WORLD_SIZE", "1")) == 1 or not torch.distributed.is_available():
        return 0
    if not torch.distributed.is_initialized():
        torch.distributed.init_process_group("cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo")
    return torch.distributed.get_rank()


def _profile(options: argparse.Namespace) -> int:
    started = time.perf_counter()
    # refuse wrong arguments before the factory runs, which may take long
    check_folder(options.output)
    if options.resume is not None:
        require_checkpoint(ASKED, f"--resume {options.resume}", options.resume)
    device = None if options.device is None else device_named(ASKED, options.device)
    lacking = [] if options.no_page else missing()
    with_page = not options.no_page and not lacking
    # standard output is for the result: the output of a factory goes to standard error
    with contextlib.redirect_stdout(sys.stderr) if options.json else contextlib.nullcontext():
        result = _profiled(options, device, with_page)
    if result is None:
        return 0
    paths: list[Path] = [*result.save(options.output)]
    if with_page:
        paths.append(result.save_page(Path(options.output) / PAGE))
    print_result(result, options.json, WIDTH)
    *before, last = map(str, paths)
    told = [f"\nwrote {', '.join(before)} and {last} after {time.perf_counter() - started:.0f} s"]
    if "graphs" in result.settings:
        told.append(f"graphs in place of passes: {result.settings['graphs']}")
    resident = resident_peak()
    if options.memory is not None and resident is not None:  # the budget is for tensors alone
        told.append(f"peak resident memory: {byte_text(resident)}, including Python and libraries")
    if result.headline is not None:
        told.append(f"not finite: {result.headline}")
    if lacking:
        then = f"{INSTALL}, then: packprop page {options.output}"
        told.append(f"no page with figures: {', '.join(lacking)} cannot be imported; {then}")
    if with_page:
        told.append(f"open {last} in a browser")
    print("\n".join(told), file=sys.stderr)
    return 0 if result.headline is None else NOT_FINITE


def _profiled(options: argparse.Namespace, device: torch.device | None, with_page: bool) -> Profile | None:
    """Make the profile; return ``None`` on all ranks but the first, which prints and saves it."""
    factory = None if options.factory is None else load_factory(options.factory)
    decode = None if options.decode is None else load_factory(options.decode, argument="--decode")
    threads = options.threads or (1 if factory is None else None)
    if threads is not None:
        torch.set_num_threads(threads)
    rank = _joined()
    require_seed(ASKED, options.seed)
    torch.manual_seed(options.seed)
    if factory is None:
        print("training a small residual network on handwritten digits ...", file=sys.stderr)
        model, loss, data = examples.digits(options.seed)
    else:
        model, loss, data = call_factory(factory, options.factory)
    model, loss = moved(device, model, loss)
    result = profile(
        model,
        loss,
        data,
        batch_size=options.batch_size,
        mc_samples=options.mc_samples,
        exact=options.exact,
        curvature=options.curvature,
        largest_factor=options.largest_factor,
        evaluation=options.evaluation,
        seed=options.seed,
        progress=options.progress,
        memory=options.memory,
        checkpoint=options.checkpoint or options.resume,
        every=options.every,
        compiled=options.compiled,
        outliers=options.outliers,
        decode=decode,
        timeline=with_page,
    )
    return None if rank else dataclasses.replace(result, settings={**result.settings, **_made(options)})


def _made(options: argparse.Namespace) -> dict[str, str]:
    """Describe a run for its page: date, command and commit."""
    try:
        known = subprocess.run(
            ["git", "describe", "--always", "--dirty", "--abbrev=12"],
            capture_output=True,
            text=True,
            check=False,
            timeout=10,
        )
        commit = known.stdout.strip() if known.returncode == 0 else ""
    except (OSError, subprocess.SubprocessError):
        commit = ""
    made = {
        "date": datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
        "command": shlex.join(["packprop", *options.given]),
        "factory": options.factory or "packprop.examples:digits",
        "commit": commit,
    }
    return {name: text for name, text in made.items() if text}


@contextlib.contextmanager
def _warnings_in_short(stream: TextIO) -> Iterator[None]:
    """Print each warning once, without the line of code that it comes from."""
    shown = set()

    def show(message: Warning | str, *_: Any, **__: Any) -> None:
        text = textwrap.fill(f"warning: {message}", WIDTH, subsequent_indent="  ")
        if text not in shown:
            print(text, file=stream)
        shown.add(text)

    with warnings.catch_warnings():
        warnings.showwarning = show
        yield


if __name__ == "__main__":
    sys.exit(main())
