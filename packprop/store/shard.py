"""One shard of a store on disk: its header, its marks, its files, and whether these belong together."""

from __future__ import annotations

import os
import stat
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from packprop.errors import BadInput
from packprop.store.checksums import CheckedRows, checksums
from packprop.store.folder import HEADER, SAMPLES, ArrayHeader, ShardHeader
from packprop.store.marks import Mark, Marks
from packprop.store.places import short
from packprop.store.plain import GrowingArray, require_length, shown_rows

IDENTIFIERS = ArrayHeader("samples", "", SAMPLES, (), "int64")
"""The description of the file of identifiers."""


class Shard:
    """One shard of a store on disk; ``rows`` are the safe ones, by the name of their file.

    Args:
        place: Its folder.
        asked: The call of the user, for messages.

    Raises:
        BadInput: For a header or mark that cannot be read, a file that is missing, shorter than its finished
            rows or of another kind than the header says, and for missing marks.
    """

    def __init__(self, place: Path, asked: str) -> None:
        self.place, self._asked = place, asked
        self.header = ShardHeader.load(place, asked)
        self.arrays = {(each.quantity, each.parameter): each for each in self.header.arrays}
        files = {each.file: self.file(each) for each in (IDENTIFIERS, *self.header.arrays)}
        try:
            shown = {name: shown_rows(asked, file) for name, file in files.items()}
            self.marks = Marks(place, asked, self.header.token)  # after the header that they need
            for file in files.values():
                require_length(asked, file, self.marks.last.samples)
        except OSError as error:
            raise BadInput(
                asked,
                f"file {str(error.filename or place)!r}",
                f"it cannot be read: {error.strerror or error}",
                "make it a file that you may read, or take it from a copy of the store",
            ) from error
        self.rows = {each.file: self._rows(each) for each in (IDENTIFIERS, *self.header.arrays)}
        for name, rows in shown.items():
            if rows > self.marks.most:
                raise BadInput(
                    asked,
                    f"folder {str(place)!r}",
                    f"{name} says that {rows} rows are safe, and the marks in chunks.jsonl end at "
                    f"{self.marks.most}: some marks are missing",
                    "take both files from one copy of the store, or write the store again",
                )

    def file(self, header: ArrayHeader) -> GrowingArray:
        """Return the file of an array."""
        return GrowingArray(self.place / header.file, header.shape, header.precision)

    def _rows(self, header: ArrayHeader) -> CheckedRows:
        file, asked = self.file(header), f"Rows of {header.said} were read from a store."
        rows = file.mapped(self.marks.last.samples)
        try:
            return CheckedRows(rows, header.file, self.marks.chunks, asked, file.path)
        except ValueError as error:
            raise BadInput(
                self._asked,
                f"the marks of {header.file} in {str(self.place)!r}",
                str(error),
                "take chunks.jsonl from a copy of the store, or write the store again",
            ) from error


def with_checksums(mark: Mark, start: int, files: Mapping[str, GrowingArray]) -> Mark:
    """Make the mark of a chunk that begins at row ``start``, with checksums of its rows in the files."""
    begun = files if start < mark.samples else {}
    found = {name: checksums(file.mapped(mark.samples, start)) for name, file in begun.items()}
    return replace(mark, start=start, checksums=found)


def cut_mark(asked: str, mark: Mark, chunks: Sequence[Mark], files: Mapping[str, GrowingArray]) -> Mark:
    """Make a mark that goes back to fewer rows, with new checksums of the rest of the chunk that it cuts.

    Raises:
        PackpropError: If those rows have changed.
    """
    for chunk in chunks:
        if chunk.start < mark.samples < chunk.samples:
            for name, file in files.items():
                rows = CheckedRows(file.mapped(chunk.samples), name, [chunk], asked, file.path)
                rows.read(slice(chunk.start, mark.samples))
            return with_checksums(mark, chunk.start, files)
    return replace(mark, start=mark.samples)


def require_same_store(asked: str, folder: Path, header: ShardHeader) -> None:
    """Refuse a folder that holds shards of another store.

    Raises:
        BadInput: With the first difference.
    """
    for other in sorted(folder.glob(f"shard-*/{HEADER}")):
        found = ShardHeader.load(other.parent, asked)
        if difference := header.difference(found):
            theirs, ours = (short(getattr(each, difference)) for each in (found, header))
            raise BadInput(
                asked,
                f"folder {str(folder)!r}",
                f"it holds a store with other {difference}: {theirs} instead of {ours}",
                f"write to another folder, or resume with the {difference} that the store was started with",
            )


def require_unmarked(asked: str, folder: Path, shard: Shard) -> None:
    """Refuse a shard that has safe rows, or was finished.

    Raises:
        BadInput: With the number of its samples.
    """
    last = shard.marks.last
    if last.samples or last.finished:
        raise BadInput(
            asked,
            f"folder {str(folder)!r}",
            f"it is not empty: it holds shard {shard.header.shard} of a store, with {last.samples} samples",
            "write to another folder, or delete this one; to continue an interrupted run, use compute(..., "
            "checkpoint=...); to continue any store, StoreWriter(resume=True)",
        )


def require_plain_files(asked: str, folder: Path, writes: bool = False) -> None:
    """Refuse a folder with foreign files: they may lead elsewhere, or make a reader wait for ever.

    Args:
        asked: The call of the user, for messages.
        folder: The folder.
        writes: Says that its files will be written to.

    Raises:
        BadInput: With the first link that leads out; the first pipe, socket or device; for writing, the first
            file that has a second name.
    """
    root = Path(os.path.realpath(folder))
    for place, folders, files in os.walk(folder):
        for path in (Path(place) / name for name in (*folders, *files)):
            try:
                found = path.lstat()
            except FileNotFoundError:  # a draft of another process
                continue
            if not stat.S_ISLNK(found.st_mode):
                _require_plain(asked, path, found, writes)
            elif not Path(os.path.realpath(path)).is_relative_to(root):
                raise BadInput(
                    asked,
                    f"path {str(path)!r}",
                    f"it is a link that leads out of the folder {str(folder)!r}",
                    "put the file itself there; the folder as a whole may be a link",
                )


def _require_plain(asked: str, path: Path, found: os.stat_result, writes: bool) -> None:
    if not stat.S_ISREG(found.st_mode) and not stat.S_ISDIR(found.st_mode):
        raise BadInput(
            asked,
            f"path {str(path)!r}",
            "it is neither a file nor a folder: reading it might never end",
            "remove it, and take the file from a copy; or start again in another folder",
        )
    if writes and stat.S_ISREG(found.st_mode) and found.st_nlink > 1:
        raise BadInput(
            asked,
            f"file {str(path)!r}",
            "it has a second name elsewhere (a hard link), and writing here would change the file there",
            "copy the folder (cp -r), and continue with the copy",
        )
