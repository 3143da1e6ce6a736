"""Several processes: values of the samples of all ranks, and how packprop puts them together."""

from packprop.engine.distributed.joint import JointPass as JointPass
from packprop.engine.distributed.merging import arrive as arrive
from packprop.engine.distributed.merging import exchanged as exchanged
from packprop.engine.distributed.merging import merge_over_ranks as merge_over_ranks
from packprop.engine.distributed.merging import merged_in_turn as merged_in_turn
from packprop.engine.distributed.residence import require_sharded as require_sharded
from packprop.engine.distributed.residence import swept as swept
from packprop.engine.distributed.statement import AllRanks as AllRanks
from packprop.engine.distributed.statement import ranks_of as ranks_of
