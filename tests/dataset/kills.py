"""``python -m tests.dataset.kills --kills 1000``: a run over a data set, killed at random moments.

Each run is a child process that goes on from the last checkpoint. It is killed (SIGKILL) after a random time,
begun again, and so on until it comes to its end; then its result is compared, bit for bit, with that of a run
that was left alone. After each kill the checkpoint is read: what was kept before must still be there. Prints
how many runs and kills there were, how many kills hit while files were being written, and how many batches were
done twice.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import tempfile
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import packprop
from packprop import extensions
from packprop.dataset.folder import Folder
from packprop.dataset.result import Result
from packprop.tensors.nesting import tensors_in

SAMPLES, SIZE = 96, 4


def samples() -> tuple[Tensor, Tensor]:
    source = torch.Generator().manual_seed(1)
    inputs = torch.randn(SAMPLES, 6, generator=source, dtype=torch.float64)
    return inputs, torch.randint(3, (SAMPLES,), generator=source)


FORMS: dict[str, Callable[[], Any]] = {
    "tensors": samples,
    "stored": samples,
    "shuffled": lambda: DataLoader(TensorDataset(*samples()), SIZE, shuffle=True),
    "batches": lambda: list(zip(*(tensor.split(SIZE) for tensor in samples()), strict=True)),
}


def run(form: str, folder: Path | None, **options: Any) -> Result:
    """The run that is killed: dropout, draws from two generators, sums, moments, rows, and a second reading."""
    torch.manual_seed(0)
    layers = nn.Linear(6, 8), nn.Dropout(0.2), nn.Tanh(), nn.Linear(8, 3)
    model = nn.Sequential(*layers).double().train()
    asked = [
        extensions.BatchGrad(),
        extensions.Variance(),
        extensions.KFAC(mc_samples=2),
        extensions.EKFAC(mc_samples=2, generator=torch.Generator().manual_seed(3)),
    ]
    size = SIZE if form in ("tensors", "stored") else None
    options |= {"batch_size": size, "checkpoint": folder, "every": options.get("every", 1), "progress": False}
    with tempfile.TemporaryDirectory() as place:
        if form == "stored":
            options["store"] = Path(place) / "store" if folder is None else folder.with_name("store")
        found = packprop.compute(model, nn.CrossEntropyLoss(), FORMS[form](), asked, **options)
        if form == "stored":
            rows = packprop.Store(options["store"])["grad_batch"]
            found.tables["stored"] = {name: array.torch().clone() for name, array in rows.items()}
    return found


def same(one: Result, other: Result) -> bool:
    """Whether two results are equal to the last bit."""
    pairs = zip(tensors_in(one.tables), tensors_in(other.tables), strict=True)
    return (one.samples, one.loss) == (other.samples, other.loss) and all(
        map(torch.equal, *zip(*pairs, strict=True))
    )


def begun(form: str, folder: Path, output: Path) -> int:
    """The process of a child that makes the run."""
    child = os.fork()
    if child:
        return child
    try:
        run(form, folder).save(output)
        os._exit(0)
    except BaseException:
        traceback.print_exc()
        os._exit(1)


def done_batches(folder: Path) -> int:
    """How many batches of both readings the last checkpoint holds."""
    numbers = Folder(folder).numbers() if folder.exists() else []
    if not numbers:
        return 0
    facts, _, _ = Folder(folder).read(numbers[0])
    state = dict(facts["state"]["items"])
    batches = SAMPLES // SIZE
    return 2 * batches if state["complete"] else state["reading"] * batches + state["number"]


def killed_until_the_end(form: str, span: float, source: random.Random, counts: dict[str, int]) -> Result:
    """The result of one run that is killed after random times, of at most ``span`` seconds."""
    with tempfile.TemporaryDirectory() as place:
        folder, output = Path(place) / "checkpoint", Path(place) / "result.safetensors"
        kept = 0
        while True:
            child = begun(form, folder, output)
            time.sleep(source.uniform(0, span))
            os.kill(child, signal.SIGKILL)
            _, status = os.waitpid(child, 0)
            if os.waitstatus_to_exitcode(status) == 0:
                counts["runs"] += 1
                return Result.load(output)
            assert os.waitstatus_to_exitcode(status) == -signal.SIGKILL, "the run ended with an error"
            counts["kills"] += 1
            counts["while writing"] += any(path.suffix == ".part" for path in folder.glob("*"))
            now = done_batches(folder)
            assert now >= kept, f"{kept} batches were safe, and {now} are left"
            counts["without a new batch"] += now == kept
            kept = now


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    torch.set_num_threads(1)
    source = random.Random(options.seed)
    counts = dict.fromkeys(("runs", "kills", "while writing", "without a new batch"), 0)
    expected = {form: run(form, None) for form in FORMS}
    forms = list(FORMS)
    while counts["kills"] < options.kills:
        form = forms[counts["runs"] % len(forms)]
        with tempfile.TemporaryDirectory() as place:
            start = time.perf_counter()
            run(form, Path(place) / "alone")  # with its files
            seconds = time.perf_counter() - start
        found = killed_until_the_end(form, seconds / 3, source, counts)
        assert same(found, expected[form]), f"{form}: the result is another one"
        print(json.dumps(counts), flush=True)


if __name__ == "__main__":
    main()
