"""Checks that what was computed from the model's output is a sum of one term for each sample.

# NOTE [Mixing in the loss]
Rows of a gradient belong to samples only if the gradient in one sample's output does not depend on the outputs
of others: then the loss is a sum of terms. So the gradient at the model's output is differentiated again, along
random numbers in the rows of some samples, and must be zero in the rows of the others. Only the graph of the
loss is gone through. Losses that torch has a rule for are known to be sums. What is computed from their values
is looked at in the same way, with these values in the place of the model's output: entries of a loss that was
not reduced belong to samples, while one number for the whole batch belongs to none, so that nothing but what is
linear in it gives a sum of terms. So are the places where paths meet the model beside all losses; see NOTE
[Open paths]. As for the model, what is found is kept if NaN instead of the numbers finds no dependence either;
see NOTE [Hidden mixing].

Second derivatives are blind to kinks, and some functions have none. Functions that may be linear by parts (an
absolute value, a maximum, a distance, the deviation of two numbers) are refused if they make one number of
several samples, or an entry that depends on more than one sample; so are those that PyTorch cannot
differentiate twice. A sum of absolute values is refused if one of these depends on more than one sample.
Not seen is a choice that leaves no trace on the graph: samples picked by their values, as ``topk`` and
``where`` do.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, Node, get_gradient_edge

from packprop.engine.functions.losses import LOSSES
from packprop.engine.functions.losses.description import without_classes
from packprop.engine.functions.nodes import made_by
from packprop.engine.functions.operands import adds_magnitudes, has_kinks, is_linear
from packprop.engine.graph.graph import Graph
from packprop.engine.graph.pull import pull_columns
from packprop.engine.graph.search import depth_first
from packprop.engine.graph.sweep import unmasked
from packprop.engine.samples.feeding import Feed, ModelOutput
from packprop.engine.samples.hidden_mixing import parts
from packprop.engine.tensors.layout import Layout, possible_layouts
from packprop.engine.tensors.repeated import Products
from packprop.errors import PackpropError

_MERGED = Layout(None, 1)
"""The place of the samples in a value that is one number, or whose numbers belong to no sample."""


def require_separate_losses(graph: Graph, outputs: Sequence[ModelOutput], chosen: Sequence[Layout]) -> bool:
    """Refuse losses that mix samples, and what bends their values; see NOTE [Mixing in the loss].

    Args:
        graph: What the pass goes through, with its samples located.
        outputs: The model's outputs.
        chosen: Where each of them holds the samples.

    Returns:
        Whether this holds for all values.
    """
    roots = [get_gradient_edge(root) for root in graph.roots if root.requires_grad]
    seeds = [seed for root, seed in zip(graph.roots, graph.root_gradients(), strict=True) if root.requires_grad]
    lasting = True
    given = list(zip(outputs, chosen, strict=True))
    for place, loss in enumerate(graph.losses):  # outputs of losses come first
        function = loss.call.function
        if function not in LOSSES:
            name = f"the loss {getattr(function, '__name__', function)}"
            output = outputs[place]
            one = torch.ones((), dtype=output.dtype, device=output.device)
            taken = [given[place], *(each for each in given if each[0].beside == place)]
            ends, layouts = zip(*taken, strict=True)
            lasting &= _Part(graph, name, [loss.value], [one], ends, layouts).is_separate()
    ends, layouts = zip(*_ends(graph, outputs, chosen), strict=True)
    return _Part(graph, "", roots, seeds, ends, layouts).is_separate() and lasting


def _ends(
    graph: Graph, outputs: Sequence[ModelOutput], chosen: Sequence[Layout]
) -> list[tuple[ModelOutput, Layout]]:
    """The tensors where the user's own arithmetic begins: values of losses, and what it takes beside these."""
    given = list(zip(outputs, chosen, strict=True))
    ends = []
    for loss, (output, layout) in zip(graph.losses, given, strict=False):  # those of losses come first
        value = ModelOutput.at(loss.value)
        ends.append((value, _layout_of_value(value.shape, output, layout)))
        if loss.is_open:
            ends.append((output, layout))
    return ends + given[len(graph.losses) :]


def _layout_of_value(shape: torch.Size, output: ModelOutput, layout: Layout) -> Layout:
    """The place of the samples in the value of a loss: if it was not reduced, that in its input."""
    kept, rest = without_classes(layout, output.shape, output.loss.class_axis)
    if shape == output.shape:
        return layout
    if shape == rest:
        return kept
    alone = layout._replace(axis=0)
    return alone if len(shape) and shape[0] == layout.samples * layout.parts else _MERGED


class _Part:
    """The part of the graph between some values, its ends, and what is differentiated.

    Args:
        graph: What the pass goes through.
        name: What messages call the part; empty for what was made of values by the user's own arithmetic.
        roots: What is differentiated.
        seeds: What is fed in there.
        ends: The values.
        layouts: Where each of them holds the samples.
    """

    def __init__(
        self,
        graph: Graph,
        name: str,
        roots: Sequence[GradientEdge],
        seeds: Sequence[Tensor],
        ends: Sequence[ModelOutput],
        layouts: Sequence[Layout],
    ) -> None:
        self._asked, self._name, self._samples = graph.asked, name, graph.samples
        self._roots, self._seeds, self._layouts = roots, seeds, layouts
        self._feed = Feed(ends, layouts)
        self._edges = self._feed.edges

    def is_separate(self) -> bool:
        """Tell whether it is a sum over samples for all values; refused if it is none for the present ones."""
        nodes = self._nodes()
        for node, places in nodes:
            if not has_kinks(node):
                continue
            given = [node.next_functions[place] for place in places]
            taken = [GradientEdge(above, output) for above, output in given if above is not None]
            if adds_magnitudes(node, places):
                mixes = self._entries_join(taken[0])
            elif torch.Size(made_by(node)[0].shape).numel() > 1:
                mixes = self._outputs_join(node)
            else:
                mixes = any(map(self._joins_samples, taken))
            if mixes:
                raise self._mixed([node])
        curved = [node for node, places in nodes if not is_linear(node, places)]
        return not curved or self._is_separate_numerically(curved)

    def _require_no_joint_entries(self, nodes: Sequence[Node], error: Exception) -> None:
        """Refuse functions that are not linear, and make entries of more than one sample.

        ``error`` says why they cannot be differentiated twice.
        """
        for node in nodes:
            if self._outputs_join(node):
                raise self._mixed([node]) from error

    def _outputs_join(self, node: Node) -> bool:
        """Tell whether some entry of a node's outputs depends on more than one sample, for some values."""
        return any(self._entries_join(GradientEdge(node, output)) for output, _ in enumerate(made_by(node)))

    def _nodes(self) -> list[tuple[Node, list[int]]]:
        """The nodes that lead to an end, those nearest to the roots first, with the places where they do."""
        ends = {(edge.node, edge.output_nr) for edge in self._edges}
        leads: dict[Node, list[int]] = {}

        def upstream(node: Node) -> list[Node]:
            return [
                each for each, output in node.next_functions if each is not None and (each, output) not in ends
            ]

        starts = [edge.node for edge in self._roots if (edge.node, edge.output_nr) not in ends]
        for node, done in depth_first(starts, upstream, {}):
            if done:
                leads[node] = [
                    place
                    for place, (above, output) in enumerate(node.next_functions)
                    if above is not None and ((above, output) in ends or leads.get(above))
                ]
        return [(node, places) for node, places in reversed(leads.items()) if places]

    def _gradients_of(self, edge: GradientEdge, along: Tensor) -> Products:
        """The gradients of a tensor inside, along numbers of its shape, in the values."""
        return pull_columns([edge], self._edges, [along], batched=False)

    def _joins_samples(self, edge: GradientEdge) -> bool:
        """Tell whether a tensor inside depends on more than one sample."""
        try:
            gradients = self._gradients_of(edge, ModelOutput.at(edge).ones())
        except (RuntimeError, NotImplementedError):
            return False
        reached: Tensor | None = None
        for gradient, layout in zip(gradients, self._layouts, strict=True):
            if gradient is None:
                continue
            if layout.axis is None:
                return True
            rows = (layout.to_front(gradient) != 0).unsqueeze(-1).flatten(1).any(1).cpu()
            reached = rows if reached is None else reached | rows
        return reached is not None and int(reached.sum()) > 1

    def _entries_join(self, edge: GradientEdge) -> bool:
        """Tell whether some entry of a tensor inside depends on more than one sample, for some values.

        Each entry's derivative along NaN in the rows of some samples is NaN if it depends on one of them. Each
        sample is fed NaN in half of the sweeps, no two in the same ones: an entry of one sample comes back as
        NaN in half of them, one of several samples in more. Where PyTorch has no such derivative, entries of
        single samples are known by an axis that holds the samples.
        """
        made = ModelOutput.at(edge)
        if any(layout.axis is None for layout in self._layouts):
            gradients = zip(self._gradients_of(edge, made.ones()), self._layouts, strict=True)
            if any(gradient is not None and layout.axis is None for gradient, layout in gradients):
                return True  # no entry may depend on the whole batch
        cotangent = torch.ones(made.shape, dtype=made.dtype, device=made.device, requires_grad=True)
        sweeps = parts(self._samples, every=True)
        count = torch.zeros(made.shape, dtype=torch.int64, device=made.device)
        try:
            with torch.enable_grad(), unmasked([edge]):
                products = pull_columns([edge], self._edges, [cotangent], batched=False, create_graph=True)
            reached = [
                place
                for place, product in enumerate(products)
                if product is not None and product.requires_grad and self._layouts[place].axis is not None
            ]
            if not reached:
                return False
            for fed in sweeps:
                vectors = self._feed.ones(torch.where(fed, torch.nan, 0.0))
                with torch.autograd.set_detect_anomaly(False):
                    (along,) = pull_columns(
                        [products[p] for p in reached],
                        [cotangent],
                        [vectors[p] for p in reached],
                        batched=False,
                    )
                if along is not None:
                    count += along.isnan()
        except (RuntimeError, NotImplementedError):
            return not self._has_samples_on_an_axis(made)
        return bool((count > len(sweeps) // 2).any())

    def _has_samples_on_an_axis(self, made: ModelOutput) -> bool:
        """Tell whether the rows along some axis of a tensor inside depend on one sample each."""
        sweeps = parts(self._samples, every=True)

        def is_apart(own: Layout, fed: Tensor) -> bool:
            """Tell whether nothing comes back in the rows of samples that were fed zeros."""
            products = self._gradients_of(made.edge, *Feed([made], [own]).ones(fed))
            return not any(
                bool((layout.to_front(product)[~fed.to(product.device)] != 0).any())
                for product, layout in zip(products, self._layouts, strict=True)
                if product is not None
            )

        layouts = possible_layouts(made.shape, self._samples)
        return any(all(is_apart(own, fed) for fed in sweeps) for own in layouts)

    def _is_separate_numerically(self, curved_nodes: list[Node]) -> bool:
        try:
            with torch.enable_grad():
                gradients = pull_columns(
                    self._roots, self._edges, self._seeds, batched=False, create_graph=True
                )
        except (RuntimeError, NotImplementedError) as error:
            self._require_no_joint_entries(curved_nodes, error)
            return True
        places = [place for place, given in enumerate(gradients) if given is not None and given.requires_grad]
        curved = [gradient for gradient in gradients if gradient is not None and gradient.requires_grad]
        if not curved:
            return True
        noise = self._feed.noise()
        lasting = True
        for fed in parts(self._samples, every=True):
            for factors in (fed.double(), torch.where(fed, torch.nan, 0.0)):
                vectors = self._vectors(noise, factors)
                try:
                    with torch.autograd.set_detect_anomaly(False):
                        products = pull_columns(
                            curved, self._edges, [vectors[p] for p in places], batched=False
                        )
                except (RuntimeError, NotImplementedError) as error:
                    self._require_no_joint_entries(curved_nodes, error)
                    return lasting
                for product, layout, gradient in zip(products, self._layouts, gradients, strict=True):
                    if product is None or gradient is None:
                        continue
                    other, scale = self._leak(product.detach(), gradient.detach(), layout, fed)
                    if bool(other.isnan().any()):
                        lasting = False
                    elif bool(other.amax() > 16 * torch.finfo(other.dtype).eps * scale):
                        raise self._mixed(curved_nodes)
        return lasting

    def _vectors(self, noise: Sequence[Tensor], factors: Tensor) -> list[Tensor]:
        """Numbers for each end, those of each sample times a factor of its own."""
        own = self._feed.by_sample(noise, factors)
        return [
            (random * factors.abs().amax()).to(vector) if layout.axis is None else vector
            for vector, random, layout in zip(own, noise, self._layouts, strict=True)
        ]

    def _leak(self, product: Tensor, gradient: Tensor, layout: Layout, fed: Tensor) -> tuple[Tensor, Tensor]:
        """The numbers that must be zero, and one that they are compared with."""
        if layout.axis is None:
            return product.abs(), gradient.abs().amax()
        rows, fed = layout.to_front(product), fed.to(product.device)
        return rows[~fed].abs(), rows[fed].abs().nan_to_num(0.0).amax()

    def _mixed(self, nodes: Sequence[Node]) -> PackpropError:
        if self._name:
            return PackpropError(
                self._asked,
                self._name,
                "it mixes the samples: the gradient at the output of one sample depends on the outputs of "
                "others, so no row belongs to one sample",
                "use a loss that is a sum or mean of one term for each sample. Apply nonlinear functions to "
                "each term, not to their sum. For pairs or triplets, give them an axis of their own, "
                "[n, 2, d], or name the pair of each row with packprop.record(documents=pairs) around the call",
            )
        return PackpropError(
            self._asked,
            f"{nodes[0].name()}, in what was made of the loss or of the model's output",
            "it mixes the samples: this function is not linear in a number that several samples contribute "
            "to. The gradient of one sample would depend on the others, so no row belongs to one sample",
            "for loss ** 2, use 2 * loss.detach() * loss, which has the same gradient. For a maximum, index "
            "the entries. For a function of each sample's loss, use reduction='none', apply it, then sum. For "
            "pairs or triplets, compare rows of several calls of the model, or of an axis of their own, "
            "[n, 2, d]; or name the pair of each row with packprop.record(documents=pairs) around an extended "
            "loss module. Or ask for DiagHessian or HMP alone",
        )
