"""The forward pass: marks at losses and at the outputs of models, and hooks."""

from packprop.engine.recording import switch
from packprop.engine.recording.marks import (
    AXIS,
    EXTENDED,
    ForwardCall,
    RecordedLoss,
    Walks,
    graph_is_kept,
    marks_of,
    nodes_above,
)
from packprop.engine.recording.recorder import is_running
from packprop.engine.recording.switch import (
    declared_around,
    disable,
    extend,
    extended,
    is_recording_disabled,
    put_hooks,
    record,
)
from packprop.engine.recording.unchanged import SameForEachPass, unchanged

__all__ = [
    "AXIS",
    "EXTENDED",
    "ForwardCall",
    "RecordedLoss",
    "SameForEachPass",
    "Walks",
    "declared_around",
    "disable",
    "extend",
    "extended",
    "graph_is_kept",
    "is_recording_disabled",
    "is_running",
    "marks_of",
    "nodes_above",
    "put_hooks",
    "record",
    "switch",
    "unchanged",
]
