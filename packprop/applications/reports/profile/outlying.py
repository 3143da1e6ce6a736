"""The samples with the largest gradients, and the ways to show them."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import default_collate

from packprop.applications.dataset.batches import Batches
from packprop.applications.dataset.messages import explanation
from packprop.applications.dataset.sources import Samples
from packprop.applications.reports.profile.said import said_of
from packprop.applications.reports.profile.table import counted
from packprop.engine.tensors import (
    LossFunction,
    apart,
    inputs_and_targets,
    map_tensors,
    random_numbers_from,
    random_states,
    tensors_in,
    together,
)
from packprop.errors import BadInput

ASKED = "The samples with the largest gradients were to be shown."

SHOWN = 12
"""The default number of samples."""

TOKENS = 64
"""The most entries in the text of a sample without a picture."""

SIDE = 96
"""Side of the largest picture, in pixels; packprop averages larger pictures down."""

Decode = Callable[[Any, Any], "str | list[str] | Tensor"]
"""A function of the inputs and targets of one sample, without their leading axis. It returns a text, one piece
of text for each token of the targets, or an image."""


@dataclass(frozen=True)
class OutlyingSample:
    """One of the samples with the largest gradients.

    Args:
        place: Its place in the data, in the order in which they were read.
        norm: Norm of the gradient of its own loss, in all parameters together.
        loss: Its own loss; ``None`` if the model could not be run on it alone.
        target: Its target as text; ``None`` if that is more than one number.
        output: The model's answer as text; ``None`` if outputs are classes neither of samples nor of tokens.
        text: Its text, if it has no picture.
        picture: Name of its picture among ``Profile.tensors``: bytes ``[height, width]`` or
            ``[height, width, 3]``.
        pieces: The same text token by token, if ``decode`` returned it in pieces.
        token_losses: The loss of each token of the targets, if the loss is cross entropy of the model's outputs
            over the tokens; it has ``None`` for tokens without a loss.
    """

    place: int
    norm: float
    loss: float | None = None
    target: str | None = None
    output: str | None = None
    text: str | None = None
    picture: str | None = None
    pieces: list[str] | None = None
    token_losses: list[float | None] | None = None


class NotFoundAgain(BadInput):
    """Raised if packprop has read the data, but cannot find single samples again."""


class ReadableBatches(Batches):
    """Batches that note their sizes and some of their values, so that single samples can be found again."""

    def __init__(self, asked: str, data: Any, batch_size: int | None = None, whole: bool = False) -> None:
        super().__init__(asked, data, batch_size, whole)
        self._extents: list[list[int]] = []
        self._digests: list[str] = []
        self._again, self.watched = False, True

    def _taken(self, batch: Any) -> None:
        super()._taken(batch)
        if self._again or isinstance(self.source, Samples):
            return
        self._extents.append(extents_of(inputs_and_targets(apart(batch), self._whole)))
        self._digests.append(self.digest)

    @property
    def stamp(self) -> str | None:
        """Return a digest of some values of the data, in their order; ``None`` if it is not known.

        A checkpoint keeps that of batches which this call does not read.
        """
        if isinstance(self.source, Samples):
            known: str | None = self.source.facts()["some values"]
            return known
        return self.digest

    def samples_at(self, places: list[int], samples: int) -> dict[int, tuple[Any, Any]]:
        """Return inputs and targets of some samples, each with a leading axis of one sample.

        It reads a data set by index, and other data a second time, up to the last of the samples.

        Raises:
            NotFoundAgain: If the data cannot be read again, or differ in the second reading.
        """
        if isinstance(self.source, Samples):
            return {at: self._checked(default_collate([self.source.data[at]])) for at in places}
        if self.source.is_read_once:
            raise _not_found("they can be read once", "give a list of batches, a data loader or a Dataset")
        sizes = [size_of(extents) for extents in self._extents]
        if sum(sizes) != samples:
            why = (
                "the number of samples in each batch is unknown: batches were read elsewhere or before, or "
                "their first tensor does not have a row for each sample, as in batches of graphs"
            )
            raise _not_found(
                why,
                "give a Dataset, or a pair of tensors; for graphs, the places of the largest entries of "
                "compute(..., BatchL2Grad()).norms() are their places in your data",
            )
        self._again, found, begin, shared = True, {}, 0, shared_among(self._extents)
        self.begin_again()
        for number, batch in enumerate(self):
            if number == len(self._digests) or self.digest != self._digests[number]:
                why = "they differ from one reading to the next"
                raise _not_found(why, "give a Dataset, or a loader that gives the same batches again")
            end = begin + sizes[number]
            for place in places:
                if begin <= place < end:
                    found[place] = _row_of(place - begin, batch, shared)
            begin = end
            if begin > max(places):
                break
        return found


def outlying_samples(
    model: nn.Module,
    loss: LossFunction | None,
    batches: ReadableBatches,
    norms: Tensor,
    count: int,
    decode: Decode | None,
    device: torch.device,
) -> tuple[list[OutlyingSample], dict[str, Tensor]]:
    """Return the samples with the largest gradients, largest first, and their pictures by name.

    Args:
        model: The model, in the mode in which the norms were computed.
        loss: As for ``profile``.
        batches: The data, after a complete reading.
        norms: Norm of each sample's gradient ``[n]``.
        count: The number of samples.
        decode: Maps inputs and targets of one sample to text or an image, in place of packprop's guess.
        device: The device of the model.

    Raises:
        NotFoundAgain: If the data cannot be read again, or differ in the second reading.
        BadInput: If ``decode`` fails on a sample, or returns anything but a text, pieces of text or an image.
    """
    places = norms.nan_to_num(nan=-1.0).topk(min(count, len(norms))).indices.tolist()
    if not places:
        return [], {}
    with batches.drawing_apart(), random_numbers_from(random_states()):
        found = batches.samples_at(places, len(norms))
    rows, pictures = [], {}
    for place in places:
        inputs, targets = found[place]
        shown, picture = _shown(place, inputs, targets, decode)
        pieces, text = (shown, "".join(shown)) if isinstance(shown, list) else (None, shown)
        name = None if picture is None else f"outlying_sample/{place}"
        if name is not None and picture is not None:
            pictures[name] = picture
        said = said_of(ASKED, model, loss, inputs, targets, device)
        if pieces is not None and said.token_losses is not None and len(pieces) != len(said.token_losses):
            raise BadInput(
                ASKED,
                f"decode, for sample {place}",
                f"it returned {counted(len(pieces), 'piece')} of text for {len(said.token_losses)} tokens",
                "return one piece for each token of the targets, or one text",
            )
        rows.append(
            OutlyingSample(
                place,
                float(norms[place]),
                target=_words(targets),
                text=text,
                picture=name,
                pieces=pieces,
                **dataclasses.asdict(said),
            )
        )
    return rows, pictures


def check_decode(decode: Decode | None, batch: tuple[Any, Any]) -> None:
    """Call ``decode`` on the first sample, to refuse a function that fails before any other work.

    Raises:
        BadInput: If it raises an exception, or returns anything but a text, pieces of text or an image.
    """
    extents = extents_of(batch)
    if decode is not None and size_of(extents):
        _shown(0, *_row_of(0, batch, shared_among([extents])), decode)


def _shown(
    place: int, inputs: Any, targets: Any, decode: Decode | None
) -> tuple[str | list[str] | None, Tensor | None]:
    """Return the text of one sample, whole or in pieces, or its picture."""
    if decode is None:
        # the tokens, if a tokenizer of Hugging Face made the inputs
        tokens = inputs.get("input_ids") if isinstance(inputs, Mapping) else None
        tensors = [*tensors_in(inputs if tokens is None else tokens)]
        picture = picture_of(tensors[0][0]) if tensors else None
        return (None, picture) if picture is not None else (text_of(tensors[0][0]), None)
    try:
        decoded = decode(*together(map_tensors(lambda tensor: tensor[0], (inputs, targets))))
    except Exception as error:
        instead = "make decode(inputs, targets) work on one sample, without a leading axis"
        raise BadInput(ASKED, f"decode, for sample {place}", explanation(error), instead) from error
    picture = picture_of(decoded) if isinstance(decoded, Tensor) else None
    if picture is not None:
        return None, picture
    if isinstance(decoded, (list, tuple)) and decoded and all(isinstance(piece, str) for piece in decoded):
        return [*decoded], None
    if not isinstance(decoded, str):
        instead = (
            "return text, a list of one text for each token of the targets, or an image [height, width], "
            "[1, height, width] or [3, height, width]"
        )
        what = f"a tensor {[*decoded.shape]}" if isinstance(decoded, Tensor) else type(decoded).__name__
        raise BadInput(ASKED, f"decode, for sample {place}", f"it returned {what}", instead)
    return decoded, None


def picture_of(sample: Tensor) -> Tensor | None:
    """Return an image as bytes ``[height, width]`` or ``[height, width, 3]``; ``None`` for anything else.

    If floating-point values leave 0 to 1, it rescales them: the smallest becomes black, the largest white.
    """
    image = sample[0] if sample.dim() == 3 and len(sample) == 1 else sample
    coloured = image.dim() == 3 and len(image) == 3
    whole_bytes = image.dtype == torch.uint8
    if not (image.dim() == 2 or coloured) or min(image.shape[-2:]) < 4:
        return None
    if not (whole_bytes or image.is_floating_point()):
        return None
    values = image.detach().cpu().float() / (255 if whole_bytes else 1)
    low, high = values.aminmax()
    if not bool(values.isfinite().all()):
        return None
    if low < 0 or high > 1:
        values = (values - low) / (high - low).clamp(min=torch.finfo(values.dtype).tiny)
    if max(values.shape[-2:]) > SIDE:
        height, width = (max(1, round(size * SIDE / max(values.shape[-2:]))) for size in values.shape[-2:])
        values = F.adaptive_avg_pool2d(values.view(1, -1, *values.shape[-2:]), (height, width))[0]
        values = values if coloured else values[0]
    picture = (values * 255).round().to(torch.uint8)
    return picture.permute(1, 2, 0).contiguous() if coloured else picture


def text_of(sample: Tensor) -> str:
    """Return the first entries of a sample as text, floating-point numbers to three digits."""
    entries = sample.detach().flatten()
    first = entries[:TOKENS].tolist()
    words = " ".join(f"{entry:.3g}" if entries.is_floating_point() else str(entry) for entry in first)
    return words if len(entries) <= TOKENS else f"{words} ... ({len(entries):,} in all)"


def _words(targets: Any) -> str | None:
    """Return the target of one sample as text; ``None`` if it is not one number."""
    if not isinstance(targets, Tensor) or targets.numel() != 1:
        return None
    return f"{targets.item():.4g}" if targets.is_floating_point() else str(int(targets))


def extents_of(batch: Any) -> list[int]:
    """Return the first extent of each tensor in a batch; 0 for a tensor without axes."""
    return [len(tensor) if tensor.dim() else 0 for tensor in tensors_in(batch)]


def size_of(extents: Sequence[int]) -> int:
    """Return the number of samples in a batch, by the leading axis of its first tensor."""
    return extents[0] if extents else 0


def shared_among(batches: Sequence[Sequence[int]]) -> set[int]:
    """Return the places of tensors that do not have a row for each sample in every batch, from extents."""
    return {place for extents in batches for place, extent in enumerate(extents) if extent != extents[0]}


def _row_of(index: int, batch: tuple[Any, Any], shared: set[int]) -> tuple[Any, Any]:
    """Return one sample of a batch, with a leading axis of extent one; shared tensors stay whole."""
    places = itertools.count()
    inputs, targets = map_tensors(
        lambda tensor: tensor if next(places) in shared else tensor[index : index + 1], batch
    )
    return inputs, targets


def _not_found(why: str, instead: str) -> NotFoundAgain:
    return NotFoundAgain(ASKED, "the data, which come in batches", why, instead)
