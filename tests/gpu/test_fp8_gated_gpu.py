"""The FP8 gate and up projection that ends in FP8, on a Hopper GPU: bit for bit, and against the steps apart."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from fp8_gated_cases import EDGES, assert_close, assert_quantised, exact_operands
from matmul_helpers import normal, relative, weights

from pallas_kernels.grouped_matmul import Gate, Problem, mosaic_entry, tuning
from pallas_kernels.quantize import dequantize, get_format, quantize, swiglu_quantize

pytestmark = pytest.mark.gpu
CONFIGS = [{}, {"lead": 1}, {"cluster": 1}, {"cluster": 1, "lead": 1, "stages": 3}]


@pytest.fixture(autouse=True)
def hopper():
    device = jax.devices()[0]
    capability = getattr(device, "compute_capability", None)
    problem = Problem(
        "forward", 65536, 768, 2048, 128, "fp8_128", "fp8_128x128", "float32", device.platform, capability
    )
    reason = mosaic_entry.why_not_gated_quantize(problem, Gate("silu"), get_format("fp8_128"), bias=False)
    if reason is not None:
        pytest.skip(reason)


def joined(gate=Gate("silu"), fmt="fp8_128", **options):  # noqa: B008
    """The kernel, jitted; group sizes and the offset are data."""

    def run(x, w, sizes, offset=None):
        return mosaic_entry.gated_quantize(x, w, sizes, gate, get_format(fmt), group_offset=offset, **options)

    return jax.jit(run)


def assert_zero(q):
    zeros = quantize(jnp.zeros(q.shape, jnp.float32), q.format, implementation="reference")
    np.testing.assert_array_equal(q.block_scale, zeros.block_scale)
    np.testing.assert_array_equal(np.asarray(q.data).view(np.uint8), np.asarray(zeros.data).view(np.uint8))


def poison(m, f):
    """Leaves NaN in the memory that the next result of this size is likely to take."""
    jax.block_until_ready([jnp.full((m, f), jnp.nan, jnp.float8_e4m3fn), jnp.full((f // 128, m), jnp.nan, jnp.float32)])


@pytest.mark.parametrize(("d", "f"), [(128, 128), (384, 256), (2048, 768), (512, 1408)])
@pytest.mark.parametrize("config", CONFIGS, ids=str)
def test_groups_of_any_size_are_quantised_bit_for_bit(rng, config, d, f):
    sizes = EDGES + EDGES[::-1] + [700]
    x, w, product = exact_operands(rng, sizes, tail=70, d=d, f=f)
    with tuning.override({"fp8_gated": config}):
        run = joined(fmt="fp8_128_ue8m0" if d == 384 else "fp8_128")
        for _ in range(3):  # what one warpgroup overwrites too early is not overwritten every time
            poison(*product.shape)
            q = run(x, w, jnp.asarray(sizes, jnp.int32))
            assert_quantised(q, product, product.shape[0], q.format)


@pytest.mark.parametrize("kind", ["silu", "swiglu_oai"])
@pytest.mark.parametrize("spread", ["even", "zipf", "none"])
def test_the_result_is_that_of_the_steps(rng, kind, spread):
    m, groups, f, d, gate = 4096, 16, 768, 1024, Gate(kind)
    p = {"even": np.ones(groups), "zipf": 1 / np.arange(1, groups + 1), "none": np.ones(groups)}[spread]
    sizes = rng.multinomial(0 if spread == "none" else m - 100, p / p.sum()).astype(np.int32)
    x, (w, _) = jax.jit(lambda x: quantize(x, "fp8_128"))(normal(rng, m, d)), weights("fp8_128x128", groups, 2, f, d)

    def apart(x, w, sizes):
        flat = jax.tree.map(lambda a: a.reshape(groups, -1, a.shape[-1]), w)
        both = mosaic_entry.forward(x, flat, sizes, out_dtype=jnp.float32)
        return swiglu_quantize(both, "fp8_128", activation=kind, num_valid_rows=jnp.sum(sizes))

    poison(m, f)
    got, expected = joined(gate)(x, w, jnp.asarray(sizes)), jax.jit(apart)(x, w, jnp.asarray(sizes))
    rows = int(sizes.sum())  # of what is behind, the steps leave anything
    valid, wanted = (jax.tree.map(lambda a: a[:rows], q) for q in (got, expected))
    if rows:
        assert_close(valid, wanted)
        values = [np.asarray(jax.jit(lambda q: dequantize(q, jnp.float32))(q)) for q in (valid, wanted)]
        assert relative(*values) < 1e-3
    assert_zero(jax.tree.map(lambda a: a[rows:], got))


def test_a_part_of_the_groups_gives_its_rows_and_zeros_elsewhere(rng):
    sizes = [65, 3, 0, 400, 1]
    x, w, product = exact_operands(rng, sizes, tail=9, d=256, f=256)
    part = jax.tree.map(lambda a: a[1:4], w)
    product[: sizes[0]], product[sum(sizes[:4]) :] = 0, 0
    for zero_tail in (True, False):
        poison(*product.shape)
        q = joined(zero_tail=zero_tail)(x, part, jnp.asarray(sizes, jnp.int32), jnp.int32(1))
        assert_quantised(q, product, product.shape[0] if zero_tail else sum(sizes), "fp8_128")


@pytest.mark.parametrize("groups", [1, 127, 128, 129, 1100])
def test_any_number_of_groups(rng, groups):
    sizes = rng.multinomial(3000, np.full(groups, 1 / groups)).tolist()
    x, w, product = exact_operands(rng, sizes, tail=5, d=128, f=128)
    poison(*product.shape)
    assert_quantised(joined()(x, w, jnp.asarray(sizes, jnp.int32)), product, product.shape[0], "fp8_128")
