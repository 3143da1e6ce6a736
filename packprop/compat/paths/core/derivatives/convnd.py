"""The older library's switch between algorithms for convolutions; see ``packprop.algorithms``."""

from packprop.compat.options import weight_jac_t_save_memory

__all__ = ["weight_jac_t_save_memory"]
