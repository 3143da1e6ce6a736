"""The documented names of BackPACK's modules, and their counterparts here; see docs/compat.md."""

from __future__ import annotations

from collections.abc import Mapping
from types import ModuleType
from typing import Any

from torch import fx, nn

from packprop import examples
from packprop.compat import catalogue, context, helpers, hessianfree, options, own, saved_quantities
from packprop.compat.calls import TRANSPARENT, is_loss_class
from packprop.compat.catalogue import DIAG_GGN, DIAG_HESSIAN, FIRST_ORDER, KRONECKER, PRODUCTS, SQRT_GGN
from packprop.compat.custom_module.branching import Branch, Parallel, SumModule
from packprop.compat.custom_module.pad import Pad
from packprop.compat.custom_module.permute import Permute
from packprop.compat.custom_module.reduce_tuple import ReduceTuple
from packprop.compat.custom_module.scale_module import ScaleModule
from packprop.compat.custom_module.slicing import Slicing


class BackpackTracer(fx.Tracer):
    """A tracer that does not trace into the modules of ``packprop.custom_module``."""

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        """Tell whether the tracer keeps a module whole."""
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


SECOND_ORDER = (*DIAG_GGN, *DIAG_HESSIAN, *KRONECKER, *SQRT_GGN)


def _names(owner: ModuleType, *names: str) -> dict[str, Any]:
    """Return the part of a table that sends these names to their owner."""
    return dict.fromkeys(names, owner)


_STRATEGIES = _names(options, "BackpropStrategy", "ExpectationApproximation", "LossHessianStrategy")

TABLE: Mapping[str, Mapping[str, Any]] = {
    "backpack": {
        **_names(
            context, "CTX", "backpack", "convert_module_to_backpack", "disable", "extend", "memory_cleanup"
        ),
        "BackpropExtension": own.BackpropExtension,
        "is_no_op": is_no_op,
        "no_op": context.no_op,
    },
    "backpack.context": _names(context, "CTX"),
    "backpack.core": {},
    "backpack.core.derivatives": {},
    "backpack.core.derivatives.convnd": _names(options, "weight_jac_t_save_memory"),
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
    "backpack.extensions": _names(catalogue, *FIRST_ORDER, *SECOND_ORDER, *PRODUCTS),
    "backpack.extensions.backprop_extension": _names(
        own, "BackpropExtension", "FAIL_ERROR", "FAIL_SILENT", "FAIL_WARN"
    ),
    "backpack.extensions.curvature": _names(options, "Curvature", "ResidualModifications"),
    "backpack.extensions.curvmatprod": _names(catalogue, *PRODUCTS),
    "backpack.extensions.curvmatprod.ggnmp": _names(catalogue, "GGNMP"),
    "backpack.extensions.curvmatprod.hmp": _names(catalogue, "HMP"),
    "backpack.extensions.curvmatprod.pchmp": _names(catalogue, "PCHMP"),
    "backpack.extensions.firstorder": _names(catalogue, *FIRST_ORDER),
    "backpack.extensions.firstorder.base": _names(
        own, "FirstOrderBackpropExtension", "FirstOrderModuleExtension"
    ),
    "backpack.extensions.firstorder.batch_grad": _names(catalogue, "BatchGrad"),
    "backpack.extensions.firstorder.batch_l2_grad": _names(catalogue, "BatchL2Grad"),
    "backpack.extensions.firstorder.sum_grad_squared": _names(catalogue, "SumGradSquared"),
    "backpack.extensions.firstorder.variance": _names(catalogue, "Variance"),
    "backpack.extensions.module_extension": _names(own, "ModuleExtension"),
    "backpack.extensions.saved_quantities": _names(saved_quantities, "SavedQuantities"),
    "backpack.extensions.secondorder": _names(catalogue, *SECOND_ORDER),
    "backpack.extensions.secondorder.base": _names(own, "SecondOrderBackpropExtension"),
    "backpack.extensions.secondorder.diag_ggn": _names(catalogue, *DIAG_GGN),
    "backpack.extensions.secondorder.diag_hessian": _names(catalogue, *DIAG_HESSIAN),
    "backpack.extensions.secondorder.hbp": {**_names(catalogue, *KRONECKER), **_STRATEGIES},
    "backpack.extensions.secondorder.hbp.hbp_options": _STRATEGIES,
    "backpack.extensions.secondorder.sqrt_ggn": _names(catalogue, *SQRT_GGN),
    "backpack.hessianfree": {},
    "backpack.hessianfree.ggnvp": _names(hessianfree, "ggn_vector_product", "ggn_vector_product_from_plist"),
    "backpack.hessianfree.hvp": _names(hessianfree, "hessian_vector_product"),
    "backpack.hessianfree.lop": _names(hessianfree, "L_op", "transposed_jacobian_vector_product"),
    "backpack.hessianfree.rop": _names(hessianfree, "R_op", "jacobian_vector_product"),
    "backpack.utils": {},
    "backpack.utils.convert_parameters": _names(helpers, "vector_to_parameter_list"),
    "backpack.utils.examples": {
        **_names(helpers, "autograd_diag_ggn_exact", "load_mnist_dataset"),
        "get_mnist_dataloader": examples.mnist_loader,
        "load_one_batch_mnist": examples.load_one_batch_mnist,
    },
    "backpack.utils.hooks": {"no_op": context.no_op},
    "backpack.utils.kroneckers": _names(
        helpers,
        *("apply_inv_kfac_mat_prod", "apply_kfac_mat_prod", "inv_kfac_mat_prod", "inv_kfacs"),
        *("is_matrix", "is_vector", "kfac_mat_prod", "kfacs_to_mat", "two_kfacs_to_mat"),
    ),
    "backpack.utils.module_classification": {"is_loss": is_loss, "is_nll": is_nll, "is_no_op": is_no_op},
    "backpack.utils.subsampling": _names(context, "subsample"),
}
"""For each module and name: the object itself, or the module of packprop that has it under the same name."""
