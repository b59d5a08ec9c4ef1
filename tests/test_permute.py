"""Sorting rows by expert and moving them there and back."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.permute import combine_rows, gather_dequantized, gather_rows, merge_duplicates, sort_by_expert
from pallas_kernels.quantize import dequantize, quantize

quantize = jax.jit(quantize, static_argnums=1)
sort = jax.jit(sort_by_expert, static_argnums=1, static_argnames="num_places")


def stable_order(ids, num_groups):
    """What a stable comparison sort says: (row of each place, counts)."""
    flat = ids.reshape(-1)
    valid = (flat >= 0) & (flat < num_groups)
    order = np.argsort(np.where(valid, flat, num_groups), kind="stable")[: valid.sum()]
    return order, np.bincount(flat[valid], minlength=num_groups)


ROUTINGS = {
    "uniform": lambda rng, n, k, g: rng.integers(0, g, (n, k)),
    "with foreign and invalid ids": lambda rng, n, k, g: rng.integers(-3, 2 * g, (n, k)),
    "one hot expert": lambda rng, n, k, g: np.full((n, k), g - 1),
    "all invalid": lambda rng, n, k, g: np.full((n, k), -1),
    "extreme ids": lambda rng, n, k, g: rng.choice([-(2**31), -1, 0, g, 2**31 - 1], (n, k)),
}


@pytest.mark.parametrize("routing", ROUTINGS)
def test_sort_equals_a_stable_comparison_sort_and_histogram_sums_to_valid_ids_F25(rng, routing):
    for n, k, g in ((1, 1, 1), (37, 3, 5), (150, 2, 130)):
        ids = ROUTINGS[routing](rng, n, k, g).astype(np.int32)
        order, counts = stable_order(ids, g)
        out = sort(jnp.asarray(ids), g)
        np.testing.assert_array_equal(out.group_sizes, counts)
        np.testing.assert_array_equal(out.source[: len(order)], order // k)
        np.testing.assert_array_equal(out.source[len(order) :], -1)
        position = np.full(n * k, -1)
        position[order] = np.arange(len(order))
        np.testing.assert_array_equal(out.position.reshape(-1), position)
        assert out.dropped == 0


def test_sort_of_no_rows_is_empty_F27():
    out = sort(jnp.zeros((0, 4), jnp.int32), 3)
    assert out.source.shape == (0,) and out.position.shape == (0, 4)
    np.testing.assert_array_equal(out.group_sizes, [0, 0, 0])


def test_assignments_without_a_place_are_dropped_from_the_end_and_counted_F22(rng):
    for rows, places in ((20, 9), (600, 700)):  # ranked directly, and in chunks
        ids = jnp.asarray(rng.integers(-1, 4, (rows, 2)), jnp.int32)
        full, cut = sort(ids, 4), sort(ids, 4, num_places=places)
        np.testing.assert_array_equal(cut.source, full.source[:places])
        np.testing.assert_array_equal(cut.position, jnp.where(full.position < places, full.position, -1))
        assert cut.dropped == full.group_sizes.sum() - places > 0 and cut.group_sizes.sum() == places


def test_gather_then_combine_with_weights_that_sum_to_one_is_the_identity_F29(rng):
    x = jnp.asarray(rng.integers(-8, 8, (30, 16)), jnp.float32)
    ids = jnp.asarray(rng.integers(0, 5, (30, 2)), jnp.int32)
    s = sort(ids, 5)
    out = combine_rows(gather_rows(x, s.source, s.position), s.position, jnp.full((30, 2), jnp.array([[0.25, 0.75]])))
    np.testing.assert_array_equal(out, x)


def test_nan_in_unread_rows_and_weights_goes_nowhere_F23(rng):
    ids = jnp.asarray(rng.integers(-1, 3, (24, 2)), jnp.int32)
    dead = jnp.all(ids < 0, axis=1)
    assert dead.any()
    x = jnp.where(dead[:, None], jnp.nan, jnp.asarray(rng.normal(size=(24, 8)), jnp.float32))
    w = jnp.where(ids < 0, jnp.nan, jnp.asarray(rng.normal(size=(24, 2)), jnp.float32))
    s = sort(ids, 3)

    def loss(x, w):
        y = gather_rows(x, s.source, s.position)
        y = jnp.where((s.source >= 0)[:, None], y, jnp.nan)  # places that nobody has hold garbage
        return jnp.sum(jnp.square(combine_rows(y, s.position, w)))

    value, (dx, dw) = jax.jit(jax.value_and_grad(loss, (0, 1)))(x, w)
    assert all(np.isfinite(a).all() for a in (value, dx, dw))
    assert not np.any(dx[dead]) and not np.any(np.where(ids < 0, dw, 0))
    _, pull = jax.vjp(lambda w: combine_rows(jnp.zeros((48, 8)), s.position, w), w)
    np.testing.assert_array_equal(np.isnan(pull(jnp.full((24, 8), jnp.nan))[0]), ids >= 0)  # a NaN stays with its rows


def test_gradients_equal_those_of_plain_indexing(rng):
    ids = jnp.asarray(rng.integers(-1, 3, (12, 3)), jnp.int32)
    x, w = jnp.asarray(rng.normal(size=(12, 8)), jnp.float32), jnp.asarray(rng.normal(size=(12, 3)), jnp.float32)
    s = sort(ids, 3)

    def plain(x, w):
        y = jnp.sin(jnp.where((s.source >= 0)[:, None], x[jnp.maximum(s.source, 0)], 0))
        taken = jnp.where((s.position >= 0)[..., None], y[jnp.maximum(s.position, 0)], 0)
        return jnp.sum(jnp.cos(jnp.sum(taken * w[..., None], axis=1)))

    def ours(x, w):
        y = jnp.sin(gather_rows(x, s.source, s.position))
        return jnp.sum(jnp.cos(combine_rows(y, s.position, w)))

    for a, b in zip(jax.jit(jax.grad(ours, (0, 1)))(x, w), jax.jit(jax.grad(plain, (0, 1)))(x, w), strict=True):
        np.testing.assert_allclose(a, b, atol=2e-6)
    assert "scatter-add" not in str(jax.make_jaxpr(jax.grad(ours, (0, 1)))(x, w))

    def twice(f):
        return jax.jit(jax.grad(lambda x: jnp.sum(jnp.sin(jax.grad(f)(x, w)))))(x)

    np.testing.assert_allclose(twice(ours), twice(plain), atol=2e-6)


def test_moving_quantised_rows_equals_quantising_moved_rows_bit_for_bit(rng):
    x = jnp.asarray(rng.normal(size=(20, 64)), jnp.bfloat16)
    ids = jnp.asarray(rng.integers(-1, 3, (20, 2)), jnp.int32)
    s = sort(ids, 3)
    valid = s.source >= 0
    move = jax.jit(gather_rows)
    for fmt in ("mxfp8", "nvfp4_token", "fp8_128"):
        moved = move(quantize(x, fmt), s.source, s.position)
        after = quantize(move(x, s.source, s.position), fmt)
        for a, b in zip(jax.tree.leaves(moved), jax.tree.leaves(after), strict=True):
            np.testing.assert_array_equal(np.asarray(a)[valid], np.asarray(b)[valid])
        assert not np.any(jax.jit(dequantize)(moved)[~valid])


@pytest.mark.parametrize("fmt", ["mxfp8", "nvfp4_token", "nvfp4", "fp8_128"])
def test_dequantising_rows_on_their_way_is_moving_them_and_dequantising_them(rng, fmt):
    x = jnp.asarray(rng.standard_normal((20, 128)), jnp.bfloat16)
    order = sort(jnp.asarray(rng.integers(-1, 4, (20, 2)), jnp.int32), 4)
    q, used = quantize(x, fmt), order.source >= 0
    moved = gather_dequantized(q, order.source, order.position)
    expected = dequantize(gather_rows(q, order.source, order.position))
    np.testing.assert_array_equal(moved[used], expected[used])
    taken = lambda x: gather_dequantized(q, order.source, order.position, straight_through=x)  # noqa: E731
    plain = lambda x: gather_rows(x, order.source, order.position)  # noqa: E731
    dy = jnp.asarray(rng.standard_normal(expected.shape), jnp.bfloat16)
    np.testing.assert_array_equal(jax.vjp(taken, x)[1](dy)[0], jax.vjp(plain, x)[1](dy)[0])


def test_quantised_rows_that_share_scales_cannot_be_moved(rng):
    q = quantize(jnp.ones((128, 128), jnp.bfloat16), "fp8_128x128")
    with pytest.raises(ValueError, match=r"fp8_128x128.*scales for each row"):
        gather_rows(q, jnp.zeros((4,), jnp.int32), jnp.zeros((128, 1), jnp.int32))


def test_merging_duplicates_keeps_the_sum_of_each_experts_weights(rng):
    ids = jnp.asarray(rng.integers(-1, 3, (40, 6)), jnp.int32)
    w = jnp.asarray(rng.integers(1, 9, (40, 6)), jnp.float32)
    merged, total = jax.jit(merge_duplicates)(ids, w)
    for e in range(3):
        mine = np.asarray(ids) == e
        assert (np.asarray(merged) == e).sum(1).max() == 1
        np.testing.assert_array_equal(np.where(np.asarray(merged) == e, total, 0).sum(1), np.where(mine, w, 0).sum(1))
    assert not np.any(np.where(merged < 0, total, 0))
    s = sort(merged, 3, num_places=40 * 3)
    assert s.dropped == 0
