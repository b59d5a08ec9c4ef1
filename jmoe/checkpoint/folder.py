"""A checkpoint folder: its configuration, its tensors over all shards, and where each part of the model is."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from jmoe.config import MoEConfig

from .catalog import Catalog, build_catalog
from .errors import CheckpointError, list_keys
from .families import Family, family_of
from .safetensors import DTYPES, SafetensorsFile, TensorInfo, read_json
from .schemes import Scheme, find_scheme

CONFIG, HF_QUANT, INDEX, SINGLE = (
    "config.json",
    "hf_quant_config.json",
    "model.safetensors.index.json",
    "model.safetensors",
)
PROGRESS = "jmoe-progress.json"  # in a folder that is still being written


class Source(Protocol):
    """What the loaders need: a `Checkpoint` folder or a `MemoryCheckpoint`."""

    name: str
    config: dict
    tensors: dict[str, TensorInfo]
    family: Family
    scheme: Scheme
    catalog: Catalog

    def read(self, key: str, index: slice | tuple[slice, ...] = (), *, out: np.ndarray | None = None) -> np.ndarray: ...

    @property
    def moe_config(self) -> MoEConfig: ...


def text_config(config: dict) -> dict:
    """The language model's part of a configuration that may describe more."""
    inner = config.get("text_config")
    if isinstance(inner, dict):
        return {**{k: v for k, v in config.items() if k != "text_config"}, **inner}
    return config


def _shards(folder: Path) -> tuple[dict[str, str] | None, list[str]]:
    """(name -> file of every tensor, or None without an index; the files)."""
    if (folder / SINGLE).exists() or not (folder / INDEX).exists():
        return None, [SINGLE]
    index = read_json(folder / INDEX)
    where, weight_map = folder / INDEX, index.get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError(f"{where}: has no 'weight_map' object that names each tensor's file.")
    for key, name in weight_map.items():
        if not isinstance(name, str) or not name.endswith(".safetensors") or Path(name).name != name or "\0" in name:
            raise CheckpointError(
                f"{where}: {key!r} is said to be in {name!r}; it must be a .safetensors file in the same folder."
            )
    return weight_map, sorted(set(weight_map.values()))


class Checkpoint:
    """A Hugging Face folder, checked when it is opened: config.json, safetensors shards, quantisation scheme, names.

    scheme: overrides what the configuration declares ("unquantised", "nvfp4_modelopt", "nvfp4_ct", "mxfp8",
    "fp8_block", "mxfp4"). Only headers are read; `read` and the loaders fetch data. CheckpointError (a ValueError) if
    anything in the folder contradicts anything else. Usable from several threads; close it or use it in a `with`.
    """

    def __init__(self, folder: str | Path, *, scheme: str | None = None):
        self.folder = Path(folder)
        self.name = str(folder)
        self._files: dict[str, SafetensorsFile] = {}
        if not self.folder.is_dir():
            raise CheckpointError(f"{folder}: is not a folder; give the folder that holds {CONFIG}.")
        if (self.folder / PROGRESS).exists():
            raise CheckpointError(
                f"{folder}: is still being written ({PROGRESS} is there); run the conversion to its end."
            )
        self.config = text_config(read_json(self.folder / CONFIG))
        self.family = family_of(self.config, str(self.folder / CONFIG))
        try:
            self.tensors = self._open_shards()
            has_quant = (self.folder / HF_QUANT).exists()
            hf_quant = read_json(self.folder / HF_QUANT) if has_quant else None
            self.scheme = find_scheme(self.config, hf_quant, self.tensors, self.name, scheme)
            self.catalog = build_catalog(self.config, self.family, self.scheme, self.tensors, self.name)
            self._moe_config = self.family.moe_config(self.config)
        except CheckpointError:
            self.close()
            raise
        except (TypeError, ValueError, KeyError, OverflowError) as e:  # a value of config.json that MoEConfig refuses
            self.close()
            raise CheckpointError(f"{self.folder / CONFIG}: does not describe a {self.family.name} model: {e}") from e

    def _open_shards(self) -> dict[str, TensorInfo]:
        weight_map, names = _shards(self.folder)
        tensors: dict[str, TensorInfo] = {}
        for name in names:
            file = self._files[name] = SafetensorsFile(self.folder / name)
            for key, info in file.items():
                if key in tensors:
                    raise CheckpointError(f"{info.where()}: the same key is also in {tensors[key].file}.")
                tensors[key] = info
        if weight_map is not None:
            where = self.folder / INDEX
            lost = [k for k, name in weight_map.items() if k not in self._files[name]]
            if lost:
                raise CheckpointError(
                    f"{where}: lists keys that their file does not have ({list_keys(lost)}; {lost[0]!r} should be in "
                    f"{weight_map[lost[0]]})."
                )
            extra = set(tensors) - set(weight_map)
            if extra:
                raise CheckpointError(f"{where}: does not list keys that the files have ({list_keys(extra)}).")
        return tensors

    @property
    def moe_config(self) -> MoEConfig:
        """The layer's configuration; every MoE layer of a model has the same."""
        return self._moe_config

    @property
    def moe_layers(self) -> tuple[int, ...]:
        """Numbers of the decoder layers that have a MoE block."""
        return tuple(self.catalog.blocks)

    def read(self, key: str, index: slice | tuple[slice, ...] = (), *, out: np.ndarray | None = None) -> np.ndarray:
        """Elements of a tensor at `index` (slices of step 1 over leading axes), as they are stored.

        out: where to read them, an array of their shape and type; None makes a new one.
        """
        file = self._files[self.tensors[key].file.rpartition("/")[2]]
        return file.read(key, index, out=out)

    def close(self) -> None:
        """Close the files; nothing can be read afterwards."""
        for file in self._files.values():
            file.close()

    def __enter__(self) -> Checkpoint:
        return self

    def __exit__(self, *exc) -> None:
        self.close()


_TYPES = {dtype: name for name, (bits, dtype) in DTYPES.items() if bits >= 8}


class MemoryCheckpoint:
    """The same for tensors in memory under their Hugging Face names, for example a trainer's weights.

    config: the dictionary of config.json. tensors: name -> array (numpy or JAX; packed FP4 as uint8).
    """

    def __init__(self, config: Mapping, tensors: Mapping[str, Any], *, scheme: str | None = None):
        self.name = "tensors in memory"
        self.config = text_config(dict(config))
        self.family = family_of(self.config, self.name)
        self._arrays = dict(tensors)
        self.tensors = {key: self._info(key, array) for key, array in self._arrays.items()}
        self.scheme = find_scheme(self.config, None, self.tensors, self.name, scheme)
        self.catalog = build_catalog(self.config, self.family, self.scheme, self.tensors, self.name)
        self._moe_config = self.family.moe_config(self.config)

    def _info(self, key: str, array) -> TensorInfo:
        dtype = _TYPES.get(np.dtype(array.dtype))
        if dtype is None:
            raise CheckpointError(f"{self.name}: {key!r} has type {array.dtype}, which a checkpoint does not have.")
        return TensorInfo(self.name, key, dtype, tuple(array.shape), 0, array.size * array.dtype.itemsize)

    @property
    def moe_config(self) -> MoEConfig:
        """The layer that `config` describes."""
        return self._moe_config

    @property
    def moe_layers(self) -> tuple[int, ...]:
        """Numbers of the decoder layers that have an MoE block."""
        return tuple(self.catalog.blocks)

    def read(self, key: str, index: slice | tuple[slice, ...] = (), *, out: np.ndarray | None = None) -> np.ndarray:
        """As `Checkpoint.read`."""
        if out is None:
            return np.array(self._arrays[key][index])
        np.copyto(out, np.asarray(self._arrays[key][index]))
        return out
