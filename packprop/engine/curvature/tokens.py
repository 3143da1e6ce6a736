"""Columns by token: seed vectors at a loss, split by the positions of its terms.

# NOTE [Tokens]
A loss of a language model is a sum of terms, one for each predicted token: one for each sample, and each index
on the axes of the loss's input that hold neither samples nor classes. The gradient of one term flows through
attention to all earlier positions. The cotangent of the sum therefore cannot be split: at a use upstream of
attention each position holds parts of many tokens. Samples stay separate. So packprop feeds in the gradient at
the input of the loss once for each position, with zeros at all others, for all samples at once. This takes as
many columns as a sample has tokens, not as many as the batch has. Each token gets a row, the derivative of its
own term, and the rows of a sample's tokens sum to the row of the sample.

Each column of a GGN is at one position already. Draws are for all positions at once, and packprop splits them
like the gradient. Consecutive columns belong to one token, and packprop sums the results of a token's columns.

A token counts unless its term is multiplied by zero: by ``ignore_index``, by a weight, or by operations on the
loss. A token that does not count has rows of zeros.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from packprop.engine.curvature.columns import Columns
from packprop.engine.curvature.generic_loss import linear_factor
from packprop.engine.curvature.second_order import in_order
from packprop.engine.functions.losses.description import canonical, weight_of_terms, without_classes
from packprop.engine.graph.graph import Graph, ReachedLoss
from packprop.engine.graph.links import Entrance
from packprop.engine.graph.pull import derivatives
from packprop.errors import PackpropError

TOKENS_ASKED = 'Quantities of single tokens were asked for (per="token").'


def require_losses(graph: Graph, asked: str, unknown: str) -> None:
    """Raise if a path leads to the parameters without a recorded loss.

    Raises:
        PackpropError: With the request ``asked``, and with the ``unknown`` quantity that needs a loss.
    """
    if not graph.losses:
        raise PackpropError(
            asked,
            "the tensor that backward() was called on",
            f"no recorded loss lies between it and the parameters, so {unknown} not known",
            "use a loss of torch, as an extended module or as a function inside `with packprop.record():`; or "
            "write your own as a module without parameters that takes the model's output and targets, and "
            "extend it",
        )
    if graph.without_loss:
        raise PackpropError(
            asked,
            graph.without_loss[0],
            "a path from the tensor that backward() was called on reaches it without passing a recorded loss",
            "compute that part with a loss function of torch: as an extended module or inside "
            "`with packprop.record():`; or keep it out of this backward pass",
        )


def require_constant_arguments(loss: ReachedLoss, asked: str, why: str, instead: str) -> None:
    """Raise if something besides the input of a loss requires gradients, such as a target.

    Raises:
        PackpropError: With its name, the request ``asked``, why it cannot be, and what to do ``instead``.
    """
    call = loss.call
    others: list[tuple[int | str, Any]] = [*enumerate(call.args[1:], 1), *call.kwargs.items()]
    found = [
        f"argument {place!r}"
        for place, value in others
        if isinstance(value, Tensor) and value.requires_grad and value is not call.input
    ]
    found += ["a tensor of the model that is no argument"] if loss.others else []
    if found:
        raise PackpropError(
            asked,
            f"{found[0]} of {call.name}",
            f"it requires gradients, as the model's output does, and {why}",
            f"detach it, if no gradient shall go through it (targets); {instead}",
        )


def token_count(loss: ReachedLoss) -> int:
    """Return the number of tokens of a sample with terms in a loss.

    Tokens lie on all axes except those of samples and classes. If each entry has a term of its own, the last
    axis holds the entries of one token.

    Raises:
        PackpropError: If the loss has no positions, or they are not known.
    """
    shape, layout, rule = loss.call.shape, loss.layout, loss.entrance.rule
    name = f"the loss {loss.call.name}"
    where = f"{name}, whose input has shape {list(shape)}"
    of_rows = rule.link is not None and rule.link.of_rows
    if rule.class_axis is None and (rule.root is None or of_rows):
        raise PackpropError(
            TOKENS_ASKED,
            name,
            "it is not known that its terms at different positions are independent of each other",
            "use cross_entropy, binary_cross_entropy_with_logits or mse_loss; or declare it: "
            "@packprop.register_loss(MyLoss) on a rule that returns packprop.functions.Loss(class_axis=..., "
            "...), for the class MyLoss of your loss module",
        )
    if layout.rows is not None and loss.call.documents is None:
        raise PackpropError(
            TOKENS_ASKED,
            where,
            "several losses share the rows of the samples: it is not known which tokens the rows are",
            "let each loss take some positions of all samples (hidden.split(size, dim=1))",
        )
    inner, rest = without_classes(layout, shape, rule.class_axis)
    axes = inner.front_shape(rest)[1:]
    if layout.axis is None and rest.numel() == 1:  # one sample, whose axis may be this one
        axes = torch.Size()
    if rule.class_axis is None:
        axes = axes[:-1]
    if not axes or not axes.numel():
        raise PackpropError(
            TOKENS_ASKED,
            where,
            "it has one term for each sample: there is no axis of positions besides that of the samples"
            + ("" if rule.class_axis is not None else " and the last one, of the entries of a token"),
            "give it an axis of positions: [n, c, t] or [n * t, c] for cross_entropy, [n, t, d] for losses of "
            'a term for each entry; or ask for per="sample"',
        )
    return axes.numel()


def gradient_by_token(graph: Graph) -> list[Columns]:
    """Return the gradient at the input of each loss, one column for each position."""
    losses = in_order(graph.losses)
    for loss in losses:
        token_count(loss)  # raises before any work
        why = "it is not known which tokens its entries belong to"
        require_constant_arguments(loss, TOKENS_ASKED, why, 'else ask for per="sample"')
    create_graph = torch.is_grad_enabled()
    values = [loss.value for loss in losses]
    found = []
    with torch.enable_grad():
        factors = derivatives(graph.roots, values, graph.root_gradients(), create_graph=create_graph)
    for loss, value, factor in zip(losses, values, factors, strict=True):
        if factor is None:
            continue
        with torch.enable_grad():  # through this loss alone: its input may also lead to those of others
            (gradient,) = derivatives([value], [loss.call.edge], [factor], create_graph=create_graph)
        if gradient is not None:
            entrance = Entrance(loss.entrance.rule, loss.call.edge)
            columns = canonical(gradient, loss.layout, entrance.rule.class_axis)[None]
            found.append(columns_by_token(graph, loss, entrance, columns))
    return found


def columns_by_token(graph: Graph, loss: ReachedLoss, entrance: Entrance, values: Tensor) -> Columns:
    """Split columns ``[m, n, p, c]`` in canonical form by token: ``m`` consecutive columns for each token."""
    tokens, (each, samples, positions, classes) = token_count(loss), values.shape
    apart = values.reshape(each, samples, tokens, -1)

    def chunk(start: int, stop: int) -> list[Tensor]:
        number = torch.arange(start, stop, device=values.device)
        token = number // each
        wide = apart.new_zeros(stop - start, samples, *apart.shape[2:])
        wide[number - start, :, token] = apart[number % each, :, token]
        column = wide.reshape(-1, samples, positions, classes)
        return [entrance.put(loss.call, loss.layout, entrance.rule.class_axis, column)]

    return Columns([entrance.edge], tokens * each, chunk, counted=counted_tokens(graph, loss))


def counted_tokens(graph: Graph, loss: ReachedLoss) -> Tensor:
    """Tell which tokens have a term with a factor other than zero ``[t, n]``."""
    tokens, rule = token_count(loss), loss.entrance.rule
    factor = linear_factor(graph, loss, TOKENS_ASKED)
    layout, shape = without_classes(loss.layout, loss.call.shape, rule.class_axis)
    weight = weight_of_terms(rule, factor, loss.call.shape)
    assert isinstance(weight, Tensor)  # as the factor is
    return layout.to_front((weight != 0).expand(shape)).reshape(layout.samples, tokens, -1).any(-1).T
