"""Checkpoints in Hugging Face's form: reading, quantising, writing and swapping them, without torch.

    with Checkpoint(folder) as ckpt:                                  # checked when it is opened, headers only
        params = load_moe_layer(ckpt, 0, sharding=NamedSharding(mesh, P("ep")))        # low-bit weights stay low-bit
        online = load_moe_layer(ckpt, 0, quant="nvfp4_online")        # quantised on the device, a few experts at a time
        weights = load_weights(ckpt)                                  # the whole model
    weights = reload(weights, other_folder)                           # new values, same buffers, no new trace
    quantize_folder(folder, out, format="nvfp4")                      # also `jmoe quantize`

What can be wrong with a folder is a `CheckpointError`, a ValueError that names file and key.
"""

from .calibrate import calibrate
from .draft import draft_format, share_workspace
from .errors import CheckpointError
from .folder import Checkpoint, MemoryCheckpoint
from .load import load_moe_layer, load_moe_layers, read_rest
from .online import ONLINE, resolve_quant
from .reload import LiveWeights, LoadOptions, MetadataChangedError, Weights, check_metadata, load_weights, reload
from .safetensors import SafetensorsFile, TensorInfo, write_safetensors
from .save import FORMATS, quantize_folder, save_checkpoint
from .schemes import KINDS

__all__ = [
    "FORMATS",
    "KINDS",
    "ONLINE",
    "Checkpoint",
    "CheckpointError",
    "LiveWeights",
    "LoadOptions",
    "MemoryCheckpoint",
    "MetadataChangedError",
    "SafetensorsFile",
    "TensorInfo",
    "Weights",
    "calibrate",
    "check_metadata",
    "draft_format",
    "load_moe_layer",
    "load_moe_layers",
    "load_weights",
    "quantize_folder",
    "read_rest",
    "reload",
    "resolve_quant",
    "save_checkpoint",
    "share_workspace",
    "write_safetensors",
]
