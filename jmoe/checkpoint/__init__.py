"""Checkpoints in Hugging Face's form: reading, quantising, writing and swapping them, without torch."""

from .errors import CheckpointError
from .folder import Checkpoint, MemoryCheckpoint
from .load import load_moe_layer, load_moe_layers, read_rest
from .safetensors import SafetensorsFile, TensorInfo, write_safetensors
from .schemes import KINDS

__all__ = [
    "KINDS",
    "Checkpoint",
    "CheckpointError",
    "MemoryCheckpoint",
    "SafetensorsFile",
    "TensorInfo",
    "load_moe_layer",
    "load_moe_layers",
    "read_rest",
    "write_safetensors",
]
