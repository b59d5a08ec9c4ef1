"""The FP8 gate and up projection that ends in FP8: in the interpreter, its choice, and its machine code."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from fp8_gated_cases import EDGES, assert_close, assert_quantised, exact_operands
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import compat
from pallas_kernels.grouped_matmul import Gate, Problem, gated, gated_product, mosaic_entry, tuning
from pallas_kernels.grouped_matmul.mosaic_fp8_gated_sm90 import GatedFp8Config
from pallas_kernels.grouped_matmul.mosaic_sm90 import SMEM_BYTES
from pallas_kernels.grouped_matmul.mosaic_tiles import table_bytes
from pallas_kernels.quantize import dequantize, get_format, quantize, quantize_weights

needs_interpreter = pytest.mark.skipif(
    not hasattr(plgpu, "InterpretGPUParams"), reason="the GPU interpreter of Pallas is there from JAX 0.11 on"
)


def run(x, w, sizes, gate=Gate("silu"), fmt="fp8_128", **options):  # noqa: B008
    config = {"num_blocks": 2, "stages": 3} | options.pop("config", {})
    with tuning.override({"fp8_gated": config}):
        sizes = jnp.asarray(sizes, jnp.int32)
        how = dict(interpret=plgpu.InterpretGPUParams(), **options)
        return mosaic_entry.gated_quantize(x, w, sizes, gate, get_format(fmt), **how)


@needs_interpreter
@pytest.mark.parametrize(
    ("d", "f", "fmt", "config"),
    [
        (128, 384, "fp8_128_ue8m0", {"cluster": 1, "lead": 1}),
        (384, 256, "fp8_128", {}),
    ],
    ids=str,
)
def test_groups_of_any_size_are_quantised_bit_for_bit(rng, d, f, fmt, config):
    x, w, product = exact_operands(rng, EDGES, tail=70, d=d, f=f)
    q = run(x, w, EDGES, fmt=fmt, config=config)
    assert_quantised(q, product, product.shape[0], fmt)


@needs_interpreter
@pytest.mark.parametrize("kind", ["silu", "swiglu_oai"])
def test_the_result_is_that_of_the_steps(rng, kind):
    sizes, d, f, gate = [70, 0, 100], 256, 256, Gate(kind)
    x = quantize(jnp.asarray(rng.standard_normal((sum(sizes), d)), jnp.bfloat16), "fp8_128")
    w = quantize_weights(jnp.asarray(rng.standard_normal((3, 2, f, d)) * 0.3, jnp.bfloat16), "fp8_128x128")
    q = run(x, w, sizes, gate)
    plain_x, plain_w = dequantize(x, jnp.float32), dequantize(w, jnp.float32)
    owner = np.repeat(np.arange(3), sizes)
    halves = (jnp.einsum("md,mfd->mf", plain_x, plain_w[owner, i]) for i in (0, 1))
    expected = quantize(gated_product(*halves, gate), "fp8_128")
    assert_close(q, expected)


@needs_interpreter
def test_a_part_of_the_groups_gives_its_rows_and_zeros_elsewhere(rng):
    sizes = [65, 3, 40, 1]
    x, w, product = exact_operands(rng, sizes, tail=9, d=128, f=128)
    part = jax.tree.map(lambda a: a[1:3], w)
    product[: sizes[0]], product[sum(sizes[:3]) :] = 0, 0
    for zero_tail in (True, False):
        q = run(x, part, sizes, group_offset=jnp.int32(1), zero_tail=zero_tail)
        assert_quantised(q, product, product.shape[0] if zero_tail else sum(sizes), "fp8_128")


@needs_interpreter
def test_no_rows_and_no_groups_give_nothing_and_zeros(rng):
    x, w, _ = exact_operands(rng, [2], tail=68, d=128, f=128)
    empty = jax.tree.map(lambda a: a[:0], x)
    assert run(empty, w, [0]).shape == (0, 128)
    nobody = run(x, jax.tree.map(lambda a: a[:0], w), [])
    assert nobody.shape == (70, 128) and not np.any(np.asarray(nobody.data, np.float32))


def test_a_block_fits_into_shared_memory_with_the_tables_of_any_number_of_groups():
    assert GatedFp8Config().smem_bytes() + table_bytes(10**6) < SMEM_BYTES
    for lead in (0, 5):
        with pytest.raises(ValueError, match="choose 1 to 4, the stages"):
            GatedFp8Config(lead=lead)


@pytest.mark.parametrize(
    ("changes", "options", "reason"),
    [
        ({}, {}, None),
        ({"groups": 2048}, {}, "more than 64 rows per group"),
        ({"x": "mxfp8"}, {}, "it takes fp8_128 and fp8_128x128"),
        ({"w": "bfloat16"}, {}, "it takes fp8_128 and fp8_128x128"),
        ({"k": 2112}, {}, "K a multiple of 128"),
        ({"n": 704}, {}, "a multiple of 128"),
        ({}, {"fmt": "mxfp8"}, "it makes fp8_128"),
        ({}, {"fmt": "fp8_128_ue8m0"}, None),
        ({}, {"gate": Gate("gelu")}, "'silu' and 'swiglu_oai'"),
        ({}, {"bias": True}, "adds no bias"),
        ({"compute_capability": "8.0"}, {}, "compute capability 9.0"),
    ],
)
def test_the_kernel_says_why_it_cannot(monkeypatch, changes, options, reason):
    monkeypatch.setattr(compat, "KERNELS_SUPPORTED", True)
    monkeypatch.setattr(compat, "REGISTERS_MOVE", True)
    fields = dict(m=65536, n=768, k=2048, groups=128, x="fp8_128", w="fp8_128x128", out="float32", platform="gpu")
    problem = Problem(op="forward", **{**fields, "compute_capability": "9.0", **changes})
    options = dict(gate=Gate("silu"), fmt="fp8_128", bias=False) | options
    said = mosaic_entry.why_not_gated_quantize(
        problem, options["gate"], get_format(options["fmt"]), bias=options["bias"]
    )
    assert said is None if reason is None else reason in said
    monkeypatch.setattr(compat, "REGISTERS_MOVE", False)
    if reason is None:
        said = mosaic_entry.why_not_gated_quantize(problem, Gate("silu"), get_format("fp8_128"), bias=False)
        assert "registers" in said


def test_it_is_used_unless_another_implementation_is_named(rng, monkeypatch):
    monkeypatch.setattr(mosaic_entry, "why_not_gated_quantize", lambda *a, **k: None)
    x, w, _ = exact_operands(rng, [70], tail=0, d=128, f=128)
    ask = lambda name: gated.gated_quantize_obstacle(x, w, Gate(), "fp8_128", implementation=name)  # noqa: E731
    assert "no kernel that joins" in ask("portable")
    assert ask(None) is None and ask("mosaic_sm90") is None


@needs_interpreter
def test_it_lowers_for_a_gpu_that_is_not_there(rng):
    x, w, _ = exact_operands(rng, [128], tail=0, d=256, f=256)
    sizes = jax.ShapeDtypeStruct((1,), jnp.int32)
    f = jax.jit(lambda x, w, s: mosaic_entry.gated_quantize(x, w, s, Gate("silu"), get_format("fp8_128")))
    assert f.trace(x, w, sizes).lower(lowering_platforms=("cuda",)).as_text().count("mosaic_gpu_v2") == 1
