"""``python -m tests.dataset.corruption --files 500``: damaged files of checkpoints, saved results and stores.

A file of a checkpoint, a saved result or a store is damaged: bits flipped, cut off, filled up, exchanged for
another file, edited, replaced by garbage, by a link, by a pickle that would run code, or removed. Then it is
used. Allowed are an error in four parts, and exactly what the undamaged files give. Anything else ends the
command: another result, an exception of another kind, or code that was run. In ``edited`` files, of which there
are some more, a value of JSON is another one and checksums are right: there any result will do, but no raw
exception.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import json
import os
import pickle
import random
import shutil
import tempfile
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn

from packprop import PackpropError, Result, Store, StoreWriter, extensions
from packprop.engine.tensors.nesting import tensors_in
from packprop.store.schema import checksum_of
from tests.dataset.small import compute, small
from tests.dataset.test_checkpoint import breaking, split

ASKED = extensions.Variance(), extensions.KFAC(mc_samples=2), extensions.BatchL2Grad()


class Bomb:
    """Pickled, it makes a file when it is read."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.path),)


def problem() -> tuple[nn.Module, Any]:
    torch.manual_seed(0)
    return small(23)


def checkpoint_made(place: Path) -> None:
    """Two checkpoints of a run that ended midway."""
    model, (x, y) = problem()
    with contextlib.suppress(PackpropError):
        compute(model, nn.CrossEntropyLoss(), breaking(split(x, y), 3), *ASKED, checkpoint=place, every=1)


def checkpoint_used(place: Path) -> Result:
    model, (x, y) = problem()
    return compute(model, nn.CrossEntropyLoss(), split(x, y), *ASKED, checkpoint=place, every="1h")


def result_made(place: Path) -> None:
    model, data = problem()
    place.mkdir()
    asked = extensions.EKFAC(mc_samples=2), *ASKED
    compute(model, nn.CrossEntropyLoss(), data, *asked).save(place / "result.safetensors")


def result_used(place: Path) -> Result:
    return Result.load(place / "result.safetensors")


def store_made(place: Path) -> None:
    """Two shards of several chunks, with rows that come late."""
    model, (x, y) = problem()
    for shard in range(2):
        asked = [extensions.BatchGrad(), extensions.Projected(extensions.BatchGrad(), 5)]
        with StoreWriter(place, model, asked, shard=shard, shards=2, notes={"a": [1, "b"]}) as writer:
            for start in range(0, 20, 5):
                data = x[start : start + 5], y[start : start + 5]
                compute(model, nn.CrossEntropyLoss(), data, *asked, store=writer)
                writer.commit()


def store_read(place: Path) -> Result:
    """All that a store holds, as a result; what was put there says itself that it is not finished."""
    store = Store(place)
    tables: dict[str, dict[str, Any]] = {
        name: {parameter: array.torch() for parameter, array in store.arrays(name).items()} for name in store
    }
    facts = repr([(array.header.degree, array.header.projection) for array in store._arrays.values()])
    tables["facts"] = {
        "identifiers": store.identifiers,
        "facts": torch.tensor(list(facts.encode())),
        "headers": torch.tensor(
            [checksum_of([each.extensions, each.model, each.notes]) for each in store.headers]
        ),
    }
    for name, arrays in store.items():
        for array in arrays.values() if isinstance(arrays, dict) else [arrays]:
            assert torch.equal(array[::3], tables[name][array.header.parameter][::3])
    store.verify()
    return Result(tables, store.samples, store.terms)


def store_used(place: Path) -> Result:
    """Read, then gone on with, then read again."""
    found = store_read(place)
    model, _ = problem()
    asked = [extensions.BatchGrad(), extensions.Projected(extensions.BatchGrad(), 5)]
    for shard in range(2):
        StoreWriter(place, model, asked, shard=shard, shards=2, resume=True, notes={"a": [1, "b"]}).close()
    assert are_equal(store_read(place), found)
    return found


KINDS: dict[str, tuple[Callable[[Path], None], Callable[[Path], Result]]] = {
    "checkpoint": (checkpoint_made, checkpoint_used),
    "result": (result_made, result_used),
    "store": (store_made, store_used),
}


def flipped(file: Path, others: list[Path], source: random.Random) -> None:
    content = bytearray(file.read_bytes())
    for _ in range(source.choice([1, 1, 1, 5]) if content else 0):
        content[source.randrange(len(content))] ^= 1 << source.randrange(8)
    file.write_bytes(content)


def cut_off(file: Path, others: list[Path], source: random.Random) -> None:
    file.write_bytes(file.read_bytes()[: source.randrange(file.stat().st_size + 1)])


def zeroed(file: Path, others: list[Path], source: random.Random) -> None:
    content = bytearray(file.read_bytes())
    start = source.randrange(len(content) + 1)
    stop = min(len(content), start + source.randrange(1, 4096))
    content[start:stop] = bytes(stop - start)
    file.write_bytes(content)


def exchanged(file: Path, others: list[Path], source: random.Random) -> None:
    other = source.choice(others)
    ours, theirs = file.read_bytes(), other.read_bytes()
    file.write_bytes(theirs)
    if source.random() < 0.5:
        other.write_bytes(ours)


def garbage(file: Path, others: list[Path], source: random.Random) -> None:
    texts = [
        "",
        "{}",
        "[]",
        "null",
        "7",
        "[" * 50_000,
        "[" * 200 + "]" * 200,
        "9" * 5000,
        '{"a":NaN}',
        "\ud800",
        "}{",
    ]
    text = source.choice(texts).encode(errors="surrogatepass")
    file.write_bytes(text + b"\n" if source.random() < 0.5 else source.randbytes(source.randrange(1, 300)))


def removed(file: Path, others: list[Path], source: random.Random) -> None:
    file.unlink()
    if source.random() < 0.3:
        file.mkdir()


def linked(file: Path, others: list[Path], source: random.Random) -> None:
    """The file is elsewhere, and what is there is not to be touched."""
    root = next(parent for parent in file.parents if parent.name == "used")
    elsewhere = root.with_name("elsewhere")
    file.rename(elsewhere)
    file.symlink_to(elsewhere)


def led_out(file: Path, others: list[Path], source: random.Random) -> None:
    """A name in JSON leads elsewhere."""
    content = file.read_text(errors="replace")
    names = ["samples.npy", "/values.npy", "state-", "rows-", "grad_batch/", "0.weight"]
    name = next((name for name in names if name in content), None)
    if name is None or file.suffix not in (".json", ".jsonl"):
        return flipped(file, others, source)
    file.write_text(content.replace(name, source.choice(["/etc/", "../../", "..\\\\", "/dev/zero"]) + name))


def bombed(file: Path, others: list[Path], source: random.Random) -> None:
    root = next(parent for parent in file.parents if parent.name == "used")
    file.write_bytes(pickle.dumps(Bomb(root.with_name("bomb"))))


DAMAGES = flipped, flipped, flipped, cut_off, zeroed, exchanged, garbage, removed, linked, led_out, bombed

ODD = [
    None,
    True,
    -1,
    0,
    7,
    2**31,
    2**63,
    10**30,
    1.5,
    float("nan"),
    float("inf"),
    "",
    "x",
    "../x",
    [],
    [[]],
    {},
]
"""Values that may stand where others belong."""


def edited(file: Path, source: random.Random) -> None:
    """A value of JSON is another one, or is missing, or is there under another name; checksums are right."""
    if file.name == "header.json":
        found = json.loads(file.read_text())
        change(found, source)
        content = {name: value for name, value in found.items() if name not in ("format", "checksum")}
        file.write_text(json.dumps({**found, "checksum": checksum_of(content)}))
    elif file.name == "chunks.jsonl":
        before, lines = json.loads((file.parent / "header.json").read_text())["token"], []
        for line in file.read_text().splitlines():
            found = {name: value for name, value in json.loads(line).items() if name != "checksum"}
            if source.random() < 0.5:
                change(found, source)
            before = checksum_of(found, before)
            lines.append(json.dumps({**found, "checksum": before}) + "\n")
        file.write_text("".join(lines))
    else:
        found = json.loads(file.read_text())
        change(found["content"], source)
        file.write_text(json.dumps({**found, "checksum": checksum_of(found["content"])}))


def change(value: Any, source: random.Random) -> None:
    """Change something somewhere inside of a list or an object."""
    places = [value]
    for each in places:
        places += [
            item
            for item in (each.values() if isinstance(each, dict) else each)
            if item and isinstance(item, (dict, list))
        ]
    place = source.choice(places)
    key = source.choice(list(place) if isinstance(place, dict) else range(len(place)))
    if source.random() < 0.2:
        del place[key]
    else:
        place[key] = source.choice(ODD)


@contextlib.contextmanager
def originals() -> Iterator[tuple[Path, dict[str, Result]]]:
    """A folder with one of each kind, and what each of them gives."""
    with tempfile.TemporaryDirectory() as folder:
        expected = {}
        for kind, (make, use) in KINDS.items():
            make(Path(folder) / kind)
            shutil.copytree(Path(folder) / kind, Path(folder) / "used")
            expected[kind] = use(Path(folder) / "used")
            shutil.rmtree(Path(folder) / "used")
        yield Path(folder), expected


def are_equal(one: Result, other: Result) -> bool:
    """Whether two results agree in all names, and to the last bit."""
    ours, theirs = [*tensors_in(one.tables)], [*tensors_in(other.tables)]
    names = [{key: [*table] for key, table in each.tables.items()} for each in (one, other)]
    facts = [(each.samples, each.loss, each.reduction) for each in (one, other)]
    kinds = [[tensor.dtype for tensor in each] for each in (ours, theirs)]
    equal = names[0] == names[1] and facts[0] == facts[1] and kinds[0] == kinds[1]
    return equal and all(map(torch.equal, ours, theirs))


def outcome(kind: str, place: Path, expected: Result, what: str, is_edited: bool = False) -> str:
    """What came of using damaged files."""
    used = place / "used"
    elsewhere = place / "elsewhere"
    before = elsewhere.read_bytes() if elsewhere.exists() else None
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            found = KINDS[kind][1](used)
        except PackpropError as error:
            result = (
                "refused" if all((error.asked, error.where, error.why, error.instead)) else "in fewer parts"
            )
        except Exception as error:
            raise AssertionError(f"{what}: a raw {type(error).__name__}: {error}") from error
        else:
            equal = are_equal(found, expected)
            assert equal or is_edited, f"{what}: the result is another one"
            result = "harmless" if equal else "another result"
    assert not (place / "bomb").exists(), f"{what}: code was run"
    assert before is None or elsewhere.read_bytes() == before, f"{what}: a file elsewhere was changed"
    assert result != "in fewer parts", what
    return result


def trials(files: int, more: int, seed: int) -> collections.Counter[str]:
    """What came of so many damaged files, and of some edited ones."""
    source, counts, failures = random.Random(seed), collections.Counter[str](), list[str]()
    with originals() as (folder, expected):
        for number in range(files + more):
            kind = source.choices(list(KINDS), [2, 1, 2])[0]
            is_edited = number >= files
            kind = source.choice(["checkpoint", "store"]) if is_edited else kind
            with tempfile.TemporaryDirectory() as name:
                place = Path(name)
                shutil.copytree(folder / kind, place / "used")
                paths = sorted(path for path in (place / "used").rglob("*") if path.is_file())
                if is_edited:
                    file = source.choice([path for path in paths if path.suffix in (".json", ".jsonl")])
                    edited(file, source)
                    how = "edited"
                else:
                    file, damage = source.choice(paths), source.choice(DAMAGES)
                    damage(file, paths, source)
                    how = damage.__name__
                what = f"seed {seed}, number {number}: {kind}, {file.relative_to(place / 'used')} {how}"
                try:
                    result = outcome(kind, place, expected[kind], what, is_edited)
                except AssertionError as error:
                    failures.append(str(error))
                    result = "WRONG"
            counts[f"{'edited ' if is_edited else ''}{kind}: {result}"] += 1
    assert not failures, "\n".join(failures)
    return counts


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--files", type=int, default=500)
    parser.add_argument("--edited", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    torch.set_num_threads(1)
    print(json.dumps(trials(options.files, options.edited, options.seed), sort_keys=True, indent=1))


if __name__ == "__main__":
    main()
