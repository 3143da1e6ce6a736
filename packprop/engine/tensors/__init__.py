"""Facts about tensors that need no computation: their samples, precision, device, state."""

from packprop.engine.tensors.calling import (
    LABELS,
    LossFunction,
    call,
    class_words,
    inputs_and_targets,
    outputs_and_loss,
    require_loss,
    require_model,
)
from packprop.engine.tensors.device import allocated_bytes, free_bytes
from packprop.engine.tensors.dry import has_fault
from packprop.engine.tensors.hooks import has_late_hooks, is_hooked
from packprop.engine.tensors.layout import Layout, possible_layouts
from packprop.engine.tensors.long_work import doing, expect, waiting
from packprop.engine.tensors.names import PARALLEL, named_buffers, named_modules, named_parameters
from packprop.engine.tensors.nesting import PLAIN, attributes_of, cells, map_instances, map_tensors, tensors_in
from packprop.engine.tensors.plain_text import plain_text
from packprop.engine.tensors.precision import accumulation_dtype, at_least, result_dtype, wider_dtype
from packprop.engine.tensors.random import random_numbers_from, random_states, set_random_states
from packprop.engine.tensors.sharding import (
    abandon_forward,
    class_before_sharding,
    coming_to_units,
    has_sharded_units,
    is_distributed,
    is_fully_sharded_before,
    own_part,
    part_like,
    placed_where,
    replicated_like,
    reshard,
    whole_from,
    whole_tensor,
)
from packprop.engine.tensors.state import storage_of, version
from packprop.engine.tensors.traced import (
    Decisions,
    NotTraceable,
    is_traced,
    not_traceable,
    noting_decisions,
    traced,
)

__all__ = [
    "LABELS",
    "PARALLEL",
    "PLAIN",
    "Decisions",
    "Layout",
    "LossFunction",
    "NotTraceable",
    "abandon_forward",
    "accumulation_dtype",
    "allocated_bytes",
    "at_least",
    "attributes_of",
    "call",
    "cells",
    "class_before_sharding",
    "class_words",
    "coming_to_units",
    "doing",
    "expect",
    "free_bytes",
    "has_fault",
    "has_late_hooks",
    "has_sharded_units",
    "inputs_and_targets",
    "is_distributed",
    "is_fully_sharded_before",
    "is_hooked",
    "is_traced",
    "map_instances",
    "map_tensors",
    "named_buffers",
    "named_modules",
    "named_parameters",
    "not_traceable",
    "noting_decisions",
    "outputs_and_loss",
    "own_part",
    "part_like",
    "placed_where",
    "plain_text",
    "possible_layouts",
    "random_numbers_from",
    "random_states",
    "replicated_like",
    "require_loss",
    "require_model",
    "reshard",
    "result_dtype",
    "set_random_states",
    "storage_of",
    "tensors_in",
    "traced",
    "version",
    "waiting",
    "whole_from",
    "whole_tensor",
    "wider_dtype",
]
