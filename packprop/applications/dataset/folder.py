"""The folder of a checkpoint: locked, written atomically, read back whole or not at all.

# NOTE [Safe files]
A checkpoint is one small JSON file, ``checkpoint-<number>.json``. It names a file of tensors for each rank,
with their sizes and checksums, and has a checksum of its own. packprop writes every file under another name,
flushes it to the disk, and renames it; the JSON file comes last. So every checkpoint in the folder is whole,
whenever the process is killed. The folder keeps the last two: if the last one cannot be read, packprop reads
the one before. Names of files of tensors hold a random text of each run: a rank that outlives a killed run
cannot write over files of the next one (NOTE [Files of ranks]).
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import secrets
import shutil
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, ClassVar

import safetensors
import safetensors.torch
from torch import Tensor

from packprop.store.files import Lock, part_of, written_whole
from packprop.store.schema import Size, Unfit, checksum_of, fitted, parsed

UNFINISHED = r".*\.part|\.tmp\w+"
"""Names of files that a killed process left unfinished; safetensors uses the second form."""

NAMES = re.compile(rf"(checkpoint|state)-(\d{{6,}})(-\d+-\w+\.safetensors|\.json)|lock|{UNFINISHED}")
"""Names of files that checkpoints have made; their second part is the number of the checkpoint."""

KEPT = 2
"""Checkpoints that stay in the folder."""

WriteError = (OSError, safetensors.SafetensorError)
"""The errors of writing a file, such as to a full disk."""


class Damaged(Exception):
    """Raised if a file is missing, or has changed since it was written."""


@dataclass(frozen=True)
class File:
    """A file that belongs to a checkpoint: its name, its size and its checksum."""

    name: str
    bytes: Size
    checksum: Size

    def __post_init__(self) -> None:
        """Refuse a name that leads out of the folder.

        Raises:
            ValueError: If the name is not a plain name of a file.
        """
        if not re.fullmatch(r"[A-Za-z0-9_-][A-Za-z0-9._-]*", self.name):
            raise Unfit(f"{self.name!r} is no name of a file in the folder")


@dataclass(frozen=True)
class Content:
    """The contents of a checkpoint: its facts, and the file of tensors of each rank."""

    facts: dict[str, Any]
    files: list[File] = field(default_factory=list)
    may_have_more: ClassVar[bool] = True  # in other formats, which the facts name


@dataclass(frozen=True)
class Signed:
    """The contents of a JSON file, with their checksum."""

    checksum: Size
    content: dict[str, Any]


class Folder:
    """The files of a checkpoint.

    Args:
        path: The folder; ``locked`` makes it if it is missing.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self.number = 0
        self._token = secrets.token_hex(8)

    def locked(self) -> contextlib.closing[Lock]:
        """Lock the folder inside ``with``; the system also releases the lock when the process ends in any way.

        Raises:
            LockedElsewhere: If another run has locked it.
            OSError: If the folder cannot be made or locked.
        """
        self.path.mkdir(parents=True, exist_ok=True)
        return contextlib.closing(Lock(self.path))

    def strangers(self) -> list[str]:
        """Return names of files that no checkpoint has made."""
        return sorted(name for name in os.listdir(self.path) if not NAMES.fullmatch(name))

    def numbers(self) -> list[int]:
        """Return the numbers of the checkpoints in the folder, the last one first."""
        found = [NAMES.fullmatch(name) for name in os.listdir(self.path)]
        return sorted((int(m[2]) for m in found if m and m[1] == "checkpoint"), reverse=True)

    def read(self, number: int) -> Content:
        """Read the facts of one checkpoint, and the names of its files.

        Raises:
            Damaged: If its JSON file is missing, or has changed.
        """
        name = f"checkpoint-{number:06d}.json"
        try:
            outer: Signed = fitted(Signed, parsed((self.path / name).read_bytes()))
            if outer.checksum != checksum_of(outer.content):
                raise Damaged(f"the checksum of {name} does not match its content")
            content: Content = fitted(Content, outer.content)
        except (OSError, ValueError) as error:
            raise Damaged(f"{name}: {error}") from error
        self.number = number
        return content

    def require_whole(self, files: Sequence[File]) -> None:
        """Refuse files of a checkpoint that are missing or have changed.

        Raises:
            Damaged: If there is no file, or one is missing or has another size or checksum.
        """
        if not files:
            raise Damaged("there is no file of a rank")
        for file in files:
            try:
                found = described(self.path / file.name)
            except OSError as error:
                raise Damaged(f"{file.name}: {error}") from error
            if found != asdict(file):
                raise Damaged(f"{file.name} has another size or checksum than the checkpoint says")

    @contextlib.contextmanager
    def opened(self, file: File) -> Iterator[Tensors]:
        """Open a file of tensors, which packprop reads one by one.

        Raises:
            Damaged: If it cannot be read.
        """
        try:
            with safetensors.safe_open(self.path / file.name, framework="pt") as opened:
                yield Tensors(opened)
        except (OSError, safetensors.SafetensorError) as error:
            raise Damaged(f"{file.name}: {error}") from error

    def written(self, rank: int, number: int, tensors: Sequence[Tensor]) -> dict[str, Any]:
        """Write the tensors of a rank for the checkpoint of this number; return the file's description.

        Raises:
            OSError, SafetensorError: If that fails; no part of the file stays.
        """
        path = self.path / f"state-{number:06d}-{rank}-{self._token}.safetensors"
        whole = {str(index): tensor.detach().cpu().contiguous() for index, tensor in enumerate(tensors)}
        try:
            with written_whole(path) as part:
                safetensors.torch.save_file(apart(whole), part)
            return described(path)
        except BaseException:
            self.discard([part_of(path).name, path.name])
            raise

    def write(self, facts: Mapping[str, Any], files: Sequence[Mapping[str, Any]]) -> None:
        """Complete the next checkpoint, whose files of tensors are written.

        Args:
            facts: Its description.
            files: The description of the file of each rank.

        Raises:
            OSError: If that fails; earlier checkpoints are then untouched.
        """
        content = {"facts": {**facts}, "files": [*files]}
        path = self.path / f"checkpoint-{self.number + 1:06d}.json"
        try:
            with written_whole(path) as part:
                part.write_text(json.dumps({"checksum": checksum_of(content), "content": content}))
        except BaseException:
            self.discard([part_of(path).name, *(file["name"] for file in files)])
            raise
        self.number += 1
        kept = self.numbers()[:KEPT]
        for name in os.listdir(self.path):
            known = NAMES.fullmatch(name)
            is_old = known and known[2] and int(known[2]) not in kept
            if is_old or re.fullmatch(UNFINISHED, name):
                self.discard([name])

    def discard(self, names: Iterable[str]) -> None:
        """Remove files that no checkpoint names, as far as that is possible."""
        for path in [self.path / name for name in names]:
            with contextlib.suppress(OSError):  # the first error says more
                if path.is_dir():
                    shutil.rmtree(path)
                else:
                    path.unlink(missing_ok=True)


class Tensors(Sequence[Tensor]):
    """The tensors of an open file, in copies: the file is mapped, and may be removed."""

    def __init__(self, opened: Any) -> None:
        self._opened = opened

    def __len__(self) -> int:
        return len(self._opened.keys())

    def __getitem__(self, index: Any) -> Any:
        if index >= len(self):
            raise IndexError(f"there is no tensor {index}")
        return self._opened.get_tensor(str(index)).clone()


def described(path: Path) -> dict[str, Any]:
    """Return name, size in bytes and checksum of a file."""
    checksum, size = 0, 0
    with open(path, "rb") as file:
        while piece := file.read(2**22):
            checksum, size = zlib.crc32(piece, checksum), size + len(piece)
    return {"name": path.name, "bytes": size, "checksum": checksum}


def apart(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return tensors that share no memory, as the format demands."""
    seen: set[int] = set()
    for name, tensor in tensors.items():
        address = tensor.untyped_storage().data_ptr()
        if address in seen and tensor.numel():
            tensors[name] = tensor.clone()
        seen.add(address)
    return tensors
