"""The kernels that route, sort and move rows, and lay tiles over them, against XLA on a GPU."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.permute import combine_rows, gather_dequantized, gather_rows, rank_slots, sort_by_expert
from pallas_kernels.quantize import quantize
from pallas_kernels.route import Rule, choose_experts

pytestmark = pytest.mark.gpu


def both(function, *args, **options):
    """The results of the kernel and of XLA."""
    return [
        jax.jit(functools.partial(function, implementation=how, **options))(*args) for how in ("mosaic_sm90", "xla")
    ]


def assert_equal(results):
    for kernel, xla in zip(*map(jax.tree.leaves, results), strict=True):
        np.testing.assert_array_equal(kernel, xla)


@pytest.mark.parametrize("n,k,groups", [(1, 8, 128), (64, 8, 128), (333, 6, 64), (8191, 8, 64), (32768, 8, 128)])
@pytest.mark.parametrize("hot", [False, True])
def test_sort(rng, n, k, groups, hot):
    ids = rng.integers(groups - 1 if hot else -1, groups, (n, k))
    assert_equal(both(sort_by_expert, jnp.asarray(ids, jnp.int32), num_groups=groups, num_places=n * k - n // 3))


@pytest.mark.parametrize(
    "n,columns,dtype",
    [(1, 2048, "bfloat16"), (8192, 2048, "bfloat16"), (513, 7168, "bfloat16"), (100, 24, "uint8"), (64, 1, "float32")],
)
def test_gather(rng, n, columns, dtype):
    x = jnp.asarray(rng.integers(0, 200, (n, columns)), dtype)
    source = jnp.asarray(rng.integers(-1, n, 8 * n), jnp.int32)
    assert_equal(both(gather_rows, x, source, jnp.zeros((n, 8), jnp.int32)))


@pytest.mark.parametrize("n,columns,dtype", [(1, 2048, "bfloat16"), (8192, 2048, "bfloat16"), (513, 24, "uint8")])
def test_gather_of_what_is_read(rng, n, columns, dtype):
    x = jnp.asarray(rng.integers(0, 200, (n, columns)), dtype)
    order = sort_by_expert(jnp.asarray(rng.integers(-1, 64, (n, 8)), jnp.int32), 64)
    kernel, xla = both(gather_rows, x, order.source, order.position, fill=False)
    np.testing.assert_array_equal(kernel[order.source >= 0], xla[order.source >= 0])


@pytest.mark.parametrize("fmt", ["mxfp8", "mxfp4", "fp8_128", "nvfp4", "nvfp4_token"])
@pytest.mark.parametrize("n,columns", [(1, 2048), (8192, 2048), (513, 7168)])
def test_gather_of_quantised_rows(rng, n, columns, fmt):
    q = jax.jit(functools.partial(quantize, fmt=fmt))(jnp.asarray(rng.standard_normal((n, columns)), jnp.bfloat16))
    order = sort_by_expert(jnp.asarray(rng.integers(-1, 64, (n, 8)), jnp.int32), 64)
    kernel, xla = both(gather_dequantized, q, order.source, order.position)
    np.testing.assert_array_equal(kernel[order.source >= 0], xla[order.source >= 0])


@pytest.mark.parametrize("tokens,ranks,local", [(1, 2, 64), (64, 8, 16), (1000, 4, 8), (8192, 2, 64)])
def test_slots(rng, tokens, ranks, local):
    ids = jnp.asarray(rng.integers(-1, ranks * local + 1, (tokens, 8)), jnp.int32)
    for capacity in (tokens, tokens // 2):
        assert_equal(both(rank_slots, ids, num_ranks=ranks, num_local=local, capacity=capacity))


@pytest.mark.parametrize(
    "n,columns,dtype,out",
    [
        (1, 2048, "bfloat16", "bfloat16"),
        (8192, 2048, "bfloat16", "bfloat16"),
        (513, 7168, "bfloat16", "float32"),
        (64, 512, "float32", "float32"),
    ],
)
def test_combine(rng, n, columns, dtype, out):
    y = jnp.asarray(rng.standard_normal((8 * n, columns)), dtype)
    position = jnp.asarray(rng.integers(-1, 8 * n, (n, 8)), jnp.int32)
    weights = jnp.asarray(rng.random((n, 8)), jnp.float32)
    assert_equal(both(combine_rows, y, position, weights, out_dtype=out))


@pytest.mark.parametrize(
    "tokens,experts,rule",
    [
        (1, 128, Rule(8)),
        (8192, 128, Rule(8)),
        (777, 256, Rule(8, score="sigmoid", scaling=2.5, num_groups=8, group_topk=4)),
        (99, 32, Rule(4, order="topk_then_softmax")),
        (64, 64, Rule(8, normalize=False)),
    ],
)
@pytest.mark.parametrize("masked", [False, True])
def test_choice_of_experts(rng, tokens, experts, rule, masked):
    logits = jnp.asarray(rng.standard_normal((tokens, experts)) * 2, jnp.float32)
    bias = jnp.asarray(rng.standard_normal(experts) * 0.1, jnp.float32) if rule.score == "sigmoid" else None
    valid = jnp.arange(tokens) % 7 > 0 if masked else None
    (ids, weights), (expected_ids, expected) = both(choose_experts, logits, bias, rule=rule, valid=valid)
    # Exponentials differ in their last bits, so scores that are that close may change places.
    same = np.asarray(ids == expected_ids)
    assert same.mean() > 0.999
    np.testing.assert_allclose(np.asarray(weights)[same], np.asarray(expected)[same], rtol=1e-5)
