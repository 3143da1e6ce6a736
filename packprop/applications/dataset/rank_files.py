"""Sums of ranks other than the first, in files of a checkpoint.

# NOTE [Files of ranks]
A checkpoint keeps each rank's sums over its batches as they are, and packprop merges them only at the end: so a
continued run rounds as an undisturbed one. Each rank writes its own files beside those of the first one, which
names all of them in the JSON file when all are there; without it they count for nothing. Their names hold a
text that the first rank draws for each call of ``compute``: so a rank that outlives a killed run cannot write
over files of the next one. Ranks that do not see the folder send their sums to the first one, which reads and
writes for them, one after the other.

If another number of ranks continues, the first one reads the files of all in turn, and merges them.
"""

from __future__ import annotations

import contextlib
import functools
import secrets
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from torch import Tensor

from packprop.applications.dataset.folder import Damaged, Folder, OfRank, WriteError, part_of
from packprop.applications.dataset.ranks import Ranks
from packprop.applications.dataset.saved import ASKED, Pieces, SavedPart, packed, unpacked
from packprop.applications.dataset.shard_files import has_saved_shards
from packprop.errors import BadInput, PackpropError
from packprop.store.schema import Unfit


class OfRanks(NamedTuple):
    """The outcome of an attempt to write the files of ranks other than the first.

    Args:
        files: The ``state`` of each, and as ``rows`` its growth.
        failure: The reason why they could not be written; empty if they were.
    """

    files: Sequence[dict[str, Any]] = ()
    failure: str = ""


class Own(NamedTuple):
    """The state that one rank continues from: results and chunk sizes, and pieces of growing results."""

    state: dict[str, Any]
    pieces: list[Any]


class RankFiles:
    """The files of ranks other than the first; all ranks must make and use it at once.

    Args:
        folder: The folder of the checkpoint, which the first rank has locked; ``None`` on the others.
        ranks: The ranks of the run.
    """

    def __init__(self, folder: Path | None, ranks: Ranks) -> None:
        self._ranks = ranks
        self._path, self._token, self._hidden = _seen_by(folder, ranks)

    def require_one_folder(self) -> None:
        """Refuse ranks that do not all see the folder, if each writes shards of a model to it.

        Raises:
            BadInput: On every rank, with the first that does not see it.
        """
        for rank, why in enumerate(self._hidden):
            if why:
                raise BadInput(
                    "compute(..., checkpoint=...) was called on a model that fully_shard has sharded.",
                    f"rank {rank}, the folder {str(self._path)!r}",
                    f"it does not see there what rank 0 has written ({why}): "
                    "each rank writes its own shards to it",
                    "give a folder on a disk that all ranks share",
                )

    def write(self, number: int | None, state: dict[str, Any], pieces: Sequence[Any]) -> OfRanks:
        """Write the files of the next checkpoint; tell the first rank the outcome.

        Args:
            number: That of the checkpoint, on the first rank; ``None`` on others.
            state: Results and chunk sizes of this rank.
            pieces: The pieces of growing results since the checkpoint before.
        """
        ranks = self._ranks
        if ranks.world == 1:
            return OfRanks()
        number = ranks.each(number)[0]
        assert number is not None

        def write() -> tuple[list[list[Tensor]], OfRanks]:
            if ranks.rank == 0:
                return [], OfRanks()
            tensors = [packed(state), packed([*pieces]) if pieces else []]
            if not self._hidden[ranks.rank]:
                return [], self._written(number, ranks.rank, tensors)
            return [[tensor.detach().cpu() for tensor in each] for each in tensors], OfRanks()

        sent, own = ranks.attempt(write)  # only a rank that does not see the folder sends anything
        told = ranks.each(own)[1:]
        for rank in range(1, ranks.world):
            if self._hidden[rank]:
                received = ranks.each(sent if rank == ranks.rank else [])[rank]
                if ranks.rank == 0:
                    told[rank - 1] = self._written(number, rank, received)
        failures = [f"rank {rank}: {each.failure}" for rank, each in enumerate(told, 1) if each.failure]
        return OfRanks([file for each in told for file in each.files], "; ".join(failures))

    def _written(self, number: int, rank: int, tensors: Sequence[Sequence[Tensor]]) -> OfRanks:
        made: list[Path] = []
        folder, name = Folder(self._path), f"{number:06d}-{rank}-{self._token}"
        try:
            state, *rows = [
                folder.written(f"{kind}-{name}", each, made)
                for kind, each in zip(("state", "rows"), tensors, strict=True)
                if each
            ]
        except WriteError as error:
            for path in made:
                with contextlib.suppress(OSError):  # the first error says more
                    path.unlink(missing_ok=True)
            return OfRanks(failure=str(error))
        return OfRanks([{"state": state, "rows": rows}])

    def read(self, others: Sequence[OfRank] | None, own: Own | None, writers: int) -> Own | None:
        """Return this rank's files, if there were as many ranks; else ``None`` on all but the first.

        Args:
            others: The files of the others; on the first rank.
            own: Those of the first one; on that rank.
            writers: The number of ranks that wrote.

        Raises:
            PackpropError: On every rank, if one of them cannot read its files.
        """
        ranks = self._ranks
        if ranks.world == 1 or writers != ranks.world:
            return own
        files = ranks.each(others)[0]
        assert files is not None

        def read(rank: int) -> Own | None:
            reader = 0 if self._hidden[rank] else rank
            return self._read(files[rank - 1]) if ranks.rank == reader else None

        found = ranks.attempt(lambda: read(ranks.rank) if ranks.rank else own)
        for rank in range(1, ranks.world):
            if self._hidden[rank]:
                sent = ranks.each(ranks.attempt(functools.partial(read, rank)))[0]
                found = sent if rank == ranks.rank else found
        return found

    def in_turn(self, others: Sequence[OfRank]) -> Iterator[Own]:
        """Yield the files of ranks other than the first, one after the other."""
        for files in others:
            yield self._read(files)

    def _read(self, files: OfRank) -> Own:
        try:
            state, rows = Folder(self._path).read_of_rank(files)
            return Own(unpacked(SavedPart, state), [piece for file in rows for piece in unpacked(Pieces, file)])
        except (Damaged, Unfit) as error:
            raise PackpropError(
                ASKED,
                f"rank {self._ranks.rank}, the folder {str(self._path)!r}",
                f"it cannot read the sums of a rank there: {error}",
                "call it again; if it says the same, remove the last checkpoint-*.json there, to go on from "
                "the one before",
            ) from error


def merged_apart(results: dict[str, Any]) -> dict[str, Any]:
    """Return saved results without the common part of all ranks: shards, and results of a first reading."""
    own = [each for each in results["partial"] if not has_saved_shards(each[-1])]
    return {**results, "partial": own, "rotations": []}


def told_to_all(state: dict[str, Any]) -> dict[str, Any]:
    """Return the files of the first rank, without its own sums."""
    together = [each for each in state["results"]["partial"] if has_saved_shards(each[-1])]
    return {**state, "results": {**state["results"], "partial": together}}


def _seen_by(folder: Path | None, ranks: Ranks) -> tuple[Path, str, list[str]]:
    """Return the first rank's folder, a text that it has drawn, and why each rank does not see it.

    All ranks must ask at once.

    Args:
        folder: The folder, which the first rank has locked; ``None`` on the others.
        ranks: The ranks of the run.
    """
    path, token, failure = part_of((folder or Path()) / "ranks"), secrets.token_hex(8), ""
    if ranks.world == 1:
        return path.parent, token, [""]
    if ranks.rank == 0:
        try:
            path.write_text(token)
        except OSError as error:  # of a full disk: so the work can continue
            failure = str(error)
    path, token, failure = ranks.each((path.resolve(), token, failure))[0]

    def read() -> str:
        try:
            return "" if path.read_text() == token else "it has other files"
        except OSError as error:
            return str(error)

    hidden = [failure or each for each in ranks.each(read())]
    if ranks.rank == 0:
        path.unlink(missing_ok=True)
    return path.parent, token, hidden
