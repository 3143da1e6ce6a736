"""A check that the loss is a sum of one term for each sample, as a function of the model's output.

# NOTE [Mixing in the loss]
Rows of a gradient belong to samples only if the gradient in one sample's output does not depend on the outputs
of others: then the loss is a sum of terms. So packprop differentiates the gradient at the model's output again,
along random numbers in the rows of some samples; the result must be zero in the rows of the others. It goes
through the graph of the loss alone. Losses that have a rule are known to be sums. packprop checks arithmetic on
their values in the same way, with these values in the place of the model's output: entries of a loss that was
not reduced belong to samples, while one number for the whole batch belongs to none, so only a linear function
of it gives a sum of terms. The same goes for places where paths meet the model beside all losses; see
NOTE [Open paths]. packprop keeps the finding, as for the model, if NaN instead of the numbers finds no
dependence either; see NOTE [Hidden mixing].

Second derivatives do not show kinks, and some functions have none. So packprop refuses a function that may be
linear in pieces (an absolute value, a maximum, a distance, a function of the user's whose gradient leads
nowhere) if an entry that it makes depends on more than one sample, whatever the values are; and a sum of
absolute values if an entry that it takes does. It treats functions that PyTorch cannot differentiate twice, or
whose second derivative is not finite, in the same way. It does not see a choice that leaves no trace on the
graph: factors and samples picked by their values, as by a comparison with ``where``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, Node, get_gradient_edge

from packprop.engine.functions.losses.description import LOSSES, registered, without_classes
from packprop.engine.functions.nodes import is_from_outside, made_by
from packprop.engine.functions.operands import adds_up_entries, has_kinks, is_linear
from packprop.engine.graph.graph import WHOLE, Graph
from packprop.engine.graph.pull import pull_columns
from packprop.engine.graph.search import depth_first, nodes_above
from packprop.engine.graph.sweep import unmasked
from packprop.engine.samples.feeding import Feed, ModelOutput
from packprop.engine.samples.hidden_mixing import parts
from packprop.engine.tensors.layout import Layout, as_matrix, possible_layouts
from packprop.engine.tensors.repeated import Products
from packprop.errors import PackpropError

FEW_DIGITS = 1e-6
"""A precision that is coarser than this has too few digits to tell the share of a sample from rounding."""


def require_separate_losses(graph: Graph, outputs: Sequence[ModelOutput], chosen: Sequence[Layout]) -> bool:
    """Refuse losses that mix samples, and arithmetic on losses that does; see NOTE [Mixing in the loss].

    Args:
        graph: The graph of the pass, whose samples have been located.
        outputs: The model's outputs; those that losses took come first.
        chosen: The layout of each output.

    Returns:
        Whether samples are separate for all values.

    Raises:
        PackpropError: If samples are mixed, or if packprop cannot tell.
    """
    roots = [get_gradient_edge(root) for root in graph.roots if root.requires_grad]
    seeds = [seed for root, seed in zip(graph.roots, graph.root_gradients(), strict=True) if root.requires_grad]
    lasting = True
    given = list(zip(outputs, chosen, strict=True))
    for place, loss in enumerate(graph.losses):
        function = loss.call.function
        if registered(function) not in LOSSES:
            name = f"the loss {getattr(function, '__name__', function)}"
            output = outputs[place]
            one = torch.ones((), dtype=output.dtype, device=output.device)
            taken = [given[place], *(each for each in given if each[0].beside == place)]
            lasting &= _Part(graph, name, [loss.value], [one], Feed(*zip(*taken, strict=True))).is_separate()
    ends = []  # where the user's own arithmetic begins: values of losses, and other tensors that it takes
    for loss, (output, layout) in zip(graph.losses, given, strict=False):
        value = ModelOutput.at(loss.value)
        ends.append((value, _layout_of_value(value.shape, output, layout)))
        if loss.is_open:
            ends.append((output, layout))
    ends += given[len(graph.losses) :]
    return _Part(graph, "", roots, seeds, Feed(*zip(*ends, strict=True))).is_separate() and lasting


def _layout_of_value(shape: torch.Size, output: ModelOutput, layout: Layout) -> Layout:
    """Return the layout of the value of a loss: if it was not reduced, that of its input.

    Return ``WHOLE`` if the value is one number, or if its numbers belong to no sample.
    """
    kept, rest = without_classes(layout, output.shape, output.loss.class_axis)
    if shape == output.shape:
        return layout
    if shape == rest:
        return kept
    alone = layout._replace(axis=0)
    return alone if len(shape) and shape[0] == layout.samples * layout.parts else WHOLE


@dataclass(frozen=True)
class _Part:
    """The part of the graph between its roots, which packprop differentiates, and some values, its ends.

    Args:
        graph: The graph of the pass.
        name: The name of the part in messages; empty for the user's own arithmetic.
        roots: The edges that packprop differentiates.
        seeds: The vectors that it feeds in at the roots.
        feed: The ends.
    """

    graph: Graph
    name: str
    roots: Sequence[GradientEdge]
    seeds: Sequence[Tensor]
    feed: Feed

    def is_separate(self) -> bool:
        """Tell whether the part is always a sum over samples; refuse it if it is none for present values."""
        nodes = self._nodes()
        for node, places in nodes:
            if has_kinks(node, places):
                self._require_no_kink_of_several(node, places)
        curved = [node for node, places in nodes if not is_linear(node, places)]
        if not curved:
            return True
        self._differentiate_twice(curved, 1.0)
        with unmasked(self.roots, of_kinks=True):  # along NaN, which kinks pass on as well
            return self._differentiate_twice(curved, torch.nan)

    def _require_no_kink_of_several(self, node: Node, places: Sequence[int]) -> None:
        """Refuse a function with kinks that takes or makes an entry of more than one sample."""
        given = [node.next_functions[place] for place in places]
        taken = [GradientEdge(above, output) for above, output in given if above is not None]
        error: Exception | None = None
        if is_from_outside(node):
            try:
                if self._has_second_derivative(node, taken):
                    return
            except (RuntimeError, NotImplementedError) as raised:
                error = raised
        if adds_up_entries(node, places):
            mixes = self._entries_join(taken[0])
        else:  # one number that belongs to a sample now may belong to another one later
            is_one = torch.Size(made_by(node)[0].shape).numel() == 1
            mixes = self._outputs_join(node) or (is_one and any(self._entries_join(e, True) for e in taken))
        if mixes:
            raise self._mixed([node]) from error

    def _has_second_derivative(self, node: Node, taken: Sequence[GradientEdge]) -> bool:
        """Tell whether the gradient that a user's function computes leads back to the function's inputs."""
        made = [ModelOutput.at(GradientEdge(node, output)) for output, _ in enumerate(made_by(node))]
        with torch.enable_grad():
            gradients = pull_columns(
                [each.edge for each in made],
                taken,
                [each.ones() for each in made],
                batched=False,
                create_graph=True,
            )
        above = set(nodes_above(gradient.grad_fn for gradient in gradients if gradient is not None))
        return any(edge.node in above for edge in taken)

    def _require_no_joint_entries(self, nodes: Sequence[Node], error: Exception | None = None) -> None:
        """Refuse nonlinear functions that make entries of more than one sample.

        ``error`` is the error of their second derivative; without one, this derivative is not finite.
        """
        for node in nodes:
            if self._outputs_join(node):
                raise self._mixed([node]) from error

    def _outputs_join(self, node: Node) -> bool:
        """Tell whether some entry of a node's outputs depends on more than one sample, for some values."""
        return any(self._entries_join(GradientEdge(node, output)) for output, _ in enumerate(made_by(node)))

    def _nodes(self) -> list[tuple[Node, list[int]]]:
        """Return the nodes that lead to an end, nearest to the roots first, with the places that lead there."""
        ends = {(edge.node, edge.output_nr) for edge in self.feed.edges}
        leads: dict[Node, list[int]] = {}

        def upstream(node: Node) -> list[Node]:
            return [
                each for each, output in node.next_functions if each is not None and (each, output) not in ends
            ]

        starts = [edge.node for edge in self.roots if (edge.node, edge.output_nr) not in ends]
        for node, done in depth_first(starts, upstream, {}):
            if done:
                leads[node] = [
                    place
                    for place, (above, output) in enumerate(node.next_functions)
                    if above is not None and ((above, output) in ends or leads.get(above))
                ]
        return [(node, places) for node, places in reversed(leads.items()) if places]

    def _gradients_of(self, edge: GradientEdge, along: Tensor) -> Products:
        """Return the gradients at the ends of a tensor in the part, along numbers of its shape."""
        return pull_columns([edge], self.feed.edges, [along], batched=False)

    def _entries_join(self, edge: GradientEdge, together: bool = False) -> bool:
        """Tell whether some entry of a tensor in the part depends on more than one sample, for some values.

        With ``together``, tell whether all entries together depend on more than one sample.

        The derivative of an entry along NaN in the rows of some samples is NaN if it depends on one of them: in
        half of the sweeps of ``parts`` for an entry of one sample, in more for an entry of several. If PyTorch
        has no such derivative, only an axis that holds the samples shows that entries are of single samples.
        """
        made = ModelOutput.at(edge)
        if any(layout.axis is None for layout in self.feed.layouts):
            gradients = zip(self._gradients_of(edge, made.ones()), self.feed.layouts, strict=True)
            if any(gradient is not None and layout.axis is None for gradient, layout in gradients):
                return True  # no entry may depend on the whole batch
        shape = torch.Size() if together else made.shape
        cotangent = torch.ones(shape, dtype=made.dtype, device=made.device, requires_grad=True)
        sweeps = parts(self.graph.samples, every=True)
        count = torch.zeros(shape, dtype=torch.int64, device=made.device)
        try:
            with torch.enable_grad(), unmasked([edge]):
                fed_in = cotangent.expand(made.shape)
                products = pull_columns([edge], self.feed.edges, [fed_in], batched=False, create_graph=True)
            reached = [
                place
                for place, product in enumerate(products)
                if product is not None and product.requires_grad and self.feed.layouts[place].axis is not None
            ]
            if not reached:
                return False
            for fed in (torch.zeros_like(sweeps[0]), *sweeps):
                vectors = self.feed.ones(torch.where(fed, torch.nan, 0.0))
                with torch.autograd.set_detect_anomaly(False):
                    (along,) = pull_columns(
                        [products[p] for p in reached],
                        [cotangent],
                        [vectors[p] for p in reached],
                        batched=False,
                    )
                if along is not None:
                    count += along.isnan()
                if not fed.any() and bool(count.any()):  # NaN that comes back for zeros tells nothing
                    return not self._has_samples_on_an_axis(made)
        except (RuntimeError, NotImplementedError):
            return not self._has_samples_on_an_axis(made)
        return bool((count > len(sweeps) // 2).any())

    def _has_samples_on_an_axis(self, made: ModelOutput) -> bool:
        """Tell whether the rows along some axis of a tensor in the part depend on one sample each."""
        sweeps = parts(self.graph.samples, every=True)

        def is_apart(own: Layout, fed: Tensor) -> bool:
            """Tell whether nothing comes back in the rows of samples that were fed zeros."""
            products = self._gradients_of(made.edge, *Feed([made], [own]).ones(fed))
            return not any(
                bool((layout.to_front(product)[~fed.to(product.device)] != 0).any())
                for product, layout in zip(products, self.feed.layouts, strict=True)
                if product is not None
            )

        layouts = possible_layouts(made.shape, self.graph.samples)
        return any(all(is_apart(own, fed) for fed in sweeps) for own in layouts)

    def _differentiate_twice(self, curved_nodes: list[Node], value: float) -> bool:
        """Tell whether ``value`` at some samples gives no NaN at others; refuse other numbers given there."""
        is_number = value == 1.0
        try:
            with torch.enable_grad():
                gradients = pull_columns(
                    self.roots, self.feed.edges, self.seeds, batched=False, create_graph=True
                )
        except (RuntimeError, NotImplementedError) as error:
            self._require_no_joint_entries(curved_nodes, error)
            return True
        curved = {p: each for p, each in enumerate(gradients) if each is not None and each.requires_grad}
        noise, separate = self.feed.noise(), True
        for fed in parts(self.graph.samples, every=True) if curved else ():
            vectors = self._vectors(noise, torch.where(fed, value, 0.0).double())
            try:
                with torch.autograd.set_detect_anomaly(False):
                    products = pull_columns(
                        [*curved.values()], self.feed.edges, [vectors[p] for p in curved], batched=False
                    )
            except (RuntimeError, NotImplementedError) as error:
                self._require_no_joint_entries(curved_nodes, error)
                return separate
            for product, layout in zip(products, self.feed.layouts, strict=True):
                if product is None:
                    continue
                leak, bound = self._leak(product.detach(), layout, fed)
                if bool(leak.isnan().any()):
                    separate = False
                    if is_number:  # NaN hides the numbers that might have leaked
                        self._require_no_joint_entries(curved_nodes)
                elif is_number and bool(leak.amax() > bound):
                    raise self._mixed(curved_nodes)
        return separate

    def _vectors(self, noise: Sequence[Tensor], factors: Tensor) -> list[Tensor]:
        """Return numbers for each end, each multiplied by the factor of its sample."""
        own = self.feed.by_sample(noise, factors)
        return [
            (random * factors.abs().amax()).to(vector) if layout.axis is None else vector
            for vector, random, layout in zip(own, noise, self.feed.layouts, strict=True)
        ]

    def _leak(self, product: Tensor, layout: Layout, fed: Tensor) -> tuple[Tensor, Tensor | float]:
        """Return the numbers that must be zero, and the largest size that rounding may give them.

        If the whole batch enters a number, any curvature in it mixes samples. With few digits, one sample's
        share in that of a batch would pass for rounding, so packprop allows no rounding.
        """
        if layout.axis is None:
            return product.abs(), 0.0
        rows, fed, digits = layout.to_front(product), fed.to(product.device), torch.finfo(product.dtype).eps
        if digits > FEW_DIGITS:
            return rows[~fed].abs(), 0.0
        largest = as_matrix(rows[fed].abs().nan_to_num(0.0)).amax(1)
        curved = largest[largest > 0]  # the median of samples: one of huge curvature hides nothing
        return rows[~fed].abs(), 16 * digits * float(curved.median()) if curved.numel() else 0.0

    def _mixed(self, nodes: Sequence[Node]) -> PackpropError:
        if is_from_outside(nodes[0]):
            return PackpropError(
                self.graph.asked,
                self.name or f"{nodes[0].name()}, in arithmetic on the loss or on the model's output",
                "it mixes the samples, or packprop cannot tell that it does not: it is a function of your own "
                "that makes one number of several samples, and PyTorch has no second derivative of it here",
                "let it return one value for each sample, and add these up. If it is a sum of one term for "
                "each sample, register the loss module that calls it (packprop.register_loss), and extend it",
            )
        if self.name:
            return PackpropError(
                self.graph.asked,
                self.name,
                "it mixes the samples: the gradient at the output of one sample depends on the outputs of "
                "others, so no row belongs to one sample",
                "use a loss that is a sum or mean of one term for each sample. Apply nonlinear functions to "
                "each term, not to their sum. For pairs or triplets, give them an axis of their own, "
                "[n, 2, d], or name the pair of each row with packprop.record(documents=pairs) around the call",
            )
        return PackpropError(
            self.graph.asked,
            f"{nodes[0].name()}, in arithmetic on the loss or on the model's output",
            "it mixes the samples: this function is not linear in a number that several samples contribute "
            "to. The gradient of one sample would depend on the others, so no row belongs to one sample",
            "for loss ** 2, use 2 * loss.detach() * loss, which has the same gradient. For a maximum, index "
            "the entries. For a function of each sample's loss, use reduction='none', apply it, then sum. For "
            "pairs or triplets, compare rows of several calls of the model, or of an axis of their own, "
            "[n, 2, d]; or name the pair of each row with packprop.record(documents=pairs) around an extended "
            "loss module. Or ask for DiagHessian or HMP alone",
        )
