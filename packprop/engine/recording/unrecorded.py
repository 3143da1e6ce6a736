"""Forward passes that are not recorded: compiled ones, and those of reentrant checkpoints."""

from __future__ import annotations

import warnings

from torch.autograd.graph import Node

from packprop.errors import PackpropWarning

UNCOMPILED = "call the model without torch.compile (the module itself: compiled_model._orig_mod)"
"""The advice about compiled models, in messages."""


REENTRANT = "CheckpointFunctionBackward"
"""The name of the node of a reentrant checkpoint: of PyTorch's own, and of other libraries'."""


NOT_REENTRANT = (
    "torch.utils.checkpoint.checkpoint(..., use_reentrant=False); a model of Hugging Face: "
    "gradient_checkpointing_enable({'use_reentrant': False})"
)
"""The advice about reentrant checkpoints, in messages."""


class _Traced:
    """A note for hooks that the compiler traces: they can do no more than set a flag."""

    noted = False
    told = False


_traced = _Traced()


def is_compiled_region(node: Node) -> bool:
    """Tell whether a node is a compiled region, with all the functions and parameters in it."""
    return node.name().startswith("CompiledFunction")


def note_compiled() -> None:
    """Note that there is a compiled region; the compiler traces this in a hook, so each call repeats it."""
    _traced.noted = True


def warn_of_compiled() -> None:
    """Warn once, outside compiled regions, that these are not recorded."""
    if _traced.noted and not _traced.told:
        _traced.told = True
        warnings.warn(
            "packprop does not record what torch.compile compiles: outputs and .grad are right, but a backward "
            "pass inside backpack(...) refuses the parameters in it. "
            f"For more than the gradient, {UNCOMPILED}.",
            PackpropWarning,
            stacklevel=2,
        )
