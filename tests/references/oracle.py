"""What every number should be: loops over samples and columns, plain autograd, float64.

Nothing here knows packprop. Each sample is pushed through the model alone, so per-sample quantities
need no trick: they are gradients, Jacobians and Hessians of one-sample functions.

Axis letters: ``n`` sample, ``c`` loss input of one sample (flattened), ``p`` parameter entry.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

Named = dict[str, Tensor]


@dataclass(frozen=True)
class Problem:
    """A model, a loss and data, cut into one-sample functions.

    Attributes:
        model: the model, already in the wanted dtype.
        loss: the loss module(s), already with the wanted reduction.
        inputs: the whole batch of inputs.
        targets: the whole batch of targets.
        size: number of samples N.
        total: the whole loss, as a user writes it.
        output: ``n -> f_n``, what the loss function receives for sample n alone.
        term: ``(f_n, n) -> scalar``, the share of sample n in the whole loss.
    """

    model: nn.Module
    loss: Any
    inputs: Any
    targets: Any
    size: int
    total: Callable[[], Tensor]
    output: Callable[[int], Tensor]
    term: Callable[[Tensor, int], Tensor]

    @classmethod
    def of_batch(cls, model: nn.Module, loss: Any, inputs: Tensor, targets: Tensor, divisor: int) -> Problem:
        """A model of one tensor, under one loss that divides the sum over samples by ``divisor``."""
        return cls(
            model,
            loss,
            inputs,
            targets,
            len(targets),
            total=lambda: loss(model(inputs), targets),
            output=lambda n: model(inputs[n : n + 1]),
            term=lambda f, n: loss(f, targets[n : n + 1]) / divisor,
        )

    @property
    def parameters(self) -> dict[str, nn.Parameter]:
        """The trainable parameters by name, each once."""
        return {k: p for k, p in self.model.named_parameters() if p.requires_grad}


@dataclass(frozen=True)
class Oracle:
    """Every reference quantity of a problem, computed when it is asked for.

    With ``create_graph`` the results can be differentiated with respect to the parameters.
    """

    problem: Problem
    create_graph: bool = False

    @cached_property
    def _parameters(self) -> list[nn.Parameter]:
        return list(self.problem.parameters.values())

    def _gradient(self, scalar: Tensor) -> list[Tensor]:
        return list(
            torch.autograd.grad(
                scalar,
                self._parameters,
                retain_graph=True,
                create_graph=self.create_graph,
                allow_unused=True,
                materialize_grads=True,
            )
        )

    def _named(self, tensors: list[Tensor]) -> Named:
        return dict(zip(self.problem.parameters, tensors, strict=True))

    @cached_property
    def whole_gradient(self) -> Named:
        """The gradient of the whole loss ``[*p]``, by one ordinary backward pass."""
        parameters = self.problem.parameters
        self.problem.total().backward()
        gradients = {k: torch.zeros_like(p) if p.grad is None else p.grad for k, p in parameters.items()}
        for parameter in parameters.values():
            parameter.grad = None
        return gradients

    @cached_property
    def grad_batch(self) -> Named:
        """The gradient of each sample's share of the loss ``[N, *p]``."""
        rows = [self._gradient(self.problem.term(self.problem.output(n), n)) for n in range(self.problem.size)]
        return self._named([torch.stack(column) for column in zip(*rows, strict=True)])

    @cached_property
    def batch_l2(self) -> Named:
        """Squared norms of the rows ``[N]``."""
        return {k: g.square().sum(1) for k, g in self._flat_rows().items()}

    @cached_property
    def sum_grad_squared(self) -> Named:
        """Sum over the rows of their squares ``[*p]``."""
        return {k: g.square().sum(0) for k, g in self.grad_batch.items()}

    @cached_property
    def variance(self) -> Named:
        """Population variance over the rows ``[*p]``."""
        return {k: g.var(0, correction=0) for k, g in self.grad_batch.items()}

    @cached_property
    def batch_dot(self) -> Named:
        """Inner products of the rows ``[N, N]``."""
        return {k: g @ g.T for k, g in self._flat_rows().items()}

    def _flat_rows(self) -> Named:
        return {k: g.reshape(len(g), -1) for k, g in self.grad_batch.items()}

    def loss_hessian(self, output: Tensor, n: int) -> Tensor:
        """The Hessian of the share of sample n with respect to its loss input ``[c, c]``."""
        return torch.autograd.functional.hessian(
            lambda flat: self.problem.term(flat.view_as(output), n),
            output.flatten(),
            create_graph=self.create_graph,
        )

    @cached_property
    def jacobians(self) -> list[Tensor]:
        """The Jacobian of each sample's loss input, parameters side by side: N of ``[c, P]``."""
        return [
            torch.stack(
                [
                    torch.cat([g.flatten() for g in self._gradient(entry)])
                    for entry in self.problem.output(n).flatten()
                ]
            )
            for n in range(self.problem.size)
        ]

    @cached_property
    def hessians(self) -> list[Tensor]:
        """The loss Hessian of each sample: N of ``[c, c]``."""
        return [self.loss_hessian(self.problem.output(n), n) for n in range(self.problem.size)]

    @cached_property
    def ggn_batch(self) -> Tensor:
        """Each sample's dense GGN over all parameters side by side ``[N, P, P]``."""
        pairs = zip(self.jacobians, self.hessians, strict=True)
        return torch.stack([jacobian.T @ hessian @ jacobian for jacobian, hessian in pairs])

    @cached_property
    def slices(self) -> dict[str, slice]:
        """Where each parameter stands in the axis ``P`` of `ggn_batch`."""
        found, start = {}, 0
        for name, parameter in self.problem.parameters.items():
            found[name] = slice(start, start + parameter.numel())
            start += parameter.numel()
        return found

    @cached_property
    def ggn_block(self) -> Named:
        """The dense GGN block of each parameter ``[p, p]``."""
        whole = self.ggn_batch.sum(0)
        return {k: whole[where, where] for k, where in self.slices.items()}

    @cached_property
    def diag_ggn_exact_batch(self) -> Named:
        """Each sample's GGN diagonal ``[N, *p]``."""
        diagonal = self.ggn_batch.diagonal(dim1=1, dim2=2)
        return {
            k: diagonal[:, self.slices[k]].reshape(-1, *p.shape) for k, p in self.problem.parameters.items()
        }

    @cached_property
    def diag_ggn_exact(self) -> Named:
        """The GGN diagonal ``[*p]``."""
        return {k: d.sum(0) for k, d in self.diag_ggn_exact_batch.items()}

    @cached_property
    def diag_h_batch(self) -> Named:
        """The Hessian diagonal of each sample's share of the loss ``[N, *p]``, entry by entry."""
        samples = []
        for n in range(self.problem.size):
            parameters = list(self.problem.parameters.values())
            share = self.problem.term(self.problem.output(n), n)
            slopes = torch.autograd.grad(
                share, parameters, create_graph=True, allow_unused=True, materialize_grads=True
            )
            samples.append(
                [
                    self._second_derivatives(slope, parameter)
                    for slope, parameter in zip(slopes, parameters, strict=True)
                ]
            )
        return self._named([torch.stack(column) for column in zip(*samples, strict=True)])

    def _second_derivatives(self, slope: Tensor, parameter: Tensor) -> Tensor:
        """d slope[j] / d parameter[j] for every entry j."""
        found = torch.zeros_like(parameter)
        if not slope.requires_grad:
            return found
        entries = [
            torch.autograd.grad(
                entry,
                parameter,
                retain_graph=True,
                create_graph=self.create_graph,
                allow_unused=True,
                materialize_grads=True,
            )[0].flatten()[j]
            for j, entry in enumerate(slope.flatten())
        ]
        return torch.stack(entries).view_as(parameter)

    @cached_property
    def diag_h(self) -> Named:
        """The Hessian diagonal of the whole loss ``[*p]``."""
        return {k: d.sum(0) for k, d in self.diag_h_batch.items()}

    @cached_property
    def kfac(self) -> dict[str, list[Tensor]]:
        """Expected Kronecker factors of linear and convolution layers that are called once at most.

        Weight ``[B, A]``, bias ``[B]``, with ``A = 1/(N G) sum_n sum_s sum_g x x^T`` for G groups and
        ``B = sum_n E[(sum_s g)(sum_s g)^T]``; the expected outer product of the gradient of a
        sampled loss is the loss Hessian, so ``B = sum_n G_n^T H_n G_n`` with ``G_n [c, o]`` the
        derivative of the loss input with respect to the layer's output, summed over positions.
        Layers with a weight that is not trained are left out.
        """
        calls: dict[nn.Module, list[Tensor]] = {}

        def keep(layer: nn.Module, _: Any, z: Tensor) -> Tensor:
            calls.setdefault(layer, []).append(z)
            return z.clone()  # what comes next may change it in place

        layers = [m for m in self.problem.model.modules() if _has_kronecker_factors(m)]
        handles = [layer.register_forward_hook(keep) for layer in layers]
        factors: dict[nn.Module, list[tuple[Tensor, Tensor] | None]] = {}
        try:
            for n in range(self.problem.size):
                calls.clear()
                output = self.problem.output(n)
                hessian = self.loss_hessian(output, n)
                for layer, outputs in calls.items():
                    pair = self._factors(layer, outputs[0], output, hessian) if len(outputs) == 1 else None
                    factors.setdefault(layer, []).append(pair)
        finally:
            for handle in handles:
                handle.remove()
        result: dict[str, list[Tensor]] = {}
        for name in self.problem.parameters:
            prefix, _, own = name.rpartition(".")
            pairs = factors.get(self.problem.model.get_submodule(prefix))
            if pairs is None or None in pairs:
                continue
            input_factor = torch.stack([a for _, a in pairs]).sum(0) / self.problem.size
            output_factor = torch.stack([b for b, _ in pairs]).sum(0)
            result[name] = [output_factor, input_factor] if own == "weight" else [output_factor]
        return result

    def _factors(
        self, layer: nn.Module, z: Tensor, output: Tensor, hessian: Tensor
    ) -> tuple[Tensor, Tensor] | None:
        """One sample's ``G^T H G [g*o, g*o]`` and ``1/G sum_s sum_g x x^T [i, i]``.

        Nothing where the weight is also used elsewhere: what the layer's own call explains,
        ``sum_s g x^T``, is not all of its gradient then.
        """
        keep = {"retain_graph": True, "create_graph": self.create_graph}
        channel = -1 if isinstance(layer, nn.Linear) else 1
        signals = torch.stack(
            [
                torch.autograd.grad(entry, z, **keep)[0].movedim(channel, 0).flatten(1)
                for entry in output.flatten()
            ]
        )  # [c, g*o, s]
        # The derivative of one entry of a group's first output channel with respect to that channel's weights
        # is the layer's (unfolded) input at that position, whatever padding or stride made it.
        groups = getattr(layer, "groups", 1)
        firsts = range(0, signals.shape[1], signals.shape[1] // groups)
        patches = [
            torch.autograd.grad(entry, layer.weight, **keep)[0][first].flatten()
            for first in firsts
            for entry in z.movedim(channel, 0)[first].flatten()
        ]
        x = torch.stack(patches) if patches else layer.weight.detach()[:0].flatten(1)  # [g*s, i]
        by_group = signals.unflatten(1, (groups, -1)), x.unflatten(0, (groups, -1))
        explained = torch.einsum("cgos,gsi->cgoi", *by_group)
        whole = torch.stack([torch.autograd.grad(entry, layer.weight, **keep)[0] for entry in output.flatten()])
        if not torch.allclose(explained, whole.view_as(explained)):
            return None
        signal = signals.sum(2)
        return signal.T @ hessian @ signal, x.T @ x / groups


def _has_kronecker_factors(module: nn.Module) -> bool:
    # Exact types and a plain weight: a subclass or a parametrised weight is not this layer.
    plain = type(module) in (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d)
    weight = module._parameters.get("weight")
    return plain and weight is not None and weight.requires_grad
