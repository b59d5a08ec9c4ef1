"""The safetensors reader and writer: every type, every slice, and every way in which a header can lie."""

import json
import os
import struct

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jmoe.checkpoint import CheckpointError, SafetensorsFile, write_safetensors
from jmoe.checkpoint.safetensors import DTYPES


def raw_file(path, header, data=b"", *, length=None):
    """A file with this header (JSON text or a dictionary), whatever it says."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text) if length is None else length) + text + data)
    return path


def entry(dtype="F32", shape=(2,), offsets=(0, 8)):
    return {"dtype": dtype, "shape": list(shape), "data_offsets": list(offsets)}


@pytest.mark.parametrize("name", DTYPES)
def test_every_type_is_written_and_read(name, tmp_path, rng):
    if name.startswith("F6_"):  # three bytes for four elements: read as bytes, and never written
        data = bytes(range(12))
        path = raw_file(tmp_path / "a.safetensors", {"w": entry(name, (4, 4), (0, 12))}, data)
        with SafetensorsFile(path) as file:
            assert file["w"].shape == (4, 4) and file.read("w").tobytes() == data
        return
    dtype = DTYPES[name][1]
    array = rng.integers(0, 2 if name == "BOOL" else 256, (3, 4 * dtype.itemsize), np.uint8).view(dtype)
    path = tmp_path / "a.safetensors"
    write_safetensors(path, {"w": array}, dtypes={"w": name}, metadata={"format": "pt"})
    with SafetensorsFile(path) as file:
        info = file["w"]
        assert info.dtype == name and info.shape == ((3, 8) if name == "F4" else (3, 4))
        assert file.metadata == {"format": "pt"}
        for read in (file.read("w"), file.memmap("w")):
            assert read.dtype == dtype and read.tobytes() == array.tobytes()
        assert file.read("w", slice(1, 3)).tobytes() == array[1:3].tobytes()
        assert not file.memmap("w").flags.writeable


SHAPE = (3, 4, 5)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.integers(-6, 6), st.integers(-6, 6)), max_size=3))
def test_slices_read_what_numpy_would(tmp_path_factory, ends):
    path = tmp_path_factory.getbasetemp() / "slices.safetensors"
    array = np.arange(60, dtype=np.int32).reshape(SHAPE)
    if not path.exists():
        write_safetensors(path, {"pad": np.ones(3, np.uint8), "a": array.astype(ml_dtypes.bfloat16), "w": array})
    index = tuple(slice(a, b) for a, b in ends)
    with SafetensorsFile(path) as file:
        got = file.read("w", index)
        np.testing.assert_array_equal(got, array[index])
        np.testing.assert_array_equal(file.read("a", index), array[index].astype(ml_dtypes.bfloat16))
        assert got.flags.writeable


def test_a_slice_reads_only_its_bytes(tmp_path, monkeypatch):
    path = tmp_path / "a.safetensors"
    write_safetensors(path, {"w": np.arange(6000, dtype=np.float32).reshape(6, 10, 100)})
    counted = []
    original = os.preadv
    monkeypatch.setattr(os, "preadv", lambda *a: counted.append(original(*a)) or counted[-1])
    with SafetensorsFile(path) as file:
        counted.clear()
        file.read("w", (slice(2, 3), slice(4, 7)))
        assert sum(counted) == 3 * 100 * 4
        counted.clear()
        file.read("w", (slice(1, 3),))
        assert sum(counted) == 2 * 4000
        counted.clear()
        assert file.read("w", (slice(2, 2),)).shape == (0, 10, 100) and not counted
        with pytest.raises(IndexError, match="step 1"):
            file.read("w", slice(0, 6, 2))


GOOD = {"a": entry(), "b": entry(offsets=(8, 16))}
BAD_HEADERS = {
    "not JSON": (b"{oops}", "not valid JSON"),
    "not UTF-8": (b'{"\xff": 1}', "not valid JSON"),
    "a list": (b"[1, 2]", "does not begin and end as an object"),
    "a cut end": (b'{"a": 1', "does not begin and end as an object"),
    "deeply nested": (b'{"a":' + b"[" * 100_000 + b"}", "not valid JSON"),
    "a number that is not JSON": (b'{"a": NaN}', "NaN is not JSON"),
    "the same name twice": (b'{"a": 1, "a": 1}', "'a' occurs twice"),
    "an entry that is no object": ({"a": 5}, "dtype, shape and data_offsets"),
    "an entry without dtype": ({"a": {"shape": [2], "data_offsets": [0, 8]}}, "dtype, shape and data_offsets"),
    "an entry with more": ({"a": {**entry(), "x": 1}}, "nothing else"),
    "an unknown dtype": ({"a": entry("F128")}, "dtype 'F128' is not known"),
    "a dtype that is no string": ({"a": entry(["F32"])}, "is not known"),
    "a negative size": ({"a": entry(shape=(-2,))}, "non-negative integers"),
    "a fractional size": ({"a": entry(shape=(2.0,))}, "non-negative integers"),
    "a boolean size": ({"a": entry(shape=(True, 2))}, "non-negative integers"),
    "a huge size": ({"a": entry(shape=(1 << 70,))}, "non-negative integers"),
    "sizes whose product is huge": ({"a": entry(shape=(1 << 60, 1 << 60))}, "bytes in whole rows"),
    "too many axes": ({"a": entry(shape=(1,) * 40)}, "at most 32"),
    "one offset": ({"a": entry(offsets=(8,))}, "a pair"),
    "offsets backwards": ({"a": entry(offsets=(8, 0))}, "do not lie within"),
    "offsets past the end": ({"a": entry(offsets=(16, 24))}, "do not lie within"),
    "fewer bytes than the shape": ({"a": entry(shape=(3,))}, "takes 12 bytes"),
    "overlapping tensors": ({"a": entry(), "b": entry(offsets=(4, 12))}, "overlaps"),
    "a hole": ({"a": entry(), "b": entry(offsets=(12, 16), shape=(1,))}, "leaves 4 unused bytes"),
    "bytes after the last tensor": ({"a": entry()}, "8 bytes follow"),
    "half a byte": ({"a": entry("F4", (3,), (0, 2))}, "in whole rows"),
    "odd rows of F4": ({"a": entry("F4", (2, 3), (0, 3)), "b": entry("U8", (13,), (3, 16))}, "in whole rows"),
    "metadata that is no map of strings": ({"__metadata__": {"a": 1}, **GOOD}, "names to strings"),
}


@pytest.mark.parametrize("case", BAD_HEADERS)
def test_refuses_a_header_with(case, tmp_path):
    header, message = BAD_HEADERS[case]
    path = raw_file(tmp_path / "bad.safetensors", header, bytes(16))
    with pytest.raises(CheckpointError, match=message) as caught:
        SafetensorsFile(path)
    assert "bad.safetensors" in str(caught.value)


def test_accepts_the_header_that_those_are_made_from(tmp_path):
    with SafetensorsFile(raw_file(tmp_path / "good.safetensors", GOOD, bytes(16))) as file:
        assert list(file) == ["a", "b"] and file["b"].start == file["a"].start + 8


@pytest.mark.parametrize("length", [0, 1, 1 << 20, 1 << 40, (1 << 64) - 1])
def test_refuses_a_length_that_lies(length, tmp_path):
    path = raw_file(tmp_path / "bad.safetensors", GOOD, bytes(16), length=length)
    with pytest.raises(CheckpointError, match="says that its header has"):
        SafetensorsFile(path)


@pytest.mark.parametrize("size", [0, 3, 7, 8, 40])
def test_refuses_a_truncated_file(size, tmp_path):
    whole = raw_file(tmp_path / "whole.safetensors", GOOD, bytes(16)).read_bytes()
    path = tmp_path / "cut.safetensors"
    path.write_bytes(whole[:size])
    with pytest.raises(CheckpointError, match="truncated"):
        SafetensorsFile(path)
    path.write_bytes(whole[:-1])
    with pytest.raises(CheckpointError, match="do not lie within"):
        SafetensorsFile(path)


def test_a_file_that_shrinks_while_it_is_open_is_an_error_and_not_a_crash(tmp_path):
    path = tmp_path / "a.safetensors"
    write_safetensors(path, {"w": np.zeros(4096, np.float32)})
    with SafetensorsFile(path) as file:
        os.truncate(path, 1000)
        with pytest.raises(CheckpointError, match="'w'.*truncated or replaced"):
            file.read("w")


def test_refuses_what_is_not_a_file(tmp_path):
    os.mkfifo(tmp_path / "pipe.safetensors")  # opening one would wait for a writer for ever
    os.symlink(tmp_path / "loop.safetensors", tmp_path / "loop.safetensors")
    (tmp_path / "folder.safetensors").mkdir()
    for name, message in (
        ("pipe", "not a regular file"),
        ("loop", "cannot be opened"),
        ("folder", "not a regular file"),
    ):
        with pytest.raises(CheckpointError, match=message):
            SafetensorsFile(tmp_path / f"{name}.safetensors")
    with pytest.raises(CheckpointError, match="cannot be opened"):
        SafetensorsFile(tmp_path / "absent.safetensors")


def test_a_failed_write_leaves_the_old_file(tmp_path):
    path = tmp_path / "a.safetensors"
    write_safetensors(path, {"w": np.arange(3)})
    before = path.read_bytes()
    with pytest.raises(CheckpointError, match="type complex128"):
        write_safetensors(path, {"w": np.zeros(3, np.complex128)})
    assert path.read_bytes() == before and os.listdir(tmp_path) == ["a.safetensors"]


def test_written_tensors_are_aligned_and_empty_ones_survive(tmp_path):
    path = tmp_path / "a.safetensors"
    arrays = {
        "c": np.ones(3, np.uint8),
        "b": np.ones((0, 4), np.float32),
        "a": np.float64(2.5),
        "d": np.ones(5, np.int16),
    }
    write_safetensors(path, arrays)
    with SafetensorsFile(path) as file:
        for key, array in arrays.items():
            assert file[key].start % max(file[key].numpy_dtype.itemsize, 1) == 0
            np.testing.assert_array_equal(file.read(key), array)
            np.testing.assert_array_equal(file.memmap(key), array)
