"""The kernels for a few tokens, on a GPU, against the dequantised operands' product in float32."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from matmul_helpers import normal, relative, weights, with_nan

from pallas_kernels import decode
from pallas_kernels.grouped_matmul import Gate, gated_product
from pallas_kernels.route import Rule, choose_experts

pytestmark = pytest.mark.gpu
FORMATS = [None, "nvfp4", "mxfp4", "mxfp8", "fp8_128x128"]
#: tokens, experts of each, D, F, E: a decode step; more tokens than experts; sizes of no whole tile or unit
CASES = [(1, 8, 2048, 768, 32), (4, 8, 2048, 768, 9), (3, 4, 2880, 1440, 6), (8, 1, 7168, 256, 4)]


def silu(gate, up):
    return np.asarray(gated_product(jnp.asarray(gate), jnp.asarray(up), Gate()))


@pytest.mark.parametrize("fmt", FORMATS)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_experts_equal_float32(rng, fmt, case):
    tokens, top_k, d, f, e = case
    if fmt == "fp8_128x128":
        d, f = d - d % 128, f - f % 128
    (gate_up, plain_up), (down, plain_down) = weights(fmt, e, 2, f, d, scale=d**-0.5), weights(fmt, e, d, f, scale=0.05)
    x = normal(rng, tokens, d)

    @jax.jit
    def run(x, ids, factors, gate_up, down):
        return decode.experts(x, ids, factors, gate_up, down, out_dtype=jnp.float32, implementation="mosaic_sm90")

    for low in (0, -2):  # all experts there; some below and above what there is
        ids = rng.integers(low, e - low, (tokens, top_k)).astype(np.int32)
        valid = (ids >= 0) & (ids < e)
        factors = np.where(valid, rng.standard_normal(ids.shape), np.nan).astype(np.float32)
        args = jnp.asarray(ids), jnp.asarray(factors), gate_up, down
        y = np.asarray(run(x, *args))
        expected = np.zeros((tokens, d), np.float32)
        for t, k in zip(*np.nonzero(valid), strict=True):
            both = plain_up[ids[t, k]] @ np.asarray(x[t], np.float32)
            hidden = silu(both[0], both[1]).astype(jnp.bfloat16).astype(np.float32)
            expected[t] += factors[t, k] * (plain_down[ids[t, k]] @ hidden)
        assert relative(y, expected) < 4e-3
        np.testing.assert_array_equal(y, run(x, *args))  # sums have one order
        dirty = np.asarray(run(with_nan(x, 0), *args))
        assert np.isnan(dirty[0]).all() or not valid[0].any()
        np.testing.assert_array_equal(dirty[1:], y[1:])


@pytest.mark.parametrize("fmt", [None, "nvfp4"])
@pytest.mark.parametrize("rule", [Rule(8), Rule(8, score="sigmoid", num_groups=4, group_topk=2, scaling=2.5)], ids=str)
def test_one_token_and_its_choice_equal_both_in_turn(rng, fmt, rule):
    e, d, f = 128, 2048, 256
    (gate_up, _), (down, _) = weights(fmt, e, 2, f, d, scale=d**-0.5), weights(fmt, e, d, f, scale=0.05)
    bias = jnp.asarray(rng.standard_normal(e), jnp.float32) if rule.num_groups else None
    x = normal(rng, 1, d)

    @jax.jit
    def run(logits, valid):
        how = dict(out_dtype=jnp.float32, implementation="mosaic_sm90")
        y, ids, factors = decode.routed_experts(x, logits, rule, gate_up, down, bias=bias, valid=valid, **how)
        chosen = choose_experts(logits, bias, rule, valid=valid, implementation="mosaic_sm90")
        return (y, ids, factors), (decode.experts(x, *chosen, gate_up, down, **how), *chosen)

    for valid in (True, False):
        for _ in range(4):
            logits = jnp.asarray(rng.standard_normal((1, e)) * 3, jnp.float32)
            for ours, theirs in zip(*run(logits, jnp.asarray([valid])), strict=True):
                np.testing.assert_array_equal(ours, theirs)
