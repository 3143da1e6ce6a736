"""The documented names of BackPACK's modules, and their counterparts here; see docs/compat.md."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import fx, nn

from packprop import examples
from packprop.compat import context, helpers, hessianfree, options, own, saved_quantities
from packprop.compat.calls import TRANSPARENT, is_loss_class
from packprop.compat.custom_module.branching import Branch, Parallel, SumModule
from packprop.compat.custom_module.pad import Pad
from packprop.compat.custom_module.permute import Permute
from packprop.compat.custom_module.reduce_tuple import ReduceTuple
from packprop.compat.custom_module.scale_module import ScaleModule
from packprop.compat.custom_module.slicing import Slicing


class BackpackTracer(fx.Tracer):
    """A tracer that takes the modules of ``packprop.custom_module`` as they are."""

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        """Tell whether the tracer takes a module as it is."""
        own_modules = (Branch, Pad, Permute, ReduceTuple, ScaleModule, Slicing, SumModule)
        return isinstance(m, own_modules) or super().is_leaf_module(m, module_qualified_name)


def is_loss(module: nn.Module) -> bool:
    """Tell whether a module is one of torch's losses."""
    return is_loss_class(type(module))


def is_nll(module: nn.Module) -> bool:
    """Tell whether a module is a loss whose Monte Carlo draws BackPACK knows."""
    return isinstance(module, (nn.MSELoss, nn.CrossEntropyLoss, nn.BCEWithLogitsLoss))


def is_no_op(module: nn.Module) -> bool:
    """Tell whether a module only passes tensors on, so that extensions for modules do not see it."""
    return isinstance(module, TRANSPARENT)


@dataclass(frozen=True)
class Catalogue:
    """An extension of the catalogue, looked up on access."""

    name: str


FIRST_ORDER = ("BatchGrad", "BatchL2Grad", "SumGradSquared", "Variance")
DIAG_GGN = ("BatchDiagGGNExact", "BatchDiagGGNMC", "DiagGGNExact", "DiagGGNMC")
DIAG_HESSIAN = ("BatchDiagHessian", "DiagHessian")
KRONECKER = ("HBP", "KFAC", "KFLR", "KFRA")
SQRT_GGN = ("SqrtGGNExact", "SqrtGGNMC")
PRODUCTS = ("GGNMP", "HMP", "PCHMP")
SECOND_ORDER = (*DIAG_GGN, *DIAG_HESSIAN, *KRONECKER, *SQRT_GGN)


def _catalogue(*names: str) -> dict[str, Any]:
    return {name: Catalogue(name) for name in names}


def _named(owner: Any, *names: str) -> dict[str, Any]:
    return {name: getattr(owner, name) for name in names}


_STRATEGIES = _named(options, "BackpropStrategy", "ExpectationApproximation", "LossHessianStrategy")
_FAIL_MODES = _named(own, "FAIL_ERROR", "FAIL_SILENT", "FAIL_WARN")

TABLE: Mapping[str, Mapping[str, Any]] = {
    "backpack": {
        **_named(
            context, "CTX", "backpack", "convert_module_to_backpack", "disable", "extend", "memory_cleanup"
        ),
        "BackpropExtension": own.BackpropExtension,
        "is_no_op": is_no_op,
        "no_op": context.no_op,
    },
    "backpack.context": _named(context, "CTX"),
    "backpack.core": {},
    "backpack.core.derivatives": {},
    "backpack.core.derivatives.convnd": _named(options, "weight_jac_t_save_memory"),
    "backpack.custom_module": {},
    "backpack.custom_module.branching": {"Parallel": Parallel, "SumModule": SumModule, "_Branch": Branch},
    "backpack.custom_module.graph_utils": {
        "BackpackTracer": BackpackTracer,
        "convert_module_to_backpack": context.convert_module_to_backpack,
    },
    "backpack.custom_module.pad": {"Pad": Pad},
    "backpack.custom_module.permute": {"Permute": Permute},
    "backpack.custom_module.reduce_tuple": {"ReduceTuple": ReduceTuple},
    "backpack.custom_module.scale_module": {"ScaleModule": ScaleModule},
    "backpack.custom_module.slicing": {"Slicing": Slicing},
    "backpack.extensions": _catalogue(*FIRST_ORDER, *SECOND_ORDER, *PRODUCTS),
    "backpack.extensions.backprop_extension": {"BackpropExtension": own.BackpropExtension, **_FAIL_MODES},
    "backpack.extensions.curvature": _named(options, "Curvature", "ResidualModifications"),
    "backpack.extensions.curvmatprod": _catalogue(*PRODUCTS),
    "backpack.extensions.curvmatprod.ggnmp": _catalogue("GGNMP"),
    "backpack.extensions.curvmatprod.hmp": _catalogue("HMP"),
    "backpack.extensions.curvmatprod.pchmp": _catalogue("PCHMP"),
    "backpack.extensions.firstorder": _catalogue(*FIRST_ORDER),
    "backpack.extensions.firstorder.base": _named(
        own, "FirstOrderBackpropExtension", "FirstOrderModuleExtension"
    ),
    "backpack.extensions.firstorder.batch_grad": _catalogue("BatchGrad"),
    "backpack.extensions.firstorder.batch_l2_grad": _catalogue("BatchL2Grad"),
    "backpack.extensions.firstorder.sum_grad_squared": _catalogue("SumGradSquared"),
    "backpack.extensions.firstorder.variance": _catalogue("Variance"),
    "backpack.extensions.module_extension": _named(own, "ModuleExtension"),
    "backpack.extensions.saved_quantities": _named(saved_quantities, "SavedQuantities"),
    "backpack.extensions.secondorder": _catalogue(*SECOND_ORDER),
    "backpack.extensions.secondorder.base": _named(own, "SecondOrderBackpropExtension"),
    "backpack.extensions.secondorder.diag_ggn": _catalogue(*DIAG_GGN),
    "backpack.extensions.secondorder.diag_hessian": _catalogue(*DIAG_HESSIAN),
    "backpack.extensions.secondorder.hbp": {**_catalogue(*KRONECKER), **_STRATEGIES},
    "backpack.extensions.secondorder.hbp.hbp_options": _STRATEGIES,
    "backpack.extensions.secondorder.sqrt_ggn": _catalogue(*SQRT_GGN),
    "backpack.hessianfree": {},
    "backpack.hessianfree.ggnvp": _named(hessianfree, "ggn_vector_product", "ggn_vector_product_from_plist"),
    "backpack.hessianfree.hvp": _named(hessianfree, "hessian_vector_product"),
    "backpack.hessianfree.lop": _named(hessianfree, "L_op", "transposed_jacobian_vector_product"),
    "backpack.hessianfree.rop": _named(hessianfree, "R_op", "jacobian_vector_product"),
    "backpack.utils": {},
    "backpack.utils.convert_parameters": _named(helpers, "vector_to_parameter_list"),
    "backpack.utils.examples": {
        "autograd_diag_ggn_exact": helpers.autograd_diag_ggn_exact,
        "get_mnist_dataloader": examples.mnist_loader,
        "load_mnist_dataset": helpers.load_mnist_dataset,
        "load_one_batch_mnist": examples.load_one_batch_mnist,
    },
    "backpack.utils.hooks": {"no_op": context.no_op},
    "backpack.utils.kroneckers": _named(
        helpers,
        *("apply_inv_kfac_mat_prod", "apply_kfac_mat_prod", "inv_kfac_mat_prod", "inv_kfacs"),
        *("is_matrix", "is_vector", "kfac_mat_prod", "kfacs_to_mat", "two_kfacs_to_mat"),
    ),
    "backpack.utils.module_classification": {"is_loss": is_loss, "is_nll": is_nll, "is_no_op": is_no_op},
    "backpack.utils.subsampling": _named(context, "subsample"),
}
"""For each module and name, the object or ``Catalogue`` entry that it stands for."""
