"""Writing a Hugging Face folder: `save_checkpoint` from parameters, `quantize_folder` from another folder.

A folder is written beside its final place, one shard for each decoder layer, each shard whole or absent, and renamed
when everything is there. A run that was killed leaves no folder that loads; the same call goes on where it stopped.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import re
import shutil
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import IO

import jax
import numpy as np

from jmoe.params import MoEParams
from jmoe.placement import Placement

from .errors import CheckpointError
from .export import check_target, moe_tensors, quantized_config
from .families import Family, family_of
from .families.base import layers as num_layers
from .folder import CONFIG, HF_QUANT, INDEX, PROGRESS, Checkpoint
from .leaves import materialize
from .online import load_online, resolve_quant
from .plan import as_dtype, plan_moe_layer, plan_rest
from .progress import progress_bar
from .safetensors import SafetensorsFile, write_safetensors

# jmoe quantize --format: (scheme that is written, contract that makes it)
FORMATS = {
    "bfloat16": ("unquantised", None),
    "nvfp4": ("nvfp4_modelopt", "modelopt_fp4"),
    "nvfp4_modelopt": ("nvfp4_modelopt", "modelopt_fp4"),
    "nvfp4_ct": ("nvfp4_ct", "modelopt_fp4"),
    "mxfp8": ("mxfp8", "mxfp8"),
    "fp8_block": ("fp8_block", "fp8_block"),
    "mxfp4": ("mxfp4", "mxfp4"),
}
_COPIED = (".json", ".txt", ".model", ".jinja")


def _layer_of(name: str) -> int:
    found = re.match(r"model\.layers\.(\d+)\.", name)
    return int(found[1]) + 1 if found else 0


def _write_json(path: Path, value) -> None:
    temporary = path.with_name(path.name + ".tmp")
    with open(temporary, "w") as file:
        json.dump(value, file, indent=2)
        file.write("\n")
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, path)


def _sync_folder(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _start_over(folder: Path, file: IO[str], token: dict) -> None:
    for path in folder.iterdir():
        if path.name != PROGRESS:
            path.unlink()
    file.truncate(0)
    json.dump(token, file)
    file.flush()


@contextlib.contextmanager
def _claimed(out: Path, token: dict) -> Iterator[Path]:
    """The folder to write in, held against other writers; it belongs to the work that `token` describes."""
    partial = out.with_name(out.name + ".partial")
    finished = (out / PROGRESS).exists()
    if out.exists() and not finished:
        raise CheckpointError(f"{out}: exists already; choose another place, or remove it first.")
    folder = out if finished else partial
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as e:
        raise CheckpointError(f"{folder}: cannot be made ({e.strerror}); choose a place that can be written to.") from e
    with open(folder / PROGRESS, "a+") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as e:
            raise CheckpointError(f"{folder}: is being written by another process; wait for it.") from e
        file.seek(0)
        text = file.read()
        if text:
            try:
                known = json.loads(text)
            except ValueError:
                known = None
            if "call" in token and isinstance(known, dict) and "call" in known:
                _start_over(folder, file, token)  # parameters of a process that is gone cannot be continued
            elif known != token:
                raise CheckpointError(
                    f"{folder}: holds the beginning of another conversion ({text[:200].strip()}); remove the folder to "
                    "start over, or repeat the call that began it."
                )
        else:
            if any(p.suffix == ".safetensors" for p in folder.iterdir()):
                raise CheckpointError(f"{folder}: holds shards of unknown origin; remove the folder to start over.")
            json.dump(token, file)
            file.flush()
            os.fsync(file.fileno())
        yield folder


def _write_folder(
    out: Path,
    hf: Mapping,
    family: Family,
    scheme: str,
    token: dict,
    layer_tensors: Callable[[int], dict[str, np.ndarray]],
    rest_names: list[str],
    rest_tensors: Callable[[list[str]], dict[str, np.ndarray]],
    *,
    copy_from: Path | None,
    progress: bool | None,
) -> None:
    """layer_tensors(i): tensors of layer i's MoE block, {} if it has none. rest_tensors(names): all others."""
    total = num_layers(hf) + 1
    with _claimed(out, token) as folder, progress_bar(f"Writing {out.name}", total, show=progress) as bar:
        for i in range(total):
            path = folder / f"model-{i + 1:05d}-of-{total:05d}.safetensors"
            if not path.exists():  # it appeared whole, from a complete write
                tensors = rest_tensors([n for n in rest_names if _layer_of(n) == i])
                if i:
                    tensors |= layer_tensors(i - 1)
                write_safetensors(path, tensors, metadata={"format": "pt"})
            bar.advance(1)
        weight_map, size = {}, 0
        for path in sorted(folder.glob("model-*.safetensors")):
            with SafetensorsFile(path) as file:
                weight_map |= dict.fromkeys(file, path.name)
                size += sum(info.nbytes for info in file.values())
        config, separate = quantized_config(hf, family, scheme)
        if copy_from is not None:
            for source in copy_from.iterdir():
                if source.suffix in _COPIED and source.name not in (CONFIG, HF_QUANT, INDEX) and source.is_file():
                    shutil.copyfile(source, folder / source.name)
        _write_json(folder / CONFIG, config)
        if separate is not None:
            _write_json(folder / HF_QUANT, separate)
        _write_json(folder / INDEX, {"metadata": {"total_size": size}, "weight_map": weight_map})
        _sync_folder(folder)
        if folder != out:
            os.rename(folder, out)
            _sync_folder(out.parent)
        (out / PROGRESS).unlink()  # last: until then the folder says that it is not complete


def save_checkpoint(
    out: str | Path,
    config: Mapping,
    layers: Mapping[int, MoEParams],
    rest: Mapping[str, object],
    *,
    scheme: str = "unquantised",
    placement: Placement | None = None,
    progress: bool | None = None,
) -> None:
    """Writes a model as a Hugging Face folder.

    Args:
      out: the folder, which must not exist.
      config: the dictionary of config.json; its quantization_config is replaced by one for `scheme`.
      layers: the MoE blocks' parameters by layer; experts kept as `scheme` stores them (`KINDS`, or "unquantised").
      rest: all other tensors by Hugging Face name, as `read_rest` returns them.
      placement: which expert each physical slot holds, if that is not slot p = expert p.
    Raises CheckpointError (a ValueError) where the parameters are not what the scheme stores.
    """
    hf = dict(config)
    family = family_of(hf, "config")
    check_target(family, scheme)
    num_experts = family.moe_config(hf).num_experts
    wanted = [i for i in range(num_layers(hf)) if family.is_moe(hf, i)]
    if set(layers) != set(wanted):
        raise ValueError(f"layers has parameters of {sorted(layers)}; the configuration has MoE blocks in {wanted}.")

    def layer_tensors(i: int):
        if i not in layers:
            return {}
        return moe_tensors(family, i, layers[i], scheme, num_experts, placement)

    _write_folder(
        Path(out),
        hf,
        family,
        scheme,
        {"what": "parameters", "scheme": scheme, "call": os.urandom(8).hex()},
        layer_tensors,
        list(rest),
        lambda names: {n: np.asarray(jax.device_get(rest[n])) for n in names},
        copy_from=None,
        progress=progress,
    )


def _fingerprint(ckpt: Checkpoint) -> dict:
    files = sorted({info.file for info in ckpt.tensors.values()})
    stats = [(Path(f).name, os.stat(f).st_size, os.stat(f).st_mtime_ns) for f in files]
    digest = hashlib.sha256(json.dumps([stats, ckpt.config], sort_keys=True).encode()).hexdigest()
    return {"source": ckpt.name, "fingerprint": digest}


def quantize_folder(
    source: str | Path, out: str | Path, *, format: str, scheme: str | None = None, progress: bool | None = None
) -> None:
    """Converts a folder: routed experts into `format`, everything else unquantised, tokenizer files copied.

    format: a name of `FORMATS`; "bfloat16" converts the rest, too. scheme: overrides what the source's configuration
    declares. Interrupted runs go on where they stopped; `out` appears when it is complete. One layer is in memory at a
    time. Experts that the format's contract keeps (NVFP4 into another NVFP4 form) are copied bit for bit; low-bit
    experts are not quantised again.
    Raises ValueError for another format, CheckpointError for a source that cannot be converted or an `out` that exists.
    """
    if format not in FORMATS:
        raise ValueError(f"format={format!r} is not known; choose one of {', '.join(FORMATS)}.")
    target, contract = FORMATS[format]
    with Checkpoint(source, scheme=scheme) as ckpt:
        check_target(ckpt.family, target)
        num_experts = ckpt.moe_config.num_experts
        bf16 = as_dtype("bfloat16")
        if contract is not None:
            resolve_quant(contract, ckpt.scheme.name)  # refuses before anything is written

        def layer_tensors(i: int):
            if i not in ckpt.catalog.blocks:
                return {}
            if contract is None:
                params = materialize(plan_moe_layer(ckpt, i, dtype=bf16, dequantize=bf16))
            else:
                params = load_online(ckpt, i, contract, dequantize_shared=bf16)
            return moe_tensors(ckpt.family, i, params, target, num_experts)

        rest = plan_rest(ckpt, dtype=bf16 if contract is None else None)
        hf = {**ckpt.config, "dtype": "bfloat16"} if contract is None else ckpt.config
        _write_folder(
            Path(out),
            hf,
            ckpt.family,
            target,
            {**_fingerprint(ckpt), "format": format},
            layer_tensors,
            list(rest),
            lambda names: jax.tree.map(np.asarray, materialize({n: rest[n] for n in names})),
            copy_from=Path(source),
            progress=progress,
        )
