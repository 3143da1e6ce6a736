"""Writing a store: it appends rows of samples, and marks chunks of them when they are safe."""

from __future__ import annotations

import contextlib
import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from packprop.store.arguments import (
    divisor,
    notes_of,
    require_names,
    require_precision,
    samples_and_terms,
    seconds_of,
    shard_numbers,
)
from packprop.store.describing import (
    described_extension,
    described_model,
    packprop_version,
    require_same_parameters,
    require_storable,
)
from packprop.store.files import Lock
from packprop.store.folder import HEADER, SAMPLES, ShardHeader, folder_of_shard, is_begun
from packprop.store.marks import CHUNKS, Mark, Marks
from packprop.store.places import (
    closed,
    require_held,
    require_place,
    taken_by_disk,
    writable,
)
from packprop.store.plain import GrowingArray
from packprop.store.shard import (
    Shard,
    cut_mark,
    require_plain_files,
    require_same_store,
    require_unmarked,
    with_checksums,
)
from packprop.store.values import Key, begun_arrays, converted, identifiers_of, require_rows, taken_from
from packprop.types import Extension

CHUNK = 64 * 2**20
"""Bytes after which a chunk is finished."""

WAITING = 8
"""Chunks that may be written while an earlier one is on its way to the disk; then writing waits."""

OPEN_FILES = 128
"""Arrays up to which files stay open between batches."""


class StoreWriter:
    """Writes values of single samples to a folder, as they come.

    Marked rows survive whatever happens to the process or the machine: a chunk is marked when it is on the
    disk. A chunk ends after 64 MiB, after some seconds, and at ``commit``. Rows after the last mark are lost
    with the process, and are cut off when you open the writer again with ``resume=True``.

    Rows on disk belong to a loss that is summed over its terms, so that rows of batches of different sizes have
    one scale. ``compute`` ensures this; by hand you pass the divisor of a batch's loss as ``terms``.

    Args:
        folder: The folder of the store: an empty one, or one that does not exist.
        model: The model whose parameters have the values.
        extensions: The extensions to store. Each must have rows of samples.
        dtype: Precision of stored floating-point values, such as ``torch.float16``; ``None``: as computed.
        identify: For ``compute``: maps a batch, as the data yield it, to whole numbers ``[n]``, one for each
            sample; without it by the order in which they come, or by index if ranks divide a data set.
        shard: Number of this writer's part of the store, one for each process; ``None``: its rank, if
            ``torch.distributed`` runs, else 0.
        shards: The number of parts; ``None``: the number of ranks, or 1.
        resume: Continue an existing store.
        seconds: Seconds after which a chunk is finished.
        notes: Notes that belong to the store, as JSON can hold them; a resumed store refuses other notes.

    Raises:
        BadInput: For extensions without rows of samples, a folder that holds something else, or a store of
            another version, model or extensions.
        PackpropError: If the store is open for writing elsewhere.
    """

    def __init__(
        self,
        folder: str | Path,
        model: nn.Module,
        extensions: Sequence[Extension],
        *,
        dtype: torch.dtype | None = None,
        identify: Callable[[Any], Any] | None = None,
        shard: int | None = None,
        shards: int | None = None,
        resume: bool = False,
        seconds: float = 10.0,
        notes: Mapping[str, Any] | None = None,
    ) -> None:
        self.folder, self.extensions, self.identify = Path(folder), tuple(extensions), identify
        asked = f"StoreWriter({str(folder)!r}) was opened."
        self.dtype, self._model, self._seconds = dtype, model, seconds_of(asked, seconds)
        require_storable(asked, self.extensions)
        require_precision(asked, dtype)
        self._header = ShardHeader(
            *shard_numbers(asked, shard, shards),
            [described_extension(extension) for extension in self.extensions],
            described_model(model),
            notes_of(asked, notes),
            packprop_version() or "unknown",
            (),
            secrets.randbits(32),
        )
        self._place = folder_of_shard(self.folder, self._header.shard)
        self._finishing: Future[None] | None = None
        with writable(asked, self.folder, self._place):
            require_place(asked, self.folder)
            require_plain_files(asked, self.folder, writes=True)
            self._place.mkdir(parents=True, exist_ok=True)
            self._lock: Lock | None = Lock(self._place)
            try:
                self._begin(asked, resume)
            except BaseException:
                self._lock.close()
                raise
        self._pool = ThreadPoolExecutor(1, "packprop-store")
        self._open_bytes, self._began = 0, time.monotonic()

    def _begin(self, asked: str, resume: bool) -> None:
        """Start a shard, or continue an existing one."""
        self._samples = GrowingArray(self._place / SAMPLES, (), torch.int64)
        self._arrays: dict[Key, GrowingArray] = {}
        self._mark = Mark()
        require_same_store(asked, self.folder, self._header)
        shard = Shard(self._place, asked) if (self._place / HEADER).exists() else None
        if shard is None and is_begun(self._place):
            ShardHeader.load(self._place, asked)  # says why
        if shard is not None and not resume:
            require_unmarked(asked, self.folder, shard)
            # no row was marked: the writer was killed before the end of its first chunk
            for name in (*(each.file for each in shard.header.arrays), SAMPLES, CHUNKS):
                (self._place / name).unlink(missing_ok=True)
        if shard is None or not resume:
            self._header.save(self._place)
            self._marks = Marks(self._place, asked, self._header.token)
            return
        self._header, self._marks, self._mark = shard.header, shard.marks, shard.marks.last
        self._arrays = {key: shard.file(header) for key, header in shard.arrays.items()}
        self.resume_at(self._mark.samples, self._mark.terms)

    def require_model(self, asked: str, model: nn.Module) -> None:
        """Refuse a model with other parameters, or other trained ones, than the store was opened for."""
        require_same_parameters(asked, str(self.folder), self._header.model, model)

    def __repr__(self) -> str:
        return f"<StoreWriter {str(self.folder)!r}: {self.samples:,} samples so far>"

    @property
    def samples(self) -> int:
        """Samples written so far by this writer, and by those that it continues."""
        return self._mark.samples

    @property
    def terms(self) -> float:
        """The sum of the divisors of the losses of their batches."""
        return self._mark.terms

    @property
    def checksum(self) -> int:
        """The checksum of all marked rows so far, which tells this store from others."""
        return self._marks.checksum

    @property
    def quantities(self) -> set[str]:
        """The quantities with rows: attributes of extensions, and the names of written values."""
        return {quantity for quantity, _ in self._arrays}

    def write(
        self,
        identifiers: Any = None,
        *,
        terms: float = 1.0,
        unused_are_zero: bool = False,
        **values: Tensor,
    ) -> None:
        """Store the values of the last backward pass, and remove them from the parameters.

        Args:
            identifiers: Whole numbers ``[n]`` that identify the samples; without them they are numbered in the
                order in which they come (under several shards in turn: shard 1 of 3 has 1, 4, 7, ...).
            terms: The divisor of the batch's loss: the number of samples under most means. packprop multiplies
                values by it, to their degree, so that values of all batches have one scale.
            unused_are_zero: Treats a parameter without values as unused by this batch, with rows of zeros.
            values: More values to store, such as losses: tensors ``[n, ...]`` by name, the same names for all
                batches.

        Raises:
            BadInput: For values that have no row for each sample, or have other rows or names than before.
            PackpropError: If a parameter has no values, or those of an earlier pass; if the disk takes none.
        """
        asked = self._called("write")
        terms = divisor(asked, terms)
        self.require_model(asked, self._model)
        taken = taken_from(self._model, self.extensions, terms, unused_are_zero, self.dtype)
        fields = {extension.savefield for extension in self.extensions}
        require_names(asked, values.keys(), self.quantities, fields, self.samples)
        taken |= {(name, ""): value for name, value in values.items()}
        rows = next(iter(taken.values()), None)
        samples = len(rows) if isinstance(rows, Tensor) and rows.dim() else 0
        self._append(asked, taken, samples, terms, identifiers)
        for extension in self.extensions:
            for parameter in self._model.parameters():
                vars(parameter).pop(extension.savefield, None)

    def add(
        self, values: Mapping[Key, Tensor], samples: int, terms: float = 0.0, identifiers: Any = None
    ) -> None:
        """Append rows ``[n, ...]`` of ``n = samples`` samples, by quantity and parameter, as they are.

        Missing arrays get rows of zeros. A batch is stored as a whole or not at all.

        Raises:
            BadInput: For values that have no row for each sample, or have other rows than before.
            PackpropError: If the disk does not take them.
        """
        self._append(self._called("add"), values, samples, terms, identifiers)

    def _append(
        self, asked: str, values: Mapping[Key, Tensor], samples: int, terms: float, identifiers: Any
    ) -> None:
        samples, terms = samples_and_terms(asked, samples, terms)
        start, total = self.samples, self.samples + samples
        numbers = identifiers_of(asked, identifiers, start, samples, self._header)
        rows = {key: converted(asked, key, value, self.dtype) for key, value in values.items()}
        require_rows(asked, rows, samples, self._arrays)
        size = self._open_bytes + sum(value.numel() * value.dtype.itemsize for value in rows.values())
        ends = size >= CHUNK or time.monotonic() - self._began >= self._seconds
        ends &= size >= WAITING * CHUNK or self._finishing is None or self._finishing.done()
        with self._to_disk():
            try:  # all that may fail, before the rows count: the caller may repeat the batch
                if ends:
                    self._wait()
                self._put(start, numbers, rows)
                if ends:
                    self._for_all(lambda array: array.fill(total))
            except BaseException:
                self._take_back(start)
                raise
        self._mark, self._open_bytes = Mark(total, self._mark.terms + terms), size
        if ends:
            self._mark_chunk()

    def _take_back(self, samples: int) -> None:
        """Drop rows of a batch that failed: zeros of a later batch would leave them in place."""
        try:
            self._for_all(lambda array: array.drop(samples))
        except BaseException:  # they are still there
            self._leave()
            raise

    def _for_all(self, change: Callable[[GrowingArray], None]) -> None:
        """Change all files of rows, only some of which stay open."""
        for array in (self._samples, *self._arrays.values()):
            change(array)
            if len(self._arrays) > OPEN_FILES:
                array.close()

    def _put(self, start: int, numbers: Tensor, rows: Mapping[Key, Tensor]) -> None:
        if self._marks.last.finished:  # readers learn that more is to come
            self._marks.add(Mark(start, self.terms, start=start))
        self._make_arrays(rows)
        self._samples.put(start, numbers)
        for key, value in rows.items():
            self._arrays[key].put(start, value)
            if len(self._arrays) > OPEN_FILES:
                self._arrays[key].close()

    def commit(self) -> None:
        """Finish the open chunk now, and wait until it is on the disk."""
        self._called("commit")
        self._wait()
        with self._to_disk():
            self._for_all(lambda array: array.fill(self.samples))
        self._mark_chunk()
        self._wait()

    def resume_at(self, samples: int, terms: float, checksum: int | None = None) -> None:
        """Go back to the first ``samples`` samples, with the sum of their ``terms``, as a checkpoint says.

        Args:
            samples: The samples that stay.
            terms: Their terms.
            checksum: The ``checksum`` of the writer that the checkpoint was made with, after its ``commit``;
                with it, packprop refuses a store with other rows, and changes nothing there.

        Raises:
            BadInput: If the store holds fewer samples, or other rows; for an argument that is no such number.
            PackpropError: If it cuts a chunk whose remaining rows have changed on the disk.
        """
        asked = self._called("resume_at")
        samples, terms = samples_and_terms(asked, samples, terms)
        self._wait()
        require_held(asked, self._place, self._marks, self.samples, samples, checksum)
        if samples > self._marks.last.samples:
            self.commit()
        mark, last = Mark(samples, terms), self._marks.last
        with self._to_disk():
            # first: only rows without a mark can be cut off
            if (samples, terms) != (last.samples, last.terms):
                self._marks.add(cut_mark(asked, mark, self._marks.chunks, self._files))
            self._mark = mark
            self._for_all(lambda array: array.cut(samples))

    @property
    def _files(self) -> dict[str, GrowingArray]:
        """Return all files of rows, by name."""
        arrays = {each.file: self._arrays[each.quantity, each.parameter] for each in self._header.arrays}
        return {SAMPLES: self._samples, **arrays}

    def close(self) -> None:
        """Finish the open chunk, and mark the store as complete."""
        self._end(is_complete=True)

    def __enter__(self) -> StoreWriter:
        return self

    def __exit__(self, *error: Any) -> None:
        self._end(is_complete=error[0] is None)

    def _end(self, is_complete: bool) -> None:
        """Finish the open chunk, which is whole in any case, and release the folder."""
        if self._lock is None:
            return
        try:
            self._wait()
            last = self._marks.last
            if is_complete or (self.samples, self.terms) != (last.samples, last.terms):
                self.commit()
            if is_complete:
                with self._to_disk():
                    self._marks.add(Mark(self._mark.samples, self._mark.terms, True, self._mark.samples))
        finally:
            self._leave()

    def _leave(self) -> None:
        self._pool.shutdown()
        self._for_all(GrowingArray.close)
        if self._lock is not None:
            self._lock.close()
        self._lock = None

    def _make_arrays(self, rows: Mapping[Key, Tensor]) -> None:
        """Make arrays for values that come for the first time."""
        new = {key: value for key, value in rows.items() if key not in self._arrays}
        if not new:
            return
        known = self._header.arrays
        begun = begun_arrays(self._place, new, self.extensions, known, self.samples)
        header = replace(self._header, arrays=(*known, *(each for each, _ in begun)))
        header.save(self._place)  # after the files, which readers look for
        self._header = header
        self._arrays.update({key: array for key, (_, array) in zip(new, begun, strict=True)})

    def _mark_chunk(self) -> None:
        """Have the rows so far marked when they are on the disk."""
        files, mark, start = self._files, self._mark, self._marks.last.samples
        self._open_bytes, self._began = 0, time.monotonic()

        def finish() -> None:
            for array in files.values():
                array.sync()
            self._marks.add(with_checksums(mark, start, files))
            for array in files.values():
                array.show(mark.samples)

        self._finishing = self._pool.submit(finish)

    def _wait(self) -> None:
        finishing, self._finishing = self._finishing, None
        if finishing is not None:
            with self._to_disk():
                finishing.result()

    def _called(self, method: str) -> str:
        """Return the call of a method, for messages; refuse it if the writer is closed."""
        if self._lock is None:
            raise closed(self.folder)
        return f"StoreWriter({str(self.folder)!r}).{method}(...) was called."

    def _to_disk(self) -> contextlib.AbstractContextManager[None]:
        return taken_by_disk(self.folder, self._place, self._marks)
