"""A model around calls of the checked function."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor, nn

from packprop.testing.example import Example


class Host(nn.Module):
    """A model that calls a function on several examples, and moves samples to the front of all outputs.

    Args:
        examples: Calls of one function with the same parameters.
    """

    def __init__(self, examples: Sequence[Example]) -> None:
        super().__init__()
        self.examples = list(examples)
        for label, parameter in examples[0].parameters.items():
            name = label.replace(".", "_")
            free = name if not hasattr(self, name) else f"{name}_"
            self.register_parameter(free, parameter)

    def forward(self, *data: Tensor) -> tuple[Tensor, ...]:
        """Return the outputs of all calls, for tensors as in ``data``."""
        remaining, outputs = iter(data), []
        for example in self.examples:
            tensors = [*example.tensors]
            samples = 1
            for place, axis in enumerate(example.axes):
                if axis is not None:
                    tensor = next(remaining)
                    samples = tensor.shape[0]
                    tensors[place] = tensor.movedim(0, axis)
            for output, layout in zip(example.outputs(tensors), example.layouts, strict=True):
                outputs.append(layout._replace(samples=samples).to_front(output))
        return tuple(outputs)

    @property
    def data(self) -> tuple[Tensor, ...]:
        """Return the tensors of the examples that hold samples, with these in front."""
        return tuple(
            tensor.movedim(axis, 0)
            for example in self.examples
            for tensor, axis in zip(example.tensors, example.axes, strict=True)
            if axis is not None
        )
