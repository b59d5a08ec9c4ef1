"""Safetensors files without torch: a strict header parser, reads of slices, memory maps, and a writer.

The format: 8 bytes little-endian header length n, n bytes of JSON {name: {dtype, shape, data_offsets}}, then the data.
Every length is checked before it is used, so that a bad file costs an error and not memory, a hang or wrong numbers.

Numbers that numpy does not know come as their `ml_dtypes` types. F4 comes packed as it is stored: uint8 [..., K/2] for
a tensor of shape [..., K], even element in the low nibble. F6 comes as its raw bytes, one axis.
"""

from __future__ import annotations

import dataclasses
import json
import math
import mmap
import os
import stat
import struct
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import ml_dtypes
import numpy as np

from .errors import CheckpointError

MAX_HEADER = 100 << 20  # bytes; the reference implementation's limit
MAX_JSON = 256 << 20  # bytes of config or index files

# name in the header: (bits of one element, numpy type of what is returned)
DTYPES: dict[str, tuple[int, np.dtype]] = {
    "BOOL": (8, np.dtype(np.bool_)),
    "U8": (8, np.dtype(np.uint8)),
    "I8": (8, np.dtype(np.int8)),
    "U16": (16, np.dtype(np.uint16)),
    "I16": (16, np.dtype(np.int16)),
    "U32": (32, np.dtype(np.uint32)),
    "I32": (32, np.dtype(np.int32)),
    "U64": (64, np.dtype(np.uint64)),
    "I64": (64, np.dtype(np.int64)),
    "F16": (16, np.dtype(np.float16)),
    "BF16": (16, np.dtype(ml_dtypes.bfloat16)),
    "F32": (32, np.dtype(np.float32)),
    "F64": (64, np.dtype(np.float64)),
    "C64": (64, np.dtype(np.complex64)),
    "F8_E4M3": (8, np.dtype(ml_dtypes.float8_e4m3fn)),
    "F8_E5M2": (8, np.dtype(ml_dtypes.float8_e5m2)),
    "F8_E4M3FNUZ": (8, np.dtype(ml_dtypes.float8_e4m3fnuz)),
    "F8_E5M2FNUZ": (8, np.dtype(ml_dtypes.float8_e5m2fnuz)),
    "F8_E8M0": (8, np.dtype(ml_dtypes.float8_e8m0fnu)),
    "F6_E2M3": (6, np.dtype(np.uint8)),
    "F6_E3M2": (6, np.dtype(np.uint8)),
    "F4": (4, np.dtype(np.uint8)),
}
_NAMES = {dtype: name for name, (bits, dtype) in DTYPES.items() if bits >= 8}


@dataclasses.dataclass(frozen=True)
class TensorInfo:
    """One entry of a header. shape: logical (F4: twice the stored last axis). start: byte in the file `file`."""

    file: str
    key: str
    dtype: str
    shape: tuple[int, ...]
    start: int
    nbytes: int

    @property
    def stored_shape(self) -> tuple[int, ...]:
        """Shape of the array that a read returns."""
        if self.dtype == "F4":
            return (*self.shape[:-1], self.shape[-1] // 2)
        return (self.nbytes,) if self.dtype.startswith("F6_") else self.shape

    @property
    def numpy_dtype(self) -> np.dtype:
        """The numpy (or ml_dtypes) dtype of one element."""
        return DTYPES[self.dtype][1]

    def where(self) -> str:
        """ "FILE: KEY", for messages."""
        return f"{self.file}: {self.key!r}"


def open_regular(path: str | Path) -> int:
    """A read-only descriptor of a regular file; anything else (directory, pipe, symlink loop) is a CheckpointError."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError as e:
        raise CheckpointError(f"{path}: cannot be opened ({e.strerror}); a regular file is needed here.") from e
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise CheckpointError(f"{path}: is not a regular file; a checkpoint holds plain files or links to them.")
    return descriptor


def pread_exact(descriptor: int, out: memoryview, offset: int, what: str) -> None:
    """Fills `out` from `offset`; a file that has become shorter meanwhile is a CheckpointError."""
    done = 0
    while done < len(out):
        n = os.preadv(descriptor, [out[done : done + (1 << 30)]], offset + done)
        if n == 0:
            raise CheckpointError(f"{what}: the file ends {len(out) - done} bytes early; it was truncated or replaced.")
        done += n


def _no_duplicates(pairs: list[tuple[str, object]]) -> dict:
    out = dict(pairs)
    if len(out) != len(pairs):
        seen: set[str] = set()
        twice = next(k for k, _ in pairs if k in seen or seen.add(k))
        raise ValueError(f"the name {twice!r} occurs twice")
    return out


def parse_json(raw: bytes | bytearray, what: str) -> dict:
    """A JSON object without duplicate names; anything else is a CheckpointError that names `what`."""

    def refuse(constant: str):
        raise ValueError(f"{constant} is not JSON")

    try:
        value = json.loads(raw.decode("utf-8"), object_pairs_hook=_no_duplicates, parse_constant=refuse)
    except (ValueError, RecursionError) as e:  # JSONDecodeError and UnicodeDecodeError are ValueErrors
        raise CheckpointError(f"{what}: is not valid JSON ({e}).") from e
    if not isinstance(value, dict):
        raise CheckpointError(f"{what}: holds a JSON {type(value).__name__}; an object is needed.")
    return value


def read_json(path: str | Path) -> dict:
    """The JSON object in a file."""
    descriptor = open_regular(path)
    try:
        size = os.fstat(descriptor).st_size
        if size > MAX_JSON:
            raise CheckpointError(f"{path}: {size} bytes is more than the {MAX_JSON} that a JSON file may have here.")
        raw = bytearray(size)
        pread_exact(descriptor, memoryview(raw), 0, str(path))
    finally:
        os.close(descriptor)
    return parse_json(raw, str(path))


def _is_count(value) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 1 << 63


def _entry(path: str, key: str, entry, data_start: int, data_size: int) -> TensorInfo:
    where = f"{path}: {key!r}"
    if not isinstance(entry, dict) or set(entry) != {"dtype", "shape", "data_offsets"}:
        raise CheckpointError(f"{where}: its header entry must have dtype, shape and data_offsets, and nothing else.")
    dtype, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    if not isinstance(dtype, str) or dtype not in DTYPES:
        raise CheckpointError(f"{where}: dtype {dtype!r} is not known; known are {', '.join(DTYPES)}.")
    if not isinstance(shape, list) or len(shape) > 32 or not all(map(_is_count, shape)):
        raise CheckpointError(f"{where}: shape {str(shape)[:80]} is not a list of at most 32 non-negative integers.")
    if not isinstance(offsets, list) or len(offsets) != 2 or not all(map(_is_count, offsets)):
        raise CheckpointError(f"{where}: data_offsets {str(offsets)[:80]} is not a pair of non-negative integers.")
    begin, end = offsets
    if not begin <= end <= data_size:
        raise CheckpointError(
            f"{where}: data_offsets {begin}..{end} do not lie within the {data_size} bytes of data in the file; it was "
            "truncated, or the header is wrong. Download it again."
        )
    bits = DTYPES[dtype][0] * math.prod(shape)
    if bits % 8 or bits // 8 != end - begin or (dtype == "F4" and (not shape or shape[-1] % 2)):
        raise CheckpointError(
            f"{where}: {dtype} of shape {shape} takes {bits / 8:g} bytes in whole rows, not {end - begin}."
        )
    return TensorInfo(path, key, dtype, tuple(shape), data_start + begin, end - begin)


def parse_header(path: str, descriptor: int) -> tuple[dict[str, TensorInfo], dict[str, str]]:
    """(entries by name, metadata) of an open file; every inconsistency is a CheckpointError."""
    size = os.fstat(descriptor).st_size
    if size < 8:
        raise CheckpointError(
            f"{path}: {size} bytes is too short for a safetensors file; it was truncated. Download it again."
        )
    prefix = bytearray(8)
    pread_exact(descriptor, memoryview(prefix), 0, path)
    (length,) = struct.unpack("<Q", prefix)
    if not 2 <= length <= min(MAX_HEADER, size - 8):
        raise CheckpointError(
            f"{path}: says that its header has {length} bytes; the file has {size} and a header at most {MAX_HEADER}. "
            "It was truncated or is not a safetensors file."
        )
    ends = bytearray(2)  # a wrong length mostly shows here, before anything of that size is read
    pread_exact(descriptor, memoryview(ends)[:1], 8, path)
    pread_exact(descriptor, memoryview(ends)[1:], 7 + length, path)
    if not ends.startswith(b"{") or not ends.endswith((b"}", b" ")):
        raise CheckpointError(f"{path}: header: is not valid JSON (it does not begin and end as an object, or is cut).")
    raw = bytearray(length)
    pread_exact(descriptor, memoryview(raw), 8, path)
    header = parse_json(raw, f"{path}: header")
    del raw
    metadata = header.pop("__metadata__", {})
    if not isinstance(metadata, dict) or not all(isinstance(v, str) for v in metadata.values()):
        raise CheckpointError(f"{path}: '__metadata__' must map names to strings.")
    start, data_size = 8 + length, size - 8 - length
    infos = {key: _entry(path, key, entry, start, data_size) for key, entry in header.items()}
    end, last = start, "the header"
    for info in sorted(infos.values(), key=lambda i: (i.start, i.nbytes)):
        if info.start != end:
            what = "overlaps" if info.start < end else f"leaves {info.start - end} unused bytes after"
            raise CheckpointError(f"{info.where()}: its data {what} that of {last}; tensors must be back to back.")
        end, last = info.start + info.nbytes, repr(info.key)
    if end != size:
        raise CheckpointError(f"{path}: {size - end} bytes follow the data of {last}, the last tensor of the header.")
    return infos, metadata


def _normalised(info: TensorInfo, index) -> tuple[tuple[int, int], ...]:
    index = index if isinstance(index, tuple) else (index,)
    shape = info.stored_shape
    if len(index) > len(shape):
        raise IndexError(f"{info.where()}: {len(index)} indices for an array of shape {shape}.")
    bounds = []
    for axis, extent in enumerate(shape):
        begin, stop, step = (index[axis] if axis < len(index) else slice(None)).indices(extent)
        if step != 1:
            raise IndexError(f"{info.where()}: slices must have step 1, got {index[axis]}.")
        bounds.append((begin, max(begin, stop)))
    return tuple(bounds)


class SafetensorsFile(Mapping[str, TensorInfo]):
    """An open file: a mapping from names to `TensorInfo`, with reads of whole tensors, slices and memory maps.

    Reads are positional, so several threads may read at once. Close it, or use it as a context manager.
    """

    def __init__(self, path: str | Path):
        self.path = str(path)
        self._descriptor = open_regular(path)
        self._map: mmap.mmap | None = None
        try:
            self._infos, self.metadata = parse_header(self.path, self._descriptor)
        except BaseException:
            self.close()
            raise

    def __getitem__(self, key: str) -> TensorInfo:
        return self._infos[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self._infos)

    def __len__(self) -> int:
        return len(self._infos)

    def read(self, key: str, index: slice | tuple[slice, ...] = (), *, out: np.ndarray | None = None) -> np.ndarray:
        """The elements of `key` at `index`: slices of step 1 over the leading axes of the stored shape.

        Only the bytes between the first and the last wanted element are read. out: a contiguous array of the right
        shape and type to read into; None makes a new one.
        """
        if self._descriptor < 0:
            raise ValueError(f"{self.path}: was closed; read from it while it is open, inside the `with`.")
        info = self._infos[key]
        bounds = _normalised(info, index)
        shape = info.stored_shape
        if any(b == e for b, e in bounds):
            return np.empty([e - b for b, e in bounds], info.numpy_dtype)
        # Leading axes of one wanted element narrow the read, the first wider axis gives its range, the rest is cut.
        axis = 0
        offset, inner = 0, info.nbytes
        while axis < len(shape) and bounds[axis][1] - bounds[axis][0] == 1:
            inner //= shape[axis]
            offset += bounds[axis][0] * inner
            axis += 1
        rows = 1
        if axis < len(shape):
            inner //= shape[axis]
            offset += bounds[axis][0] * inner
            rows = bounds[axis][1] - bounds[axis][0]
        cut = tuple(slice(b, e) for b, e in bounds[axis + 1 :])
        whole = all(slice(0, n) == c for n, c in zip(shape[axis + 1 :], cut, strict=True))
        direct = None
        if out is not None and whole and out.flags.c_contiguous and out.dtype == info.numpy_dtype:
            direct = out.reshape(-1).view(np.uint8)
        buffer = np.empty(rows * inner, np.uint8) if direct is None else direct
        if out is not None and len(buffer) != rows * inner:
            raise ValueError(
                f"{info.where()}: out has shape {out.shape}, the elements have {[e - b for b, e in bounds]}."
            )
        pread_exact(self._descriptor, buffer.data, info.start + offset, info.where())
        if direct is not None and out is not None:
            return out
        array = buffer.view(info.numpy_dtype).reshape((1,) * axis + (rows,) * (axis < len(shape)) + shape[axis + 1 :])
        array = array if whole else array[(slice(None),) * (axis + 1) + cut]
        if out is None:
            return array
        np.copyto(out, array)
        return out

    def memmap(self, key: str) -> np.ndarray:
        """A read-only view of `key` in the mapped file. The caller must not let the file be truncated under it."""
        info = self._infos[key]
        if self._map is None:
            self._map = mmap.mmap(self._descriptor, 0, prot=mmap.PROT_READ)
        raw = np.frombuffer(self._map, np.uint8, info.nbytes, info.start)
        if info.start % info.numpy_dtype.itemsize:  # a header of odd length: the view would not be aligned
            raw = raw.copy()
            raw.flags.writeable = False
        return raw.view(info.numpy_dtype).reshape(info.stored_shape)

    def close(self) -> None:
        """Close the file; nothing can be read afterwards."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1
        self._map = None  # closed when the last view of it goes

    def __enter__(self) -> SafetensorsFile:
        return self

    def __exit__(self, *exc) -> None:
        self.close()

    def __del__(self, _close=os.close):  # the default keeps the function alive while the interpreter goes down
        if getattr(self, "_descriptor", -1) >= 0:
            _close(self._descriptor)
            self._descriptor = -1


def write_safetensors(
    path: str | Path,
    tensors: Mapping[str, np.ndarray],
    *,
    metadata: Mapping[str, str] | None = None,
    dtypes: Mapping[str, str] | None = None,
) -> None:
    """Writes arrays (numpy or ml_dtypes types) to `path`, which appears whole or not at all.

    dtypes: names of header types where the array's own type does not say it: "F4" for packed uint8 data. The order is
    that of falling element size, then of the mapping, so that every tensor is aligned; the header is padded to 8 bytes.
    Raises CheckpointError for a type that safetensors does not have.
    """
    path = Path(path)
    dtypes = dtypes or {}
    header: dict[str, object] = {"__metadata__": dict(metadata)} if metadata else {}
    offset = 0
    ordered = sorted(tensors, key=lambda k: -np.asarray(tensors[k]).dtype.itemsize)
    for key in ordered:
        array = np.asarray(tensors[key])
        name = dtypes.get(key) or _NAMES.get(array.dtype)
        if name is None:
            raise CheckpointError(f"{path}: {key!r} has type {array.dtype}, which safetensors does not have.")
        shape: Sequence[int] = array.shape
        if name == "F4":
            shape = (*array.shape[:-1], array.shape[-1] * 2)
        header[key] = {"dtype": name, "shape": list(shape), "data_offsets": [offset, offset + array.nbytes]}
        offset += array.nbytes
    raw = json.dumps(header, separators=(",", ":")).encode()
    raw += b" " * (-len(raw) % 8)
    temporary = path.with_name(path.name + ".tmp")
    with open(temporary, "wb") as file:
        file.write(struct.pack("<Q", len(raw)) + raw)
        for key in ordered:
            file.write(np.ascontiguousarray(tensors[key]).reshape(-1).view(np.uint8).data)
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, path)
