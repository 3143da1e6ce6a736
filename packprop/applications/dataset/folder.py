"""The folder of a checkpoint: locked, written atomically, read back whole or not at all.

# NOTE [Safe files]
A checkpoint is one small JSON file, ``checkpoint-<number>.json``. It names its files, with their sizes and
checksums, and has a checksum of its own. packprop writes every file under another name, flushes it to the disk,
and renames it; the JSON file comes last. So whenever the process is killed, every checkpoint that is there is
whole. The folder keeps the last
two: if the last one cannot be read, the one before serves. Results that grow with the data are in files of
their own, each with the pieces since the checkpoint before; both checkpoints share the older files. Ranks other
than the first have such files of their own (NOTE [Files of ranks]). Shards of ranks are in a folder of their
own for each checkpoint (NOTE [Files of shards]).
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from itertools import zip_longest
from pathlib import Path
from typing import Any

import safetensors
import safetensors.torch
from torch import Tensor

from packprop.store.schema import Size, Unfit, fitted, parsed

try:
    import fcntl
except ImportError:  # not on Windows: two runs in one folder are not noticed there
    fcntl = None  # type: ignore[assignment]  # looked at before it is used

LOCK = "lock"
UNFINISHED = r".*\.part|\.tmp\w+"
"""Names of files that a killed process left unfinished; safetensors uses the second form."""

NAMES = re.compile(
    rf"checkpoint-(\d{{6,}})\.json|(state|rows)-\d{{6,}}(-\d+-\w+)?\.safetensors|shards-\d{{6,}}|lock|{UNFINISHED}"
)
KEPT = 2
"""Checkpoints that stay in the folder."""

_LOCKED: set[str] = set()
"""Folders that this process has locked: the system's locks are between processes."""

WriteError = (OSError, safetensors.SafetensorError)
"""The error of a full disk."""


class Damaged(Exception):
    """Raised if a file has changed since it was written."""


class LockedElsewhere(Exception):
    """Raised if another run writes to the folder."""


@dataclass(frozen=True)
class File:
    """A file that belongs to a checkpoint: its name, its size and its checksum."""

    name: str
    bytes: Size
    checksum: Size

    def __post_init__(self) -> None:
        """Refuse a name that leads elsewhere.

        Raises:
            ValueError: If the name leads to another place.
        """
        if not re.fullmatch(r"[A-Za-z0-9_-][A-Za-z0-9._-]*", self.name):
            raise Unfit(f"{self.name!r} is no name of a file in the folder")


@dataclass(frozen=True)
class OfRank:
    """The files of a rank other than the first."""

    state: File
    rows: list[File]


@dataclass(frozen=True)
class Content:
    """The contents of a checkpoint: its facts, and its files; ``state`` and ``rows`` are the first rank's."""

    facts: dict[str, Any]
    state: File
    rows: list[File]
    shards: list[File] = field(default_factory=list)
    others: list[OfRank] = field(default_factory=list)


@dataclass(frozen=True)
class Signed:
    """The contents of a JSON file."""

    checksum: Size
    content: dict[str, Any]


class Folder:
    """The files of a checkpoint.

    Args:
        path: The folder; made if it is missing.

    Raises:
        OSError: If it can neither be made nor written to.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self.number = 0
        self.others: list[OfRank] = []
        self._rows: list[list[dict[str, Any]]] = []
        self._named: set[str] = set()

    @contextlib.contextmanager
    def locked(self) -> Iterator[None]:
        """Keep other runs out inside. The system takes the lock off when the process ends in any way.

        Raises:
            LockedElsewhere: If another run does.
        """
        self.path.mkdir(parents=True, exist_ok=True)
        key = str(self.path.resolve())
        if key in _LOCKED:
            raise LockedElsewhere
        with open(self.path / LOCK, "a") as file:
            if fcntl is not None:
                try:
                    fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                except OSError as error:
                    raise LockedElsewhere from error
            _LOCKED.add(key)
            try:
                yield
            finally:
                _LOCKED.discard(key)

    def strangers(self) -> list[str]:
        """Return names of files that no checkpoint has made."""
        return sorted(name for name in os.listdir(self.path) if not NAMES.fullmatch(name))

    def numbers(self) -> list[int]:
        """Return the checkpoints that are there, the last one first."""
        found = [NAMES.fullmatch(name) for name in os.listdir(self.path)]
        return sorted((int(match[1]) for match in found if match and match[1]), reverse=True)

    def read(self, number: int) -> tuple[dict[str, Any], list[Tensor], list[list[Tensor]]]:
        """Read facts, tensors, and growing results, file by file, of one checkpoint: those of the first rank.

        It only checks shards, and the files of other ranks, which ``others`` then names.

        Raises:
            Damaged: If a file of it is missing, or has changed.
        """
        try:
            outer: Signed = fitted(Signed, parsed((self.path / f"checkpoint-{number:06d}.json").read_bytes()))
            if outer.checksum != zlib.crc32(_canonical(outer.content)):
                raise Damaged(f"checkpoint-{number:06d}.json does not have its checksum")
            content: Content = fitted(Content, outer.content)
            state = self._tensors(content.state)
            rows = [self._tensors(file) for file in content.rows]
            for file in content.shards:
                _require_same(self.shards(number) / file.name, file)
            for file in [file for other in content.others for file in (other.state, *other.rows)]:
                _require_same(self.path / file.name, file)
        except (OSError, ValueError, safetensors.SafetensorError) as error:
            raise Damaged(f"checkpoint-{number:06d}.json: {error}") from error
        self.number, self.others = number, content.others
        self._note([[asdict(file) for file in each] for each in (content.rows, *(o.rows for o in self.others))])
        return content.facts, state, rows

    def read_of_rank(self, files: OfRank) -> tuple[list[Tensor], list[list[Tensor]]]:
        """Read tensors, and growing results, file by file, of a rank other than the first.

        Raises:
            Damaged: If a file of it is missing, or has changed.
        """
        try:
            return self._tensors(files.state), [self._tensors(file) for file in files.rows]
        except (OSError, ValueError, safetensors.SafetensorError) as error:
            raise Damaged(f"{files.state.name}: {error}") from error

    def write_rows_anew(self) -> None:
        """Make the next checkpoint hold all rows, not only those since the one before."""
        self._rows = []

    def _note(self, rows: list[list[dict[str, Any]]]) -> set[str]:
        """Note the files of rows of a checkpoint, by rank; return the names in the one before, and in this."""
        before, self._rows = self._named, rows
        self._named = {file["name"] for each in rows for file in each}
        return before | self._named

    def _tensors(self, file: File) -> list[Tensor]:
        path = self.path / file.name
        _require_same(path, file)
        with safetensors.safe_open(path, framework="pt") as opened:
            return [opened.get_tensor(str(index)).clone() for index in range(len(opened.keys()))]

    def shards(self, number: int) -> Path:
        """Return the folder for the ranks' shards of one checkpoint."""
        return self.path / f"shards-{number:06d}"

    def write(
        self,
        facts: dict[str, Any],
        state: Sequence[Tensor],
        rows: Sequence[Tensor],
        shards: Sequence[dict[str, Any]] = (),
        others: Sequence[Mapping[str, Any]] = (),
    ) -> None:
        """Write one more checkpoint; ``rows`` are those since the one before.

        Args:
            facts: Its description.
            state: Its tensors.
            rows: The growth since the one before.
            shards: Files that are already in its folder of shards.
            others: Files that are already in the folder, of each rank other than the first: its ``state``, and
                as ``rows`` its growth.

        Raises:
            OSError, SafetensorError: If that fails; earlier checkpoints are then untouched.
        """
        number = self.number + 1
        made = [self.shards(number), part_of(self.shards(number))]
        try:
            new = [[self.written(f"rows-{number:06d}", rows, made)] if rows else []]
            new += [each["rows"] for each in others]
            files = [[*before, *more] for before, more in zip_longest(self._rows, new, fillvalue=())]
            content = {
                "facts": facts,
                "state": self.written(f"state-{number:06d}", state, made),
                "rows": files[0],
            }
            if shards:
                content["shards"] = [*shards]
            if others:
                pairs = zip(others, files[1:], strict=True)
                content["others"] = [{"state": other["state"], "rows": of_rank} for other, of_rank in pairs]
            text = json.dumps({"checksum": zlib.crc32(_canonical(content)), "content": content})
            place = self.path / f"checkpoint-{number:06d}.json"
            part_of(place).unlink(missing_ok=True)  # packprop never writes through it, whatever it is
            with open(part_of(place), "w", encoding="utf-8") as file:
                made.append(part_of(place))
                file.write(text)
                file.flush()
                os.fsync(file.fileno())
            os.replace(part_of(place), place)
        except BaseException:
            for path in made:
                with contextlib.suppress(OSError):  # the first error says more
                    remove(path)
            raise
        self.number = number
        flush_folder(self.path)
        self._remove_old(self._note(files))

    def written(self, name: str, tensors: Sequence[Tensor], made: list[Path]) -> dict[str, Any]:
        """Write tensors to a file, add its name to ``made``, and return its description for the JSON file."""
        path = self.path / f"{name}.safetensors"
        made.append(part_of(path))
        part_of(path).unlink(missing_ok=True)
        whole = {str(index): tensor.detach().cpu().contiguous() for index, tensor in enumerate(tensors)}
        safetensors.torch.save_file(apart(whole), part_of(path))
        with open(part_of(path), "rb+") as file:
            os.fsync(file.fileno())
        made.append(path)
        os.replace(part_of(path), path)
        flush_folder(self.path)
        return described(path)

    def discard(self, others: Sequence[Mapping[str, Any]]) -> None:
        """Remove files of other ranks that ``write`` was to name."""
        for file in [file for other in others for file in (other["state"], *other["rows"])]:
            with contextlib.suppress(OSError):
                remove(self.path / file["name"])

    def _remove_old(self, rows: set[str]) -> None:
        """Remove files that none of the last checkpoints names; ``rows`` are their files of rows."""
        kept = self.numbers()[:KEPT]
        for name in os.listdir(self.path):
            numbered = re.fullmatch(
                r"(checkpoint|state|shards)-(\d{6,})(-\d+-\w+)?(\.json|\.safetensors)?", name
            )
            old = (numbered and int(numbered[2]) not in kept) or (name.startswith("rows-") and name not in rows)
            if re.fullmatch(UNFINISHED, name) or old:
                with contextlib.suppress(OSError):
                    remove(self.path / name)


def part_of(path: Path) -> Path:
    """Return the name of a file while it is written."""
    return path.with_name(f"{path.name}.part")


def remove(path: Path) -> None:
    """Remove a file, or a folder with its contents, if it is there."""
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def _canonical(content: Any) -> bytes:
    return json.dumps(content, sort_keys=True).encode()


def _require_same(path: Path, file: File) -> None:
    """Refuse a file that differs from its description.

    Raises:
        Damaged: If it has another size or checksum.
    """
    if described(path) != asdict(file):
        raise Damaged(f"{path.name} does not have its size and checksum")


def described(path: Path) -> dict[str, Any]:
    """Return name, size in bytes and checksum of a file."""
    checksum, size = 0, 0
    with open(path, "rb") as file:
        while piece := file.read(2**22):
            checksum, size = zlib.crc32(piece, checksum), size + len(piece)
    return {"name": path.name, "bytes": size, "checksum": checksum}


def apart(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return tensors that share no memory: the format refuses others."""
    seen: set[int] = set()
    for name, tensor in tensors.items():
        address = tensor.untyped_storage().data_ptr()
        if address in seen and tensor.numel():
            tensors[name] = tensor.clone()
        seen.add(address)
    return tensors


def flush_folder(path: Path) -> None:
    """Make the system put the names of files on the disk."""
    if os.name != "posix":
        return
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
