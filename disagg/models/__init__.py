"""Models as the state that their requests leave, and the memory that a rank allocates for it.

    spec = load_model("config.json")
    pools = allocate(spec, topology, PoolShape(num_pages=4096))

`pools.components` are the components for a manager.
"""

from disagg.models.describe import from_config
from disagg.models.pools import LayerCut, PoolLayout, PoolShape, PoolUse, StagePools, allocate, lay_out
from disagg.models.presets import PRESETS, load_model
from disagg.models.spec import ModelSpec, first_layers
from disagg.models.stages import Stage, split_layers, stage_of
from disagg.state.declare import State

__all__ = [
    "PRESETS",
    "LayerCut",
    "ModelSpec",
    "PoolLayout",
    "PoolShape",
    "PoolUse",
    "Stage",
    "StagePools",
    "State",
    "allocate",
    "first_layers",
    "from_config",
    "lay_out",
    "load_model",
    "split_layers",
    "stage_of",
]
