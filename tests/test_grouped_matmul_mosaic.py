"""The Hopper kernels of the grouped matmul: their schedule anywhere, the kernels in the GPU backend's interpreter."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu

from jmoe.config import MoEConfig
from jmoe.experts import gated_activation
from pallas_kernels.grouped_matmul import Gate, gated_product, mosaic_entry, tuning
from pallas_kernels.grouped_matmul.api import Problem
from pallas_kernels.grouped_matmul.schedule import (
    group_bounds,
    max_tiles,
    num_tiles,
    read_tile,
    tile_schedule,
)
from pallas_kernels.quantize import QTensor, dequantize, quantize, quantize_weights

needs_interpreter = pytest.mark.skipif(
    not hasattr(plgpu, "InterpretGPUParams"), reason="the GPU interpreter of Pallas is there from JAX 0.11 on"
)
M, N, K = 150, 128, 128
SIZES = {
    "ends inside boxes": [7, 0, 100, 20],
    "one group and a tail": [0, 130, 0, 0],
    "nothing": [0, 0, 0, 0],
}


def relative(a, b):
    a, b = np.asarray(a, np.float64), np.asarray(b, np.float64)
    return np.linalg.norm(a - b) / max(np.linalg.norm(b), 1e-30)


def dense(x, w, sizes):
    """Group by group in float32; rows past the sum are zero."""
    x, w = np.asarray(x, np.float32), np.asarray(w, np.float32)
    out, row = np.zeros((x.shape[0], w.shape[1]), np.float32), 0
    for g, size in enumerate(sizes):
        out[row : row + size] = x[row : row + size] @ w[g].T
        row += size
    return out


@pytest.fixture
def few_blocks(monkeypatch):
    """The shipped configurations, on two blocks and with two stages: the interpreter runs each block as threads."""
    lookup = tuning.lookup

    def small(kernel, **question):
        return {**lookup(kernel, **question), "num_blocks": 2, "stages": 2}

    monkeypatch.setattr(tuning, "lookup", small)


# --- schedule


def tiles_of(schedule, num_rows, block, box, **options):
    """(weight, first, last, rows) of all tiles, as a kernel reads them."""
    count = int(num_tiles(schedule, num_rows, block, **options))
    return np.stack(read_tile(schedule, jnp.arange(count), block, box), axis=1)


@pytest.mark.parametrize("sizes", [[1, 0, 7, 64, 65, 191, 192, 193], [0] * 8, [1000] + [0] * 7, [2000] * 8, [128] * 8])
@pytest.mark.parametrize(("block", "box"), [(128, 64), (16, 16), (256, 64)])
def test_tiles_cover_every_row_of_every_group_and_none_with_other_weights(sizes, block, box):
    schedule = tile_schedule(jnp.asarray(sizes, jnp.int32), num_rows=1000, block=block)
    assert schedule.weight.shape == (max_tiles(1000, 8, block),)
    owner = np.repeat(np.arange(9), np.diff(np.minimum(np.concatenate([[0], np.cumsum(sizes), [10**6]]), 1000)))
    owner = np.where(owner == 8, -1, owner)
    covered = np.full(1000, -2)
    for weight, first, last, rows in tiles_of(schedule, 1000, block, box):
        assert rows <= block and np.all(owner[first : first + rows] == weight)
        assert last == max(first, first + rows - box)
        covered[first : first + rows] = weight
    np.testing.assert_array_equal(covered, owner)
    with_rows = tiles_of(schedule, 1000, block, box, zero_tail=False)
    assert np.all(with_rows[with_rows[:, 3] > 0, 0] >= 0)


def test_a_schedule_for_a_part_of_the_groups_gives_zero_tiles_to_the_others():
    sizes = jnp.asarray([30, 40, 50, 20], jnp.int32)
    schedule = tile_schedule(sizes, num_rows=150, block=16, group_offset=jnp.int32(1), num_weights=2)
    weight, first, _, _ = tiles_of(schedule, 150, 16, 16).T
    assert np.all(weight[(first >= 30) & (first < 70)] == 0) and np.all(weight[(first >= 70) & (first < 120)] == 1)
    assert np.all(weight[(first < 30) | (first >= 120)] == -1) and set(weight) == {-1, 0, 1}


def test_group_bounds_are_cut_at_the_last_row():
    starts, ends = group_bounds(jnp.asarray([5, -3, 10, 100], jnp.int32), 20)
    np.testing.assert_array_equal(starts, [0, 5, 5, 15])
    np.testing.assert_array_equal(ends, [5, 5, 15, 20])


# --- choice


def test_the_first_fitting_rule_decides_and_a_users_rules_come_first(tmp_path, monkeypatch):
    monkeypatch.setattr(tuning.compat, "REGISTERS_MOVE", True)
    assert tuning.lookup("decode", weights="nvfp4", rows=4, n=3072, k=4096)["block_t"] == 8
    assert tuning.lookup("decode", weights="bfloat16", rows=20, n=3072, k=4096)["block_t"] == 32
    assert tuning.lookup("decode", weights="nvfp4", rows=1000, n=3072, k=4096)["block_t"] == 128
    path = tmp_path / "mine.json"
    path.write_text('{"rules": [{"kernel": "decode", "n": 3072, "config": {"block_t": 24}}]}')
    mine = tuning.read_rules(path)
    assert tuning.lookup("decode", weights="nvfp4", rows=4, n=3072, k=4096, extra=mine) == {"block_t": 24}
    assert tuning.lookup("decode", weights="nvfp4", rows=4, n=64, k=4096, extra=mine)["block_t"] == 8
    by_thirds, by_halves = (tuning.lookup("decode", weights="nvfp4", rows=8, n=n, k=4096) for n in (3072, 4096))
    assert by_thirds["consumers"] == 3 and by_halves["consumers"] == 4  # 64 rows each
    assert tuning.lookup("prefill", weights="bfloat16", rows=256, n=2048, k=768)["slab"] == 128
    assert tuning.lookup("prefill", weights="bfloat16", rows=256, n=2048, k=4096)["slab"] == 144
    monkeypatch.setattr(tuning.compat, "REGISTERS_MOVE", False)  # smaller tiles, but a user's rules still come first
    assert "slab" not in tuning.lookup("prefill", weights="bfloat16", rows=256, n=2048, k=4096)
    assert tuning.lookup("fp8", weights="fp8_128x128", rows=256, n=2048, k=4096) == {"block_m": 128}
    assert tuning.lookup("decode", weights="nvfp4", rows=4, n=3072, k=4096, extra=mine) == {"block_t": 24}
    path.write_text('{"rules": [{"kernel": "decode", "block_t": 24}]}')
    with pytest.raises(ValueError, match="rule 0 has the keys"):
        tuning.read_rules(path)


def test_every_shipped_rule_is_a_valid_configuration_that_fits_into_shared_memory():
    from pallas_kernels.grouped_matmul.mosaic_decode_sm90 import DecodeConfig
    from pallas_kernels.grouped_matmul.mosaic_dequant import Packed
    from pallas_kernels.grouped_matmul.mosaic_fp8_sm90 import Fp8Config
    from pallas_kernels.grouped_matmul.mosaic_sm90 import SMEM_BYTES, Config

    packed = {
        "mxfp8": Packed("e4m3", "e8m0", 32),
        "mxfp4": Packed("e2m1", "e8m0", 32),
        "nvfp4": Packed("e2m1", "e4m3", 16),
        "fp8_128x128": Packed("e4m3", "f32", 128),
    }
    for rule in tuning.read_rules(tuning._SHIPPED):
        if rule["kernel"].startswith("decode"):
            config, parts = DecodeConfig(**rule["config"]), 2 if rule["kernel"] == "decode_gated" else 1
            size = config.smem_bytes(packed.get(rule.get("weights")), parts=parts) * config.per_sm
        elif rule["kernel"] in ("prefill", "gated", "dlhs"):
            size = Config(**rule["config"]).smem_bytes()
        elif rule["kernel"] == "fp8":
            size = Fp8Config(**rule["config"]).smem_bytes()
        else:
            continue
        assert size < SMEM_BYTES - 1024, rule


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"platform": "cpu", "compute_capability": None}, "compute capability 9.0, this is cpu"),
        ({"compute_capability": "10.0"}, "compute capability 9.0, this is gpu 10.0"),
        ({"n": 96}, "multiples of 64"),
        ({"x": "float32"}, "x is float32"),
        ({"w": "float32"}, "w is float32"),
        ({"w": "fp8_128"}, "fp8_128x128 weights"),
        ({"w": "mxfp4", "n": 5760, "k": 2880}, None),
        ({"w": "nvfp4", "op": "dlhs"}, "portable"),
        ({"out": "float8_e4m3fn"}, "out_dtype"),
        ({}, None),
        ({"x": "mxfp8", "w": "nvfp4_token"}, None),
    ],
)
def test_the_kernels_say_why_they_cannot(monkeypatch, changes, reason):
    monkeypatch.setattr(mosaic_entry.compat, "KERNELS_SUPPORTED", True)
    fields = dict(
        op="forward", m=64, n=128, k=256, groups=4, x="bfloat16", w="bfloat16", out="bfloat16", platform="gpu"
    )
    said = mosaic_entry.why_not(Problem(**{**fields, "compute_capability": "9.0", **changes}))
    assert said is None if reason is None else reason in said


@pytest.mark.parametrize(
    ("changes", "bias", "hard", "soft"),
    [
        ({}, False, None, None),
        ({"m": 65536}, False, None, None),
        ({"m": 65536}, True, "adds no bias", None),
        ({"m": 8}, False, None, "equal share"),
        ({"w": "nvfp4"}, True, None, None),
        ({"w": "nvfp4", "m": 65536}, True, None, "not been timed"),
        ({"w": "mxfp8"}, False, None, "not been timed"),
        ({"n": 96}, False, "multiples of 64", None),
    ],
)
def test_gate_and_up_are_joined_where_that_is_possible_and_faster(monkeypatch, changes, bias, hard, soft):
    monkeypatch.setattr(mosaic_entry.compat, "KERNELS_SUPPORTED", True)
    fields = dict(m=512, n=768, k=2048, groups=128, x="bfloat16", w="bfloat16", out="bfloat16", platform="gpu")
    problem = Problem(op="forward", **{**fields, "compute_capability": "9.0", **changes})
    reason = mosaic_entry.why_not_gated(problem, bias=bias)
    assert reason is None if hard is None else hard in reason
    if hard is None:
        reason = mosaic_entry.slower_gated(problem)
        assert reason is None if soft is None else soft in reason


def test_the_kernels_are_refused_on_a_jax_that_cannot_lower_them(monkeypatch):
    monkeypatch.setattr(mosaic_entry.compat, "KERNELS_SUPPORTED", False)
    problem = Problem("forward", 64, 128, 256, 4, "bfloat16", "bfloat16", "bfloat16", "gpu", "9.0")
    assert "JAX >= 0.11" in mosaic_entry.why_not(problem)


# --- kernels


def operands(rng, groups=4, m=M, k=K):
    x = jnp.asarray(rng.standard_normal((m, k)), jnp.bfloat16)
    return x, jnp.asarray(rng.standard_normal((groups, N, k)), jnp.bfloat16)


@needs_interpreter
@pytest.mark.parametrize("decode_rows", [0, 64], ids=["rows first", "weights first"])
def test_bf16_products_equal_the_dense_formula_and_nan_stays_in_its_rows(rng, few_blocks, monkeypatch, decode_rows):
    monkeypatch.setattr(mosaic_entry, "DECODE_ROWS", decode_rows)
    x, w = operands(rng)
    for name, sizes in SIZES.items():
        total = sum(sizes)
        dirty = x.at[total:].set(jnp.nan).at[:7].set(jnp.nan)
        y = mosaic_entry.forward(
            dirty,
            w,
            jnp.asarray(sizes, jnp.int32),
            out_dtype=jnp.bfloat16,
            interpret=plgpu.InterpretGPUParams(),
        )
        clean = slice(7, None) if sizes[0] == 7 else slice(total, None)
        assert relative(y[clean], dense(x, w, sizes)[clean]) < 4e-3, name
        assert not np.any(np.asarray(y[total:], np.float32)), name


@needs_interpreter
@pytest.mark.parametrize(
    "config",
    [
        {"block_n": 192},
        {"block_m": 256, "block_n": 64, "cluster": 2, "lead": 1},
        {"block_n": 64, "cluster": 2, "share": "weights"},
    ],
    ids=str,
)
@pytest.mark.parametrize("sizes", [[7, 0, 260, 133], [64, 65, 70, 193]], ids=str)
def test_tiles_of_every_shape_give_the_dense_products(rng, config, sizes):
    x, w = operands(rng, m=460)
    with tuning.override({"prefill": {**config, "num_blocks": 2, "stages": 2}}):
        y = mosaic_entry.forward(
            x, w, jnp.asarray(sizes, jnp.int32), out_dtype=jnp.bfloat16, interpret=plgpu.InterpretGPUParams()
        )
    assert relative(y, dense(x, w, sizes)) < 4e-3


@needs_interpreter
@pytest.mark.parametrize("op", ["forward", "dlhs", "gated"])
@pytest.mark.parametrize("slab", [dict(slab=144, out_slots=1), {}], ids=["slab", "boxes"])
def test_shared_weights_and_slabs_on_the_matrix_units_n_side_give_the_dense_products(rng, op, slab):
    config = dict(cluster=2, share="weights", lead=1, num_blocks=2, stages=2) | slab
    sizes = [7, 132, 300, 81]  # fewer than a box, a slab, a pair and a box, a slab that ends within 8 rows
    m, n, gate = sum(sizes) + 9, 512, Gate("silu")
    x, w = operands(rng, m=m)[0], jnp.asarray(rng.standard_normal((4, n, K)) * 0.1, jnp.bfloat16)
    options = dict(out_dtype=jnp.bfloat16, interpret=plgpu.InterpretGPUParams())
    device_sizes = jnp.asarray(sizes, jnp.int32)
    with tuning.override({"prefill": config, "dlhs": config, "gated": config}):
        if op == "forward":
            y, expected = mosaic_entry.forward(x, w, device_sizes, **options), dense(x, w, sizes)
        elif op == "dlhs":
            y, expected = mosaic_entry.dlhs(x, jnp.swapaxes(w, 1, 2), device_sizes, **options), dense(x, w, sizes)
        else:
            both = w.reshape(4, 2, n // 2, K)
            y = mosaic_entry.gated(x, both, device_sizes, gate, **options)
            expected = gated_product(*(jnp.asarray(dense(x, both[:, i], sizes)) for i in (0, 1)), gate)
    assert relative(y, expected) < 4e-3


@needs_interpreter
@pytest.mark.parametrize("fmt", ["mxfp8", "mxfp4", "nvfp4", "nvfp4_token", "fp8_128x128"])
def test_products_with_quantised_weights_equal_those_with_the_dequantised(rng, few_blocks, fmt):
    x, w = operands(rng, k=512)
    q = quantize(w, fmt) if fmt == "nvfp4_token" else quantize_weights(w, fmt)
    sizes = SIZES["ends inside boxes"]
    y = mosaic_entry.forward(
        x, q, jnp.asarray(sizes, jnp.int32), out_dtype=jnp.float32, interpret=plgpu.InterpretGPUParams()
    )
    assert relative(y, dense(x, dequantize(q, jnp.float32), sizes)) < 4e-3


@needs_interpreter
@pytest.mark.parametrize("config", [{}, {"cluster": 1, "block_m": 128}], ids=str)
def test_fp8_products_equal_those_of_the_dequantised_operands(rng, monkeypatch, config):
    monkeypatch.setattr(mosaic_entry, "DECODE_ROWS", 0)
    monkeypatch.setattr(tuning, "lookup", lambda *a, **k: {**config, "num_blocks": 2, "stages": 2})
    x = operands(rng, m=152, k=640)[0]  # steps of K that are no multiple of the scales that are copied together
    w = jnp.asarray(rng.standard_normal((4, 256, 640)), jnp.bfloat16)
    qx, qw = quantize(x, "fp8_128"), quantize_weights(w, "fp8_128x128")
    sizes = SIZES["ends inside boxes"]
    y = mosaic_entry.forward(
        qx, qw, jnp.asarray(sizes, jnp.int32), out_dtype=jnp.float32, interpret=plgpu.InterpretGPUParams()
    )
    exact = dense(dequantize(qx, jnp.float32), dequantize(qw, jnp.float32), sizes)
    assert isinstance(qx, QTensor) and relative(y, exact) < 1e-5


@needs_interpreter
def test_gradients_equal_the_dense_formula_and_empty_groups_get_exact_zeros(rng, few_blocks):
    x, w = operands(rng)
    dy = jnp.asarray(rng.standard_normal((M, N)), jnp.bfloat16)
    interpret = plgpu.InterpretGPUParams()
    for sizes in ([7, 0, 100, 20], [0, 0, 0, 0]):
        total, device_sizes = sum(sizes), jnp.asarray(sizes, jnp.int32)
        dx = mosaic_entry.dlhs(dy, w, device_sizes, out_dtype=jnp.bfloat16, interpret=interpret)
        assert relative(dx, dense(dy, np.swapaxes(np.asarray(w, np.float32), 1, 2), sizes)) < 4e-3
        dw = mosaic_entry.drhs(
            dy.at[total:].set(jnp.nan),
            x.at[total:].set(jnp.nan),
            device_sizes,
            num_groups=4,
            out_dtype=jnp.float32,
            interpret=interpret,
        )
        row = 0
        for g, size in enumerate(sizes):
            a, b = (np.asarray(v[row : row + size], np.float32) for v in (dy, x))
            assert relative(dw[g], a.T @ b) < 1e-5 if size else not np.any(dw[g])
            row += size


@needs_interpreter
@pytest.mark.parametrize("kind", ["silu", "swiglu_oai"])
def test_the_gated_product_equals_its_formula(rng, few_blocks, kind):
    x, w = operands(rng, groups=8)
    w = (w * jnp.bfloat16(0.1)).reshape(4, 2, N, K)
    sizes = SIZES["ends inside boxes"]
    y = mosaic_entry.gated(
        x,
        w,
        jnp.asarray(sizes, jnp.int32),
        Gate(kind),
        out_dtype=jnp.bfloat16,
        interpret=plgpu.InterpretGPUParams(),
    )
    gate, up = (jnp.asarray(dense(x, w[:, i], sizes)) for i in (0, 1))
    if kind == "silu":
        expected = jax.nn.silu(gate) * up
    else:
        clipped = jnp.minimum(gate, 7.0)
        expected = clipped * jax.nn.sigmoid(1.702 * clipped) * (jnp.clip(up, -7.0, 7.0) + 1)
        expected = expected.at[sum(sizes) :].set(0)
    assert relative(y, expected) < 4e-3


@needs_interpreter
@pytest.mark.parametrize(
    ("fmt", "kind"),
    [
        ("bf16", "silu"),
        ("mxfp8", "gelu_tanh"),
        ("mxfp4", "silu"),
        ("nvfp4_token", "gelu"),
        ("fp8_128x128", "swiglu_oai"),
    ],
)
def test_the_gated_product_of_few_rows_equals_its_formula_with_a_bias(rng, few_blocks, fmt, kind):
    m, n, sizes = 60, 192, [7, 0, 33, 12]  # N is no multiple of a tile of 128
    x = jnp.asarray(rng.standard_normal((m, 256)), jnp.bfloat16)
    w = jnp.asarray(rng.standard_normal((4, 2, n, 256)) * 0.1, jnp.bfloat16)
    bias = jnp.asarray(rng.standard_normal((4, 2, n)), jnp.bfloat16)
    q = w if fmt == "bf16" else quantize(w, fmt) if fmt == "nvfp4_token" else quantize_weights(w, fmt)
    plain = w if fmt == "bf16" else dequantize(q, jnp.float32)
    how = dict(bias=bias, out_dtype=jnp.float32, interpret=plgpu.InterpretGPUParams())
    y = mosaic_entry.gated(x, q, jnp.asarray(sizes, jnp.int32), Gate(kind), **how)
    total, owner = sum(sizes), np.repeat(np.arange(4), sizes)
    gate, up = (dense(x, plain[:, i], sizes)[:total] + np.asarray(bias[:, i], np.float32)[owner] for i in (0, 1))
    config = MoEConfig(hidden_size=64, intermediate_size=64, num_experts=4, num_experts_per_tok=1, activation=kind)
    assert relative(y[:total], gated_activation(jnp.asarray(gate), jnp.asarray(up), config)) < 2e-6
    assert not np.any(y[total:])


@needs_interpreter
@pytest.mark.parametrize("fmt", ["bf16", "mxfp8", "mxfp4", "nvfp4", "fp8_128x128"])
@pytest.mark.parametrize("k", [768, 320])
def test_k_may_be_no_multiple_of_a_stage_or_a_swizzle(rng, few_blocks, fmt, k):
    x, w = operands(rng, m=60, k=k)
    q = w if fmt == "bf16" else quantize_weights(w, fmt)
    sizes = [7, 0, 33, 12]
    y = mosaic_entry.forward(
        x, q, jnp.asarray(sizes, jnp.int32), out_dtype=jnp.float32, interpret=plgpu.InterpretGPUParams()
    )
    assert relative(y, dense(x, w if fmt == "bf16" else dequantize(q, jnp.float32), sizes)) < 2e-6


@needs_interpreter
@pytest.mark.parametrize("fmt", ["bf16", "fp8_128x128", "mxfp8", "nvfp4"])
@pytest.mark.parametrize(("m", "sizes"), [(4, [0, 3, 0, 1]), (8, [1, 5, 0, 1])])
def test_groups_may_have_more_rows_than_are_likely(rng, few_blocks, fmt, m, sizes):
    """One or two rows of a tile are always copied."""
    x, w = operands(rng, m=m, k=256)
    q = w if fmt == "bf16" else quantize_weights(w, fmt)
    y = mosaic_entry.forward(
        x, q, jnp.asarray(sizes, jnp.int32), out_dtype=jnp.float32, interpret=plgpu.InterpretGPUParams()
    )
    assert relative(y, dense(x, w if fmt == "bf16" else dequantize(q, jnp.float32), sizes)) < 2e-6


@needs_interpreter
@pytest.mark.parametrize(
    ("fmt", "config"),
    [
        ("nvfp4", dict(block_t=8, consumers=4, chunks=1, pieces=2)),
        ("mxfp4", dict(block_t=24, consumers=2, chunks=2)),
        ("nvfp4", dict(block_t=8, consumers=2, chunks=2, warp=True)),
        ("mxfp4", dict(block_t=16, consumers=1, chunks=1, warp=True)),
        ("bf16", dict(block_t=8, consumers=2, chunks=2, rows=32)),
        ("fp8_128x128", dict(block_t=16, consumers=3, chunks=1, rows=32, pieces=2)),
    ],
)
def test_decode_variants_equal_the_dense_formula(rng, fmt, config):
    x, w = operands(rng, m=60, k=512)
    q = w if fmt == "bf16" else quantize_weights(w, fmt)
    sizes = [7, 0, 33, 12]
    with tuning.override({"decode": config | dict(num_blocks=2, stages=2)}):
        y = mosaic_entry.forward(
            x, q, jnp.asarray(sizes, jnp.int32), out_dtype=jnp.float32, interpret=plgpu.InterpretGPUParams()
        )
    assert relative(y, dense(x, w if fmt == "bf16" else dequantize(q, jnp.float32), sizes)) < 2e-6


# --- lowering


def _lower(f, *args):
    return jax.jit(f).trace(*args).lower(lowering_platforms=("cuda",)).as_text()


@pytest.mark.skipif(not hasattr(plgpu, "InterpretGPUParams"), reason="the kernels are for JAX 0.11 on")
@pytest.mark.parametrize(
    "kernel",
    [
        "prefill",
        "gated",
        "gated decode",
        "gated nvfp4",
        "dlhs",
        "drhs",
        "fp8",
        "decode",
        "mxfp8",
        "mxfp4",
        "nvfp4",
    ],
)
def test_every_kernel_lowers_for_a_gpu_that_is_not_there(rng, kernel):
    m, n, k = 4096, 256, 512
    sizes = jnp.asarray([1000, 0, 7, 2000], jnp.int32)
    x, w = jnp.zeros((m, k), jnp.bfloat16), jnp.zeros((4, n, k), jnp.bfloat16)
    options = dict(out_dtype=jnp.bfloat16)
    if kernel.startswith("gated"):
        gated_w, bias = jnp.zeros((4, 2, n, k), jnp.bfloat16), None
        if kernel != "gated":
            x, bias = x[:64], jnp.zeros((4, 2, n), jnp.float32)
        if kernel == "gated nvfp4":
            gated_w = quantize_weights(gated_w, "nvfp4")
        text = _lower(lambda x, w: mosaic_entry.gated(x, w, sizes, Gate(), bias=bias, **options), x, gated_w)
    elif kernel == "dlhs":
        text = _lower(lambda dy, w: mosaic_entry.dlhs(dy, w, sizes, **options), jnp.zeros((m, n), jnp.bfloat16), w)
    elif kernel == "drhs":
        text = _lower(lambda x: mosaic_entry.drhs(x, x, sizes, num_groups=4, **options), x)
    else:
        if kernel == "fp8":
            x, w = quantize(x, "fp8_128"), quantize_weights(w, "fp8_128x128")
        elif kernel not in ("prefill", "decode"):
            w = quantize_weights(w, kernel)
        rows = 64 if kernel == "decode" else m
        x = jax.tree.map(lambda a: a[:rows], x)
        text = _lower(lambda x, w: mosaic_entry.forward(x, w, sizes, **options), x, w)
    assert text.count("mosaic_gpu_v2") == 1
