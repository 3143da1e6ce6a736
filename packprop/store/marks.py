"""The marks of a shard: a line for each chunk of rows that is on the disk, with their checksums."""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass, field
from pathlib import Path

from packprop.errors import BadInput
from packprop.store.files import opened, write_all
from packprop.store.schema import Size, Unfit, checksum_of, fitted, parsed

CHUNKS = "chunks.jsonl"
"""The file of the marks."""


@dataclass(frozen=True)
class Mark:
    """The rows that were on the disk when a chunk was finished.

    Args:
        samples: Samples up to the end of the chunk.
        terms: The divisors of the losses of their batches, added up.
        finished: Says that the writer was closed after it, with nothing left to write.
        start: Samples before the chunk.
        checksums: Checksums of the blocks of the chunk, by file; rows of other files are zero. See NOTE
            [Checksums of rows].
    """

    samples: Size = 0
    terms: float = 0.0
    finished: bool = False
    start: Size = 0
    checksums: dict[str, list[Size]] = field(default_factory=dict)


class Marks:
    """The marks of a shard, to which you can add more. It ignores an incomplete last line.

    Each line has a checksum of the token, all lines before it, and itself. So packprop notices a line that was
    changed, that lacks one before it, or that comes from another store.

    Args:
        place: Folder of the shard.
        asked: The call of the user, for messages.
        token: The number in the header that tells the shard from others.

    Raises:
        BadInput: For a line that is no mark, or has changed.
    """

    def __init__(self, place: Path, asked: str, token: int) -> None:
        self._path, self.last, self.most, self.chunks = place / CHUNKS, Mark(), 0, list[Mark]()
        self._history = [(token, 0)]  # the checksum, and the samples, of each line
        content = self._path.read_bytes() if self._path.exists() else b""
        self._end = content.rfind(b"\n") + 1
        for number, line in enumerate(content[: self._end].splitlines(), 1):
            try:
                self._take(line)
            except Unfit as error:
                raise BadInput(
                    asked,
                    f"line {number} of file {str(self._path)!r}",
                    f"it is not a valid mark of finished rows ({error})",
                    "take the file from a copy of the store, or write the store again; numpy reads the .npy "
                    "files beside it",
                ) from error

    @property
    def checksum(self) -> int:
        """The checksum of all marks so far."""
        return self._history[-1][0]

    def keep(self, samples: int, checksum: int) -> bool:
        """Tell whether the marks once had this checksum, and have kept the first ``samples`` rows since."""
        for index, (each, _) in enumerate(self._history):
            if each == checksum:
                return all(samples <= then for _, then in self._history[index:])
        return False

    def add(self, mark: Mark) -> None:
        """Append a mark, and wait until it is on the disk."""
        content = asdict(mark)
        checksum = checksum_of(content, self.checksum)
        line = json.dumps({**content, "checksum": checksum}).encode() + b"\n"
        with opened(self._path, os.O_RDWR | os.O_CREAT) as file:
            os.ftruncate(file, self._end)  # a line that was cut off
            write_all(file, line, self._end)
            os.fsync(file)
        self._end += len(line)
        self._count(mark, checksum)

    def _take(self, line: bytes) -> None:
        content = parsed(line)
        checksum = content.pop("checksum", None) if isinstance(content, dict) else None
        mark: Mark = fitted(Mark, content)
        expected = checksum_of(content, self.checksum)
        if checksum != expected:
            raise Unfit("this line, or one before it, has changed since it was written")
        if mark.start > min(mark.samples, self.last.samples):
            raise Unfit(f"a chunk cannot begin at row {mark.start}")
        self._count(mark, expected)

    def _count(self, mark: Mark, checksum: int) -> None:
        while self.chunks and self.chunks[-1].samples > mark.start:  # rows were cut off
            if self.chunks.pop().start < mark.start:
                raise Unfit(f"a chunk cannot begin at row {mark.start}, inside another chunk")
        if mark.start < mark.samples:
            self.chunks.append(mark)
        self.last, self.most = mark, max(self.most, mark.samples)
        self._history.append((checksum, mark.samples))
