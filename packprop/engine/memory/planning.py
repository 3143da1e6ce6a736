"""Plans: for a step, for a batch of a data set, for a pass after its forward part."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from packprop.engine.algebra.choices import CHOICES, forced_algorithm
from packprop.engine.graph.graph import Graph
from packprop.engine.memory.dry_run import DryRun, Forward, PlannedStep, copy_without_data
from packprop.engine.memory.mesh import mesh_of, require_not_sharded_yet
from packprop.engine.memory.plan import (
    ASKED,
    RESULTS_BEFORE,
    Plan,
    gradients_are_there,
    inputs_of,
    leaf_shapes,
    options_of,
)
from packprop.engine.memory.search import budget_of, choose_plan
from packprop.engine.passes.chunks import ChunkSizes, default_chunk_sizes
from packprop.engine.recording.marks import LOSS, marks_of, nodes_above
from packprop.engine.recording.recorder import mark_loss
from packprop.engine.recording.switch import OwnLoss, put_hooks, record
from packprop.engine.tensors.autocast import AutocastRegions
from packprop.engine.tensors.calling import (
    LABELS,
    LossFunction,
    inputs_and_targets,
    outputs_and_loss,
    require_graphs,
    require_loss,
    require_model,
)
from packprop.engine.tensors.device import keep_freed_pages
from packprop.engine.tensors.dry import TensorSpec
from packprop.engine.tensors.nesting import map_tensors, tensors_in
from packprop.engine.tensors.state import storage_of
from packprop.errors import BadInput
from packprop.types import Extension, Extensions, check_extensions


def plan(
    model: nn.Module,
    loss: LossFunction | None,
    batch: Any,
    extensions: Extensions,
    *more: Extension,
    memory: int | str | None = None,
    device: torch.device | str | None = None,
    gradients: bool = True,
    freed: bool = False,
    accumulated: bool = False,
    mesh_shape: int | Sequence[int] | None = None,
    units: Iterable[type[nn.Module]] | None = None,
) -> Plan:
    """Plan the memory of one step with extensions, and the chunks that keep it inside a budget.

    ``plan`` allocates nothing and changes nothing in the model: it copies the model without its data. The model
    may itself have none (``with torch.device("meta"):``), and ``device`` may be one that you do not have.

    Args:
        model: Any module.
        loss: Loss module or function, called as ``loss(outputs, targets)``; ``None`` if the model computes the
            loss, as for ``compute``.
        batch: Inputs (a tensor, a tuple or a mapping of arguments) and targets, or a batch in another form that
            ``compute`` takes; its data do not matter.
        extensions: An instance from ``packprop.extensions``, or a list of instances.
        more: More instances, if you give them one by one.
        memory: The most bytes of tensor storage that may be alive at once (``"600MiB"``, a number), including
            parameters, activations and results; ``None`` plans the default chunks, without a budget.
        device: The device of the step; by default that of the parameters.
        gradients: Says that the step also computes ``.grad``, as ``backward()`` does; ``compute`` does not.
        freed: Says that an extension hook removes the values of each parameter as soon as they are saved.
        accumulated: Says that ``.grad`` holds gradients when a step begins: you add up gradients
            over several passes, or zero them by ``zero_grad(set_to_none=False)``.
        mesh_shape: The devices that ``fully_shard`` shards the model over, as for ``init_device_mesh``: shards,
            or copies and shards. The plan is then that of one device, for its own batch; NOTE [Planned shards]
            says what it counts. It needs no process group.
        units: Classes of the modules that ``fully_shard`` is called on, besides the model itself; by default
            the entries of every ``nn.ModuleList``.

    Raises:
        BadInput: For an argument of another kind, such as a class in place of an extension; if no choice of
            chunks fits the budget; for a model that ``fully_shard`` was called on already.
        PackpropError: If the forward pass depends on values of data, in its choices or shapes.
    """
    require_graphs(ASKED)
    require_model(ASKED, model)
    require_loss(ASKED, loss)
    chosen = check_extensions(ASKED, extensions, *more)
    budget, mesh = budget_of(memory), mesh_of(ASKED, mesh_shape, units)
    require_not_sharded_yet(ASKED, model)
    parameter = next(model.parameters(), None)
    own_device = parameter.device if parameter is not None else torch.device("cpu")
    target_device = torch.device(device) if device is not None else own_device
    forward = _forward_of(model, loss, batch)
    step = PlannedStep(model, forward, chosen, target_device, gradients, freed, accumulated, mesh)
    return choose_plan(step, budget)


def _forward_of(model: nn.Module, loss: LossFunction | None, batch: Any) -> Forward:
    """Return the forward pass of a step, from a copy of the model to the loss.

    Raises:
        BadInput: For a batch in which the targets cannot be told from the inputs.
    """
    split = inputs_and_targets(batch, whole=loss is None)
    if split is None:
        raise BadInput(
            ASKED,
            f"batch of type {type(batch).__name__}",
            "it is neither a pair (inputs, targets) nor a mapping with labels",
            f"give such a batch: (inputs, targets), or a mapping with the targets as {LABELS!r}",
        )
    inputs, targets = split
    alive: list[Any] = []  # until the pass is over, as you hold your loss: a pass looks at all extended modules

    def forward(copied: nn.Module, fake: Callable[[Any], Any]) -> Tensor:
        alive.clear()
        given = fake(map_tensors(TensorSpec.of, inputs))
        target = fake(map_tensors(TensorSpec.of, targets))
        put_hooks(copied)
        copied_loss = loss
        if isinstance(loss, nn.Module):
            copied_loss = copy_without_data(loss, fake, [(model, copied)])
        alive.append(copied_loss)
        with record():
            return outputs_and_loss(ASKED, copied, copied_loss, given, target)[1]

    return forward


def step_over_data(
    model: nn.Module,
    loss: LossFunction | None,
    batch: tuple[Any, Any],
    extensions: Sequence[Extension],
    device: torch.device | str,
) -> PlannedStep:
    """Return the pass over a batch whose results merge into those of earlier batches, as a planned step."""
    forward = _forward_of(model, loss, batch[0] if loss is None else batch)
    accumulated = gradients_are_there(model.parameters())
    place = torch.device(device)
    return PlannedStep(model, forward, tuple(extensions), place, gradients=False, accumulated=accumulated)


def chunk_sizes_over_data(step: PlannedStep, memory: int | str | None) -> ChunkSizes:
    """Choose the chunk sizes for a batch of a data set: by a plan under a budget, else the default ones."""
    budget = budget_of(memory)
    if budget is None:
        keep_freed_pages()
        return default_chunk_sizes(step.device)
    require_not_sharded_yet(ASKED, step.model)
    return choose_plan(step, budget, _beside_results_before).chunk_sizes


def plan_over_data(step: PlannedStep, chunk_sizes: ChunkSizes, memory: int | str | None) -> Plan:
    """Plan the pass over a batch of a data set, with known chunk sizes.

    Under a budget, its peak includes the results of earlier batches, which stay in memory throughout.

    Raises:
        PackpropError: If the forward pass depends on values of data, in its choices or shapes.
    """
    budget = budget_of(memory)
    found = DryRun(step, chunk_sizes).run(budget)
    return found if budget is None else _beside_results_before(found)


def _beside_results_before(plan: Plan) -> Plan:
    return plan.beside(RESULTS_BEFORE, plan.results)


def plan_again(graph: Graph, extensions: Sequence[Extension], budget: int | None) -> Plan:
    """Plan a pass after its forward part: run the model once more, without data.

    Raises:
        BadInput: If the pass is not one call of one model followed by one loss; if its inputs are in containers
            of other classes than tuple, list and dictionary; or if no choice of chunks fits.
    """
    calls = [forward for forward in graph.forwards if forward.has_parameters]
    model = calls[0].module() if len(calls) == 1 else None
    alone = len(graph.losses) == len(graph.roots) == 1
    if model is None or not alone:
        raise BadInput(
            "backpack(memory=...) was entered.",
            f"a backward pass through {len(calls)} calls of models and {len(graph.losses)} recorded losses",
            "a budget alone suffices for one call of one model followed by one loss",
            "make a plan of the step, packprop.plan(...), and give that as memory",
        )
    args, kwargs, autocast = calls[0].args, calls[0].kwargs, calls[0].autocast
    if args is None:
        raise BadInput(
            "backpack(memory=...) was entered.",
            f"the inputs of {type(model).__name__}",
            "a budget alone suffices for tensors and plain values in tuples, lists and dictionaries: packprop "
            "copies no other container in your forward pass",
            "make a plan of the step, packprop.plan(...), and give that as memory",
        )
    call = graph.losses[0].call
    loss_args, loss_kwargs = map_tensors(TensorSpec.of, (call.args, call.kwargs))

    model_outputs = {edge.node for edge, forward, _ in graph.outputs if forward.has_parameters}
    returns_loss = graph.roots[0].grad_fn in model_outputs
    entrance, nearest = graph.losses[0].entrance, call.edge.node
    between = set() if nearest in model_outputs else set(nodes_above([nearest], model_outputs))
    link = entrance.rule.link if entrance.made is not None and entrance.made.node in between else None

    alive: list[Any] = []  # as you hold your loss

    def forward(copied: nn.Module, fake: Callable[[Any], Any]) -> Tensor:
        given, named = fake(args), fake(kwargs)
        function = call.function
        if isinstance(function, OwnLoss):  # the call must not change it
            function = OwnLoss(copy_without_data(function.module, fake, [(model, copied)]))
        alive[:] = [function]
        others = fake(loss_args[1:])
        options = fake({name: value for name, value in loss_kwargs.items() if name != "input"})
        with record(), AutocastRegions.now().switched(False), autocast.switched(True):
            outputs = list(tensors_in(copied(*given, **named)))
            if returns_loss:
                return next(t for t in outputs if t.shape == graph.roots[0].shape and t.requires_grad)
            shape = fake(call.shape)
            output = next(t for t in outputs if t.numel() == shape.numel()).reshape(shape)
            if link is not None:
                output = link.function(output, entrance.rule.class_axis)
            given = (output, *others) if loss_args else ()
            named = options if loss_args else {**options, "input": output}
            value = function(*given, **named)
        if value.grad_fn is not None and LOSS not in marks_of(value.grad_fn):  # your own losses run unrecorded
            mark_loss(function, given, named, value, call.declared)
        total: Tensor = value.sum()
        return total

    unseen = 0
    if not returns_loss:  # forward and back, each as large as the loss's input; the dry run runs the link
        tensors = 2 * (len(between) - (link is not None))
        unseen = tensors * call.input.nbytes
    leaves = graph.leaves()
    step = PlannedStep(
        model,
        forward,
        tuple(extensions),
        leaves[0].device,
        gradients=True,
        accumulated=gradients_are_there(leaves),
        retains_graph=graph.kept,
    )
    others = bytes_of_others(graph, extensions)
    return choose_plan(
        step,
        budget,
        lambda plan: plan.beside("between model and loss", unseen).beside("results of other passes", others),
    )


def bytes_of_others(graph: Graph, extensions: Sequence[Extension]) -> int:
    """Return the bytes of tensors kept on parameters, beside gradients and the results of these extensions."""
    parameters = [parameter for module in graph.modules for parameter in module.parameters()]
    own = {extension.savefield for extension in extensions}
    kept = tensors_in([value for each in parameters for name, value in vars(each).items() if name not in own])
    sizes = {storage_of(each): each.untyped_storage().nbytes() for each in kept if storage_of(each)}
    for each in parameters:
        for tensor in (each, each.grad):
            sizes.pop(0 if tensor is None else storage_of(tensor), None)
    return sum(sizes.values())


def chunk_sizes_of_pass(graph: Graph, extensions: Sequence[Extension], budget: int) -> ChunkSizes:
    """Return the chunk sizes of ``plan_again``, found once for passes of equal structure and shapes.

    Raises:
        BadInput: For a model that was not extended; and as ``plan_again`` does.
    """
    if not graph.modules:
        raise BadInput(
            "backpack(memory=...) was entered.",
            "a backward pass through a model that was not extended",
            "packprop plans for a budget by one more call of the model, and it knows only extended models",
            "packprop.extend(model) before its forward pass; or make a plan of the step, packprop.plan(...), "
            "and give that as memory",
        )
    known = _CHOSEN.setdefault(graph.modules[0], {})
    asked = tuple((type(extension), options_of(extension)) for extension in extensions)
    forced = tuple(map(forced_algorithm, CHOICES))
    given = [
        (t.shape, t.dtype) for loss in graph.losses for t in tensors_in((loss.call.args, loss.call.kwargs))
    ]
    taken = tuple(inputs_of(graph).items()), tuple(given), tuple(use.recomputed for use in graph.uses)
    before = gradients_are_there(graph.leaves())
    others = bytes_of_others(graph, extensions)
    key = (graph.signature, leaf_shapes(graph), asked, budget, forced, before, graph.kept, taken, others)
    if key not in known:
        known[key] = plan_again(graph, extensions, budget).chunk_sizes
    return known[key]


_CHOSEN: weakref.WeakKeyDictionary[nn.Module, dict[Any, ChunkSizes]] = weakref.WeakKeyDictionary()
"""Chunk sizes that were found for passes of a model."""
