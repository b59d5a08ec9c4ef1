"""The kernels' entry points where there is no GPU: the same results from the reference, and code for CUDA."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from aot_report import aot_report

from jmoe import payload
from pallas_kernels.quantize import (
    FORMATS,
    dequantize,
    gather_quantize,
    quantize,
    quantize_rows,
    swiglu_quantize,
)

JAX = tuple(int(p) for p in jax.__version__.split(".")[:2])
needs_kernels = pytest.mark.skipif(JAX < (0, 11), reason="kernels are written for JAX >= 0.11")
X = jnp.asarray(np.random.default_rng(0).standard_normal((6, 256)), jnp.bfloat16)


def as_bytes(tree):
    return [np.asarray(v)[None].view(np.uint8) for v in jax.tree.leaves(tree)]


def same(a, b):
    for x, y in zip(as_bytes(a), as_bytes(b), strict=True):
        np.testing.assert_array_equal(x, y)


def test_the_implementation_is_picked_by_where_the_program_runs():
    q = jax.jit(lambda x: quantize(x, "nvfp4_token"))(X)
    same(q, jax.jit(lambda x: quantize(x, "nvfp4_token", implementation="reference"))(X))
    same(jax.jit(dequantize)(q), jax.jit(lambda q: dequantize(q, implementation="reference"))(q))
    both = jax.vmap(lambda x: quantize(x, "nvfp4_token"))(X.reshape(2, 3, 256))
    np.testing.assert_array_equal(np.asarray(both.data).reshape(6, 128), np.asarray(q.data))


@pytest.mark.parametrize("wire", ["mxfp8", "fp8_128", "nvfp4", "nvfp4_token"])
def test_rows_quantised_into_the_wire_layout_equal_packed_qtensors(wire):
    layout = payload.row_layout(256, wire, 3)
    rng = np.random.default_rng(1)
    ids = jnp.asarray(rng.integers(-1, 9, (6, 3)), jnp.int32)
    weights = jnp.asarray(rng.random((6, 3)), jnp.float32)
    g = jnp.float32(1 / 700) if wire == "nvfp4" else None

    @jax.jit
    def straight(x, ids, weights):
        tail = jnp.concatenate([ids, jax.lax.bitcast_convert_type(weights, jnp.int32)], axis=1)
        return quantize_rows(
            x,
            wire,
            tail,
            row_bytes=layout.row_bytes,
            scale_offset=layout.scale_offset,
            row_scale_offset=layout.row_scale_offset if layout.row_scale_bytes else None,
            tail_offset=layout.ids_offset,
            global_scale=g,
        )

    @jax.jit
    def in_two_steps(x, ids, weights):
        return payload.pack(quantize(x, wire, global_scale=g), ids, weights, layout)

    same(straight(X, ids, weights), in_two_steps(X, ids, weights))


def test_gathered_rows_are_quantised_and_sentinels_give_zeros():
    indices = jnp.asarray([3, -1, 0, 6, 5, 2**31 - 1], jnp.int32)
    for fmt in ("mxfp8", "nvfp4_token"):
        got = jax.jit(lambda x, i, fmt=fmt: gather_quantize(x, i, fmt))(X, indices)
        whole = jax.jit(lambda x, fmt=fmt: quantize(x, fmt))(X)
        np.testing.assert_array_equal(np.asarray(got.data)[[0, 2, 4]], np.asarray(whole.data)[[3, 0, 5]])
        assert not np.asarray(dequantize(got)).astype(np.float32)[[1, 3, 5]].any()
    assert gather_quantize(X[:0], indices, "mxfp8").shape == (6, 256)
    assert gather_quantize(X, indices[:0], "mxfp8").shape == (0, 256)


def test_swiglu_is_quantised_from_float32():
    gate, up = np.split(np.asarray(X).astype(np.float64), 2, axis=1)
    for activation in ("silu", "swiglu_oai"):
        if activation == "silu":
            want = gate / (1 + np.exp(-gate)) * up
        else:
            g = np.minimum(gate, 7)
            want = g / (1 + np.exp(-1.702 * g)) * (np.clip(up, -7, 7) + 1)
        got = jax.jit(lambda x, a=activation: dequantize(swiglu_quantize(x, "mxfp8", activation=a), jnp.float32))(X)
        assert 0.01 < np.linalg.norm(got - want) / np.linalg.norm(want) < 0.04


def test_entry_points_say_what_they_cannot_do():
    tail = jnp.zeros((6, 4), jnp.int32)
    rows = dict(row_bytes=304, scale_offset=256, tail_offset=264)
    for call, words in (
        (lambda: gather_quantize(X, jnp.zeros(3, jnp.int32), "nvfp4"), "scales of its own"),
        (lambda: swiglu_quantize(X, "mxfp8", activation="relu"), "choose 'silu'"),
        (lambda: swiglu_quantize(X, "nvfp4"), "scales of its own"),
        (lambda: quantize_rows(X, "mxfp8", tail, **{**rows, "tail_offset": 262}), "multiples of 4"),
        (lambda: quantize_rows(X, "mxfp8", tail, **{**rows, "scale_offset": 250}), "the order is"),
        (lambda: quantize_rows(X, "mxfp8", tail, **{**rows, "row_bytes": 272}), "hold the 280 bytes"),
        (lambda: quantize_rows(X, "mxfp8", tail, row_scale_offset=264, **rows), "one per token"),
        (lambda: quantize_rows(X, "nvfp4", tail, **{**rows, "scale_offset": 128}), "needs global_scale"),
        (lambda: quantize(X, "fp8_128x128", implementation="mosaic_sm90"), "shares scales between rows"),
        (lambda: quantize(X[:, :40], "mxfp8", implementation="mosaic_sm90"), "multiples of 16"),
    ):
        with pytest.raises(ValueError, match=words):
            call()


@needs_kernels
@pytest.mark.parametrize("fmt", [name for name, f in FORMATS.items() if f.block_rows == 1])
def test_compiling_for_cuda_gives_one_kernel_and_no_cast_of_xlas(fmt):
    scale = jnp.float32(1) if FORMATS[fmt].global_scale == "tensor" else None
    text = cuda_text(lambda x: quantize(x, fmt, global_scale=scale, implementation="mosaic_sm90"), (300, 2880))
    assert text.count("custom_call @mosaic_gpu") == 1
    assert "f8E8M0" not in text and "stablehlo.reduce" not in text


def cuda_text(f, shape):
    return jax.jit(f).trace(jax.ShapeDtypeStruct(shape, jnp.bfloat16)).lower(lowering_platforms=("cuda",)).as_text()


@needs_kernels
@pytest.mark.parametrize(
    ("fmt", "options", "kernels"),
    [
        ("mxfp8", {}, 1),
        ("nvfp4_token", {}, 1),
        ("nvfp4", {"global_scale": jnp.float32(1)}, 1),
        ("nvfp4", {}, 2),  # the scale from the data takes a pass of its own
        ("mxfp8", {"layout": "swizzled"}, 1),
        ("fp8_128x128", {}, 0),
    ],
)
def test_none_takes_the_kernel_wherever_it_can(fmt, options, kernels):
    text = cuda_text(lambda x: quantize(x, fmt, **options), (300, 2880))
    assert text.count("custom_call @mosaic_gpu") == kernels


@pytest.mark.aot
@needs_kernels
@pytest.mark.slow
@pytest.mark.parametrize("arch", ["sm_90", "sm_100"])
def test_kernels_compile_to_machine_code_without_spills(arch):
    report = aot_report("aot_quantize.py", arch)
    print(arch, report)
    assert len(report) >= 20
    for name, (registers, spilled, _) in report.items():
        assert 16 <= registers <= 200 and spilled == 0, (name, registers, spilled)
