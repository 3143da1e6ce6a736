"""The files of ranks in a checkpoint.

# NOTE [Files of ranks]
A checkpoint keeps each rank's sums over its batches as they are, and packprop merges them only at the end: so a
continued run rounds like an uninterrupted one. Each rank writes its own file. When all files are written, the
first rank names them in the JSON file; packprop ignores files that it does not name. Ranks that do not see the
folder send their sums to the first rank, which reads and writes for them, one after the other.

If another number of ranks continues, the first rank reads the files of all in turn, and merges their sums.
"""

from __future__ import annotations

import functools
import secrets
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from torch import Tensor

from packprop.applications.dataset.folder import Damaged, File, Folder, WriteError
from packprop.applications.dataset.ranks import Ranks
from packprop.applications.dataset.saved import ASKED, SavedRank, SavedShards, unpacked
from packprop.errors import BadInput, PackpropError
from packprop.store.files import part_of
from packprop.store.schema import Unfit


class Written(NamedTuple):
    """The outcome of an attempt to write the files of ranks.

    Args:
        files: The descriptions of the files.
        failure: The reason why some could not be written; empty if all were.
    """

    files: Sequence[dict[str, Any]] = ()
    failure: str = ""


class RankFiles:
    """The files of ranks; all ranks must construct and use it together.

    Args:
        folder: The folder of the checkpoint, which the first rank has locked.
        ranks: The ranks of the run.
    """

    def __init__(self, folder: Folder, ranks: Ranks) -> None:
        self._ranks = ranks
        path, self._hidden = _seen_by(folder.path, ranks)
        self._folder = Folder(path) if ranks.rank else folder

    def require_one_folder(self) -> None:
        """Refuse ranks that do not see the folder, where each rank has to read the shards of all.

        Raises:
            BadInput: On every rank, with the first rank that does not see it.
        """
        for rank, why in enumerate(self._hidden):
            if why:
                raise BadInput(
                    "compute(..., checkpoint=...) was called on a model that fully_shard has sharded.",
                    f"rank {rank}, the folder {str(self._folder.path)!r}",
                    f"it does not see there what rank 0 has written ({why}): "
                    "each rank writes its own shards to it",
                    "give a folder on a disk that all ranks share",
                )

    def write(self, number: int, tensors: Sequence[Tensor]) -> Written:
        """Write the files of a checkpoint; return the outcome.

        Args:
            number: The number of the checkpoint; that of the first rank counts.
            tensors: The packed state of this rank.
        """
        ranks = self._ranks
        number = ranks.each(number)[0]
        is_hidden = bool(self._hidden[ranks.rank])
        own = ranks.attempt(lambda: Written() if is_hidden else self._written(ranks.rank, number, tensors))
        told = ranks.each(own)
        for rank in self._hidden_ranks:
            sent = [each.detach().cpu() for each in tensors] if rank == ranks.rank else []
            received = ranks.each(sent)[rank]
            if ranks.rank == 0:
                told[rank] = self._written(rank, number, received)
        failures = [f"rank {rank}: {each.failure}" for rank, each in enumerate(told) if each.failure]
        return Written([file for each in told for file in each.files], "; ".join(failures))

    def _written(self, rank: int, number: int, tensors: Sequence[Tensor]) -> Written:
        try:
            return Written([self._folder.written(rank, number, tensors)])
        except WriteError as error:
            return Written(failure=str(error))

    def read(self, files: Sequence[File], first: dict[str, Any] | None) -> dict[str, Any] | None:
        """Return this rank's state if the number of ranks is the same; else ``None`` except on the first rank.

        Args:
            files: The file of each rank that wrote.
            first: The state of the first rank, on that rank; ``None`` on others.

        Raises:
            PackpropError: On every rank, if one of them cannot read its file.
        """
        ranks = self._ranks
        if len(files) != ranks.world:
            return first

        def read(rank: int) -> dict[str, Any] | None:
            reader = 0 if self._hidden[rank] else rank
            return self._read(files[rank], SavedRank) if rank and ranks.rank == reader else first

        found = ranks.attempt(functools.partial(read, ranks.rank))
        for rank in self._hidden_ranks:
            sent = ranks.each(ranks.attempt(functools.partial(read, rank)))[0]
            found = sent if rank == ranks.rank else found
        return found

    def in_turn(self, files: Sequence[File]) -> Iterator[dict[str, Any]]:
        """Yield the states of ranks, one after the other."""
        return (self._read(file, SavedRank) for file in files)

    def shards(self, files: Sequence[File]) -> Iterator[list[Any]]:
        """Yield the parts of shards that each rank has written, and read nothing else."""
        return (self._read(file, SavedShards, "shards") for file in files)

    def _read(self, file: File, kind: Any, part: str | None = None) -> Any:
        try:
            with self._folder.opened(file) as tensors:
                return unpacked(kind, tensors, part)
        except (Damaged, Unfit) as error:
            raise PackpropError(
                ASKED,
                f"rank {self._ranks.rank}, the folder {str(self._folder.path)!r}",
                f"it cannot read the sums of a rank there: {error}",
                "let every rank see the folder, and call it again; if the error stays, remove the last "
                "checkpoint-*.json there, to continue from the one before",
            ) from error

    @property
    def _hidden_ranks(self) -> list[int]:
        return [rank for rank, why in enumerate(self._hidden) if why]


def _seen_by(folder: Path, ranks: Ranks) -> tuple[Path, list[str]]:
    """Return the first rank's folder, and a reason for each rank that does not see it, else an empty text.

    All ranks must call it together.

    Args:
        folder: The folder of this rank.
        ranks: The ranks of the run.
    """
    path, token, failure = part_of(folder / "ranks"), secrets.token_hex(8), ""
    if ranks.world == 1:
        return path.parent, [""]
    if ranks.rank == 0:
        try:
            path.write_text(token)
        except OSError as error:  # such as that of a full disk: the work can continue
            failure = str(error)
    path, token, failure = ranks.each((path.resolve(), token, failure))[0]

    def read() -> str:
        try:
            return "" if path.read_text() == token else "it has other files"
        except OSError as error:
            return str(error)

    hidden = [failure or each for each in ranks.each(read())]
    hidden[0] = ""
    if ranks.rank == 0:
        path.unlink(missing_ok=True)
    return path.parent, hidden
