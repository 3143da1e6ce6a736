"""``python -m tests.dataset.kills --kills 1000 --ranks 1 --jobs 2``: runs over data, killed at random moments.

Each run is made by child processes, one for each rank, that go on from the last checkpoint. They are killed
(SIGKILL) after a random time: all of them, or on several ranks now and then one alone. They are begun again,
and so on until they come to their end; then the result, and the rows of the store, are compared, bit for bit,
with those of a run that was left alone.
After each kill the checkpoint is read: what was kept before must still be there. Most forms draw their data at
random: a shuffled loader, samples that are changed by numbers of torch, Python and numpy; half of the runs
write a checkpoint after each batch, half but the first and the last.

Prints how many runs and kills there were, how many kills hit before the first checkpoint or while files were
being written, how many left no new batch; how many runs had other results, and how many could not go on.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import random
import signal
import sys
import tempfile
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, TensorDataset

import packprop
from packprop import extensions
from packprop.applications.dataset.folder import Folder
from packprop.applications.dataset.result import Result
from packprop.engine.tensors.nesting import tensors_in

SAMPLES, SIZE = 64, 4
SECONDS = 30.0
"""How long one process may take; a run that waits for ever could not go on."""


def samples() -> tuple[Tensor, Tensor]:
    source = torch.Generator().manual_seed(1)
    inputs = torch.randn(SAMPLES, 6, generator=source, dtype=torch.float64)
    return inputs, torch.randint(3, (SAMPLES,), generator=source)


class Changed(Dataset[Any]):
    """Samples that are changed by random numbers of torch, Python and numpy, each time they are read.

    They come from functions, and from generators of the data set's own.
    """

    def __init__(self) -> None:
        self.inputs, self.targets = samples()
        self.own = {
            "numpy": np.random.default_rng(4),
            "old": np.random.RandomState(5),
            "python": random.Random(6),
        }

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        drawn = torch.randn(6).double() + random.gauss(0, 1) + np.random.standard_normal()  # noqa: NPY002  # as users do
        own = self.own["numpy"].normal() + self.own["old"].normal() + self.own["python"].gauss(0, 1)
        return self.inputs[index] + 0.1 * drawn + 0.1 * own, self.targets[index]


FORMS: dict[str, Callable[[], Any]] = {
    "shuffled and changed, stored": lambda: DataLoader(Changed(), SIZE, shuffle=True),
    "changed, stored": Changed,
    "tensors, stored": samples,
    "shuffled and changed": lambda: DataLoader(Changed(), SIZE, shuffle=True),
    "shuffled": lambda: DataLoader(TensorDataset(*samples()), SIZE, shuffle=True),
    "batches": lambda: list(zip(*(tensor.split(SIZE) for tensor in samples()), strict=True)),
}


def run(form: str, folder: Path | None, **options: Any) -> Result:
    """The run that is killed: dropout, draws from two generators, sums, moments, rows, and a second reading."""
    rank = torch.distributed.get_rank() if torch.distributed.is_initialized() else 0
    for seed in (torch.manual_seed, random.seed, np.random.seed):  # what functions draw from
        seed(rank)
    source = torch.Generator().manual_seed(3)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        layers = nn.Linear(6, 8), nn.Dropout(0.2), nn.Tanh(), nn.Linear(8, 3)
    model = nn.Sequential(*layers).double().train()
    asked = [
        extensions.BatchGrad(),
        extensions.Variance(),
        extensions.KFAC(mc_samples=2),
        extensions.EKFAC(mc_samples=2, generator=source),
    ]
    data = FORMS[form]()
    size = None if isinstance(data, (DataLoader, list)) else SIZE
    options |= {"batch_size": size, "checkpoint": folder, "every": options.get("every", 1), "progress": False}
    with tempfile.TemporaryDirectory() as place:
        if "stored" in form:
            options["store"] = Path(place) / "store" if folder is None else folder.with_name("store")
        found = packprop.compute(model, nn.CrossEntropyLoss(), data, asked, **options)
        if "stored" in form:
            if torch.distributed.is_initialized():
                torch.distributed.barrier()  # the shards of all ranks are closed
            rows = packprop.Store(options["store"])["grad_batch"]
            found.tables["stored"] = {name: array.torch().clone() for name, array in rows.items()}
    return found


def same(one: Result, other: Result) -> bool:
    """Whether two results are equal to the last bit."""
    if (one.samples, one.loss, one.tables.keys()) != (other.samples, other.loss, other.tables.keys()):
        return False
    pairs = [
        zip(tensors_in(values), tensors_in(other.tables[name]), strict=True)
        for name, values in one.tables.items()
    ]
    return all(torch.equal(mine, others) for each in pairs for mine, others in each)


def begun(form: str, place: Path, world: int, **options: Any) -> list[int]:
    """The processes of children that make the run, one for each rank."""
    meeting = tempfile.mktemp(dir=place)
    return [_forked(form, place, rank, world, meeting, options) for rank in range(world)]


def _forked(form: str, place: Path, rank: int, world: int, meeting: str, options: dict[str, Any]) -> int:
    child = os.fork()
    if child:
        return child
    signal.alarm(int(SECONDS))
    with (place / f"said-{rank}").open("w") as said:
        try:
            if world > 1:
                limit = timedelta(seconds=SECONDS)
                at = f"file://{meeting}"
                torch.distributed.init_process_group("gloo", at, limit, world, rank)
                (place / f"joined-{rank}").touch()
            found = run(form, place / "checkpoint", **options)
            if rank == 0:
                found.save(place / "result.part")
                (place / "result.part").rename(place / "result")
            if world > 1:
                torch.distributed.barrier()
            os._exit(0)
        except BaseException:
            traceback.print_exc(file=said)
            said.flush()
            os._exit(1)


def done_batches(folder: Path) -> tuple[int, int]:
    """The reading and the batches of it that the last checkpoint holds; -1 if there is none, 2 at the end."""
    numbers = Folder(folder).numbers() if folder.exists() else []
    if not numbers:
        return -1, 0
    facts = Folder(folder).read(numbers[0]).facts
    return (2, 0) if facts["complete"] else (facts["reading"], facts["number"])


def killed_until_the_end(
    form: str, place: Path, span: float, source: random.Random, world: int, counts: Counter[str], every: Any
) -> str:
    """Kill a run after random times, of at most ``span`` seconds, until it ends; why it could not go on."""
    folder, kept = place / "checkpoint", (-1, 0)
    while True:
        for each in place.glob("joined-*"):
            each.unlink()
        children = begun(form, place, world, every=every)
        time.sleep(source.uniform(0, span))
        joined = len([*place.glob("joined-*")]) == world
        alone = world > 1 and joined and source.random() < 0.2  # the others have to notice
        killed = children[-1:] if alone else children
        for child in killed:
            os.kill(child, signal.SIGKILL)
        ends = [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]
        if not any(ends):
            return ""
        hit = sum(end == -signal.SIGKILL for end in ends)
        if not hit or -signal.SIGALRM in ends:
            said = [(place / f"said-{rank}").read_text() for rank in range(world)]
            return f"{form}, every={every}: it ended by {ends}\n" + "\n".join(said)
        counts["kills"] += 1
        counts["before the first checkpoint"] += done_batches(folder)[0] < 0
        counts["while writing"] += any(path.suffix == ".part" for path in folder.glob("*"))
        now = done_batches(folder)
        if now < kept:
            return f"{form}: reading and batches {kept} were safe, and {now} are left"
        counts["without a new batch"] += now == kept
        kept = now


def job(kills: int, seed: int, world: int) -> Counter[str]:
    """Runs that are killed at least so many times."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    source, counts = random.Random(seed), Counter[str]()
    forms = [form for form in FORMS if world == 1 or not form.startswith(("shuffled", "batches"))] * 2
    if world > 1:  # every rank's own shuffled batches, too
        forms += ["shuffled and changed, stored"] * 2
    for form in dict.fromkeys(forms):
        run(form, None)  # what is imported and made once is there in the processes that are killed
    alone: dict[tuple[str, Any], tuple[Result, float]] = {}
    number = 0
    while counts["kills"] < kills:
        form, every = forms[number % len(forms)], (1, "1h")[number // len(forms) % 2]
        number += 1
        with tempfile.TemporaryDirectory() as name:
            if (form, every) not in alone:
                place = Path(name) / "alone"
                place.mkdir()
                start = time.perf_counter()
                for child in begun(form, place, world, every=every):
                    assert not os.waitpid(child, 0)[1], (place / "said-0").read_text()
                alone[form, every] = Result.load(place / "result"), time.perf_counter() - start
            expected, seconds = alone[form, every]
            place = Path(name) / "killed"
            place.mkdir()
            # a run that keeps nothing on its way has to come to its end in one piece
            span = seconds * (0.5 if every == 1 else 1.2)
            why = killed_until_the_end(form, place, span, source, world, counts, every)
            counts["runs"] += 1
            if why:
                counts["could not go on"] += 1
                print(why, file=sys.stderr, flush=True)
            elif not same(Result.load(place / "result"), expected):
                counts["wrong"] += 1
                print(f"{form}, every={every}: the result is another one", file=sys.stderr, flush=True)
        print(json.dumps(counts), file=sys.stderr, flush=True)
    return counts


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=1000, help="at least so many, by all jobs")
    parser.add_argument("--ranks", type=int, default=1, help="processes that make a run together")
    parser.add_argument("--jobs", type=int, default=1, help="runs that are made at the same time")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    each = -(-options.kills // options.jobs)
    total = Counter(dict.fromkeys(("runs", "kills", "wrong", "could not go on"), 0))
    # jobs fork the processes that they kill: begun afresh, they have no threads yet
    with ProcessPoolExecutor(options.jobs, multiprocessing.get_context("spawn")) as pool:
        seeds = range(options.seed, options.seed + options.jobs)
        for counts in pool.map(job, [each] * options.jobs, seeds, [options.ranks] * options.jobs):
            total.update(counts)
    print(json.dumps(total), flush=True)
    return int(bool(total["wrong"] or total["could not go on"]))


if __name__ == "__main__":
    sys.exit(main())
