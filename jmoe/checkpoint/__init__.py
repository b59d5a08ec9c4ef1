"""Checkpoints in Hugging Face's form: reading, quantising, writing and swapping them, without torch."""

from .calibrate import calibrate
from .errors import CheckpointError
from .folder import Checkpoint, MemoryCheckpoint
from .load import load_moe_layer, load_moe_layers, read_rest
from .online import ONLINE, resolve_quant
from .safetensors import SafetensorsFile, TensorInfo, write_safetensors
from .save import FORMATS, quantize_folder, save_checkpoint
from .schemes import KINDS

__all__ = [
    "FORMATS",
    "KINDS",
    "ONLINE",
    "Checkpoint",
    "CheckpointError",
    "MemoryCheckpoint",
    "SafetensorsFile",
    "TensorInfo",
    "calibrate",
    "load_moe_layer",
    "load_moe_layers",
    "quantize_folder",
    "read_rest",
    "resolve_quant",
    "save_checkpoint",
    "write_safetensors",
]
