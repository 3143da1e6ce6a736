"""Descriptions of data, for messages."""

from __future__ import annotations

import traceback
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from packprop.engine.tensors import class_words, tensors_in
from packprop.errors import BadInput


def no_samples(asked: str, what: str) -> BadInput:
    """Return the error for data whose batches are all empty."""
    return BadInput(asked, what, "the data hold no sample", "give at least one")


def explanation(error: BaseException) -> str:
    """Return an exception's type, message, and last place in its traceback outside torch and packprop."""
    frames = traceback.extract_tb(error.__traceback__)
    packages = (str(Path(torch.__file__).parent), str(Path(__file__).parents[2]), "<")
    own = [frame for frame in frames if not frame.filename.startswith(packages)]
    message = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
    if not own or isinstance(error, SyntaxError):  # its message says where it is
        return message
    return f"{message} ({own[-1].filename}, line {own[-1].lineno}, in {own[-1].name})"


def described(value: Any) -> str:
    """Describe a value for messages: its type, and shapes if it holds tensors."""
    if isinstance(value, Tensor):
        return f"a tensor {shapes(value)}"
    if isinstance(value, (tuple, list)) and len(value) == 2 and has_tensors(value):
        return f"inputs {shapes(value[0])}, targets {shapes(value[1])}"
    kind = class_words(value)
    return f"{kind} of tensors {shapes(value)}" if has_tensors(value) else kind


def shapes(value: Any) -> str:
    """Describe shapes and types of the tensors in nested tuples, lists and dictionaries."""
    texts = [f"{list(tensor.shape)} {str(tensor.dtype).removeprefix('torch.')}" for tensor in tensors_in(value)]
    return " and ".join(texts) if texts else f"of type {type(value).__name__}"


def has_tensors(value: Any) -> bool:
    """Tell whether a value holds a tensor."""
    return next(tensors_in(value), None) is not None
