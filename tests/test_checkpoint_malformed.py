"""More than 200 folders that are broken in one place each: every one gives an error that names file and key.

None may crash, hang, load with other numbers, or take much memory. The cases are generated: a way of breaking a folder,
for each folder and tensor that it applies to.
"""

import json
import struct
import tracemalloc

import ml_dtypes
import numpy as np
import pytest
from checkpoint_reference import MODELS, clone, read_tensors, reconfigure

from jmoe.checkpoint import Checkpoint, CheckpointError, load_moe_layer, read_rest, write_safetensors

FILE = "model.safetensors"
EXPERT = "model.layers.1.mlp.experts.3"

# For each folder: tensors of one expert (or stack), by what they are.
TARGETS = {
    "qwen3_moe": {"weight": f"{EXPERT}.up_proj.weight", "router": "model.layers.1.mlp.gate.weight"},
    "mixtral": {"weight": "model.layers.1.block_sparse_moe.experts.3.w3.weight"},
    "deepseek_v3": {
        "weight": f"{EXPERT}.down_proj.weight",
        "router": "model.layers.1.mlp.gate.e_score_correction_bias",
    },
    "gpt_oss": {
        "weight": "model.layers.1.mlp.experts.gate_up_proj",
        "router": "model.layers.1.mlp.experts.down_proj_bias",
    },
    "qwen3_moe_nvfp4_modelopt": {
        "weight": f"{EXPERT}.gate_proj.weight",
        "scale": f"{EXPERT}.gate_proj.weight_scale",
        "scalar": f"{EXPERT}.up_proj.weight_scale_2",
    },
    "qwen3_moe_nvfp4_ct": {
        "weight": f"{EXPERT}.down_proj.weight_packed",
        "scale": f"{EXPERT}.down_proj.weight_scale",
        "scalar": f"{EXPERT}.down_proj.weight_global_scale",
    },
    "qwen3_moe_mxfp8": {"weight": f"{EXPERT}.up_proj.weight", "scale": f"{EXPERT}.up_proj.weight_scale"},
    "deepseek_v3_fp8": {"weight": f"{EXPERT}.up_proj.weight", "scale": f"{EXPERT}.up_proj.weight_scale_inv"},
    "gpt_oss_mxfp4": {
        "weight": "model.layers.1.mlp.experts.down_proj_blocks",
        "scale": "model.layers.1.mlp.experts.down_proj_scales",
    },
}


def shapes_of(a):
    """Shapes that are not a's, most of them with as many elements."""
    yield "an axis more", a[None]
    yield "flat", a.reshape(-1)
    if a.ndim >= 2:
        yield "a row less", a[:-1]
        yield "a column less", a[..., :-1]
        if a.shape[-1] != a.shape[-2]:
            yield "transposed", np.swapaxes(a, -1, -2)
    yield "nothing", a.reshape(-1)[:0]
    yield "twice as many", np.concatenate([a.reshape(-1)] * 2)


def types_of(a, role):
    """Types that this tensor may not have."""
    if role == "scale" and a.dtype in (np.uint8, np.float32):
        wrong = [np.int8, np.float16, np.float64]
    elif role == "scalar":
        wrong = [np.int32, np.float16, np.float64, ml_dtypes.bfloat16]
    else:
        wrong = [np.int8, np.int32, np.float64, ml_dtypes.float8_e5m2]
    for dtype in wrong:
        yield np.dtype(dtype).name, np.zeros(a.shape, dtype)


def bad_values(a):
    """Values that no scale has."""
    if a.dtype == np.uint8:  # E8M0 has one: NaN
        yield "nan", 255
        return
    yield "nan", np.nan
    yield "negative", -1.0
    yield "zero", 0.0
    if a.dtype == np.float32:
        yield "inf", np.inf


def swizzled(a):
    """Block scales in an order that is not row by row: padded to 128 rows, or one axis."""
    rows, columns = -a.shape[0] % 128, -a.shape[1] % 4
    yield "padded", np.resize(a, (a.shape[0] + (rows or 128), a.shape[1] + columns))
    yield "one axis", np.zeros(512 * -(-a.shape[0] // 128) * -(-a.shape[1] // 4), a.dtype)


def tensor_cases():
    for name, targets in TARGETS.items():
        tensors = read_tensors(MODELS / name)
        for role, key in targets.items():
            a = tensors[key]
            yield name, f"{key} missing", {key: None}, key
            stem = key.rpartition(".")[0]
            for extra in (f"{stem}.weight_scale_9", f"{key}.extra"):
                yield name, f"{extra} extra", {extra: np.ones((2, 2), np.float32)}, extra
            for what, value in shapes_of(a):
                if value.shape != a.shape and not (role == "scalar" and value.shape in ((), (1,))):
                    yield name, f"{key} {what}", {key: value}, key
            for what, value in types_of(a, role):
                yield name, f"{key} as {what}", {key: value}, key
            if role in ("scale", "scalar"):
                for what, value in bad_values(a):
                    for place in ("first", "last"):
                        changed = a.copy().reshape(-1)
                        changed[0 if place == "first" else -1] = value
                        yield name, f"{key} {what} {place}", {key: changed.reshape(a.shape)}, key
            if role == "scale" and a.ndim == 2:
                for what, value in swizzled(a):
                    yield name, f"{key} swizzled, {what}", {key: value}, key


def file_cases():
    """(name, what, bytes -> bytes): damage to the file itself."""
    for name in TARGETS:
        size = (MODELS / name / FILE).stat().st_size
        for cut in (0, 4, 8, 100, size // 2, size - 1):
            yield name, f"cut to {cut}", lambda b, cut=cut: b[:cut]
        yield name, "longer", lambda b: b + b"\0" * 8
        for length in (0, 1, 10**6, 1 << 30, (1 << 64) - 1):
            yield name, f"header length {length}", lambda b, n=length: struct.pack("<Q", n) + b[8:]
        yield name, "no JSON", lambda b: b[:8] + b"?" + b[9:]
        yield name, "offsets of another tensor", overlapping
        yield name, "a larger shape", lying_shape


def _edit_header(raw, edit):
    (n,) = struct.unpack("<Q", raw[:8])
    header = json.loads(raw[8 : 8 + n])
    edit(header)
    text = json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + raw[8 + n :]


def overlapping(raw):
    def edit(header):
        first, second = [k for k in header if k != "__metadata__" and len(header[k]["shape"]) == 2][:2]
        width = header[second]["data_offsets"]
        begin = header[first]["data_offsets"][0]
        header[second]["data_offsets"] = [begin, begin + width[1] - width[0]]

    return _edit_header(raw, edit)


def lying_shape(raw):
    def edit(header):
        key = next(k for k in header if k != "__metadata__" and len(header[k]["shape"]) == 2)
        header[key]["shape"][0] += 1

    return _edit_header(raw, edit)


def config_cases():
    for name in TARGETS:
        yield name, "no JSON", "{"
        yield name, "a list", "[]"
        yield name, "twice", '{"model_type": "mixtral", "model_type": "mixtral"}'
        yield name, "empty", "{}"
        yield name, "bytes", b"\xff\xfe"


TENSORS, FILES, CONFIGS = list(tensor_cases()), list(file_cases()), list(config_cases())


def load_all(folder):
    with Checkpoint(folder) as ckpt:
        read_rest(ckpt)
        return [load_moe_layer(ckpt, layer) for layer in ckpt.moe_layers]


def test_there_are_more_than_200_cases():
    assert len(TENSORS) + len(FILES) + len(CONFIGS) > 400 and len(TENSORS) > 200


@pytest.mark.parametrize("name", TARGETS)
def test_one_bad_tensor(name, tmp_path):
    folder = clone(name, tmp_path / "m")
    load_all(folder)
    tensors = read_tensors(folder)
    for case, what, change, key in TENSORS:
        if case != name:
            continue
        changed = {k: v for k, v in {**tensors, **change}.items() if v is not None}
        write_safetensors(folder / FILE, changed)
        with pytest.raises(CheckpointError) as caught:
            load_all(folder)
            pytest.fail(f"{what} was loaded")
        text = str(caught.value)
        assert key in text and str(folder) in text, (what, text)


@pytest.mark.parametrize("name", TARGETS)
def test_one_damaged_file(name, tmp_path):
    folder = clone(name, tmp_path / "m")
    raw = (folder / FILE).read_bytes()
    for case, what, change in FILES:
        if case != name:
            continue
        (folder / FILE).write_bytes(change(raw))
        tracemalloc.start()
        with pytest.raises(CheckpointError) as caught:
            load_all(folder)
            pytest.fail(f"{what} was loaded")
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert FILE in str(caught.value), (what, caught.value)
        assert peak < 2 * len(raw) + (1 << 20), (what, peak)
    (folder / FILE).write_bytes(raw)
    for case, what, text in CONFIGS:
        if case == name:
            (folder / "config.json").write_bytes(text if isinstance(text, bytes) else text.encode())
            with pytest.raises(CheckpointError, match="config.json"):
                load_all(folder)
                pytest.fail(f"{what} was loaded")


def test_zero_scales_over_zero_weights_are_fine(tmp_path):
    """Some quantisers write a scale of 0 for a block of zeros; only over other elements does it lose something."""
    for name in ("qwen3_moe_nvfp4_modelopt", "deepseek_v3_fp8"):
        folder, targets = clone(name, tmp_path / name), TARGETS[name]
        tensors = read_tensors(folder)
        tensors[targets["scale"]].reshape(-1)[0] = 0
        write_safetensors(folder / FILE, tensors)
        with pytest.raises(CheckpointError, match="block scales are 0 over elements that are not"):
            load_all(folder)
        tensors[targets["weight"]][:128, : 128 if "fp8" in name else 8] = 0
        write_safetensors(folder / FILE, tensors)
        load_all(folder)


def test_malformed_quantisation_configs(tmp_path):
    folder = clone("qwen3_moe_nvfp4_modelopt", tmp_path / "m")
    for value in (5, "nvfp4", [], {}, {"quant_method": 3}, {"quant_method": "modelopt", "quant_algo": ["NVFP4"]}):
        reconfigure(folder, lambda c, v=value: c.update(quantization_config=v))
        with pytest.raises(CheckpointError, match="config.json"):
            load_all(folder)
    reconfigure(folder, lambda c: c.pop("quantization_config"))
    for text in ('{"quantization": 3}', "{}", "nonsense"):
        (folder / "hf_quant_config.json").write_text(text)
        with pytest.raises(CheckpointError, match="hf_quant_config.json"):
            load_all(folder)
