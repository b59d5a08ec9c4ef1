"""Grouped matmul: every implementation that runs here against the dense reference."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.grouped_matmul import (
    IMPLEMENTATIONS,
    Implementation,
    Problem,
    api,
    grouped_matmul,
    grouped_matmul_reference,
    portable,
)
from pallas_kernels.quantize import QTensor, dequantize, quantize, quantize_weights, swizzle_scales

M, N, K, G = 150, 24, 32, 6
SIZES = {
    "0, 1, 7, 129 rows and empty ends": [0, 1, 7, 0, 129, 0],
    "one hot group": [0, 0, 150, 0, 0, 0],
    "all empty": [0] * 6,
    "equal": [25] * 6,
    "single rows": [1] * 6,
}


def usable(name, dtype="float32"):
    problem = Problem("forward", M, N, K, G, dtype, dtype, dtype, jax.default_backend(), None)
    return next(i for i in IMPLEMENTATIONS if i.name == name).why_not(problem)


@pytest.fixture(params=[i.name for i in IMPLEMENTATIONS])
def implementation(request):
    reason = usable(request.param)
    if reason is not None:
        pytest.skip(f"{request.param}: {reason}")
    return request.param


def arrays(rng, dtype=jnp.float32, m=M):
    return (
        jnp.asarray(rng.normal(size=(m, K)), dtype),
        jnp.asarray(rng.normal(size=(G, N, K)), dtype),
        jnp.asarray(rng.normal(size=(m, N)), dtype),
    )


def forward_and_gradients(function):
    """(out, dx, dw) of function(x, w, sizes) for a cotangent, jitted."""

    @jax.jit
    def run(x, w, dy, sizes):
        y, pull = jax.vjp(lambda x, w: function(x, w, sizes), x, w)
        return y, *pull(dy)

    return run


def relative(a, b):
    a, b = np.asarray(a, np.float64), np.asarray(b, np.float64)
    return np.linalg.norm(a - b) / max(np.linalg.norm(b), 1e-30)


@pytest.mark.parametrize(("dtype", "bound"), [("float32", 1e-6), ("bfloat16", 4e-3)])
def test_outputs_and_gradients_equal_the_dense_formula_for_every_kind_of_group_sizes(rng, implementation, dtype, bound):
    x, w, dy = arrays(rng, dtype)
    run = forward_and_gradients(lambda x, w, s: grouped_matmul(x, w, s, implementation=implementation))
    wide = [a.astype(jnp.float32) for a in (x, w, dy)]
    dense = forward_and_gradients(grouped_matmul_reference)
    for name, sizes in SIZES.items():
        sizes = jnp.asarray(sizes, jnp.int32)
        out = run(x, w, dy, sizes)
        for a, b, like in zip(out, dense(*wide, sizes), (dy, x, w), strict=True):
            assert a.dtype == like.dtype and relative(a, b) < bound, name
        y, dx, dw = out
        assert not np.any(y[sizes.sum() :]) and not np.any(dx[sizes.sum() :]), name
        assert not np.any(np.asarray(dw)[np.asarray(sizes) == 0]), name


def test_nan_rows_stay_in_their_group_and_rows_past_the_sum_are_zero_F23(rng, implementation):
    x, w, dy = arrays(rng)
    sizes = jnp.asarray([30, 1, 0, 49, 20, 0], jnp.int32)
    bad = slice(31, 80)  # group 3
    run = forward_and_gradients(lambda x, w, s: grouped_matmul(x, w, s, implementation=implementation))
    clean = run(x, w, dy, sizes)
    dirty = run(x.at[bad].set(jnp.nan).at[100:].set(jnp.nan), w, dy.at[bad].set(jnp.nan).at[100:].set(jnp.nan), sizes)
    for a, b in zip(clean[:2], dirty[:2], strict=True):
        assert np.isnan(b[bad]).all()
        np.testing.assert_array_equal(np.delete(a, bad, 0), np.delete(b, bad, 0))
        assert not np.any(b[100:])
    assert np.isnan(dirty[2][3]).all()
    np.testing.assert_array_equal(np.delete(clean[2], 3, 0), np.delete(dirty[2], 3, 0))


def test_nan_weights_of_an_empty_group_are_not_read_F25(rng, implementation):
    x, w, _ = arrays(rng)
    sizes = jnp.asarray([75, 0, 0, 75, 0, 0], jnp.int32)
    w = w.at[jnp.asarray([1, 2, 4, 5])].set(jnp.nan)
    assert np.isfinite(grouped_matmul(x, w, sizes, implementation=implementation)).all()


def test_parts_of_the_groups_sum_to_the_whole_also_in_the_gradients(rng, implementation):
    x, w, dy = arrays(rng)
    sizes = jnp.asarray([30, 1, 0, 49, 20, 40], jnp.int32)

    @jax.jit
    def part(x, w, dy, offset):
        def function(x, w):
            return grouped_matmul(x, w, sizes, group_offset=offset, implementation=implementation)

        y, pull = jax.vjp(function, x, w)
        return y, *pull(dy)

    whole = forward_and_gradients(lambda x, w, s: grouped_matmul(x, w, s, implementation=implementation))
    y, dx, dw = whole(x, w, dy, sizes)
    parts = [part(x, w[i : i + 2], dy, i) for i in (0, 2, 4)]
    # Fewer groups may mean other tiles, and some CPUs then sum in another order.
    ours = sum(p[0] for p in parts), sum(p[1] for p in parts), np.concatenate([p[2] for p in parts])
    for a, b in zip(ours, (y, dx, dw), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5)
    # An offset whose window reaches past the last group: the groups beyond are empty, those inside do not move.
    np.testing.assert_array_equal(part(x, w[4:], dy, 5)[0][120:], part(x, w[4:][::-1], dy, 4)[0][120:])


def test_results_do_not_change_from_run_to_run_F32(rng, implementation):
    x, w, dy = arrays(rng, "bfloat16")
    sizes = jnp.asarray([30, 1, 0, 49, 20, 0], jnp.int32)
    run = forward_and_gradients(lambda x, w, s: grouped_matmul(x, w, s, implementation=implementation))
    first = run(x, w, dy, sizes)
    for _ in range(20):
        for a, b in zip(first, run(x, w, dy, sizes), strict=True):
            np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize("num_rows", [1, 7, 64, 65, 191, 192, 193])
def test_every_advertised_block_m_gives_the_same_finite_result_F50(rng, num_rows):
    x, w, dy = arrays(rng, m=num_rows)
    sizes = np.full(G, num_rows // G)
    sizes[2] += num_rows - sizes.sum()
    sizes = jnp.asarray(sizes, jnp.int32)

    @jax.jit
    def run(x, w, dy):
        options = dict(out_dtype=jnp.float32)
        return [
            (
                portable.grouped_matmul(x, w, sizes, block_m=block, **options),
                portable.grouped_matmul_drhs(dy, x, sizes, num_groups=G, block_m=block, **options),
            )
            for block in sorted({min(b, num_rows) for b in portable.BLOCK_M})
        ]

    expected = forward_and_gradients(grouped_matmul_reference)(x, w, dy, sizes)
    for y, dw in run(x, w, dy):
        assert relative(y, expected[0]) < 1e-6 and relative(dw, expected[2]) < 1e-6


def test_no_rows_give_no_rows_and_zero_gradients_F27(rng, implementation):
    x, w, dy = arrays(rng, m=0)
    run = forward_and_gradients(lambda x, w, s: grouped_matmul(x, w, s, implementation=implementation))
    y, dx, dw = run(x, w, dy, jnp.zeros((G,), jnp.int32))
    assert y.shape == (0, N) and dx.shape == (0, K) and not np.any(dw)


WEIGHT_FORMATS = ["fp8_128x128", "mxfp8", "mxfp4", "nvfp4"]


@pytest.mark.parametrize("fmt", WEIGHT_FORMATS)
def test_quantised_weights_equal_their_dequantised_form_and_take_no_gradient(rng, implementation, fmt):
    x, w, dy = arrays(rng)
    w = w * jnp.exp2(jnp.arange(G, dtype=jnp.float32))[:, None, None]  # a scale of its own for each group
    sizes = jnp.asarray([30, 1, 0, 49, 20, 0], jnp.int32)

    @jax.jit
    def both(x, w, dy):
        q = quantize_weights(w, fmt)
        wide = dequantize(q, jnp.float32)
        out = []
        for weight in (q, wide):
            y, pull = jax.vjp(lambda x, v=weight: grouped_matmul(x, v, sizes, implementation=implementation), x)
            out.append((y, *pull(dy)))
        return out, wide

    (ours, plain), wide = both(x, w, dy)
    for a, b in zip(ours, plain, strict=True):
        np.testing.assert_array_equal(a, b)
    assert 1e-3 < relative(wide, w) < 0.15  # it did quantise


@pytest.mark.parametrize("fmt", ["fp8_128", "mxfp8", "mxfp4", "nvfp4_token"])
def test_quantised_rows_equal_their_dequantised_form_and_pass_the_gradient_straight_through(rng, implementation, fmt):
    x, w, dy = arrays(rng)
    sizes = jnp.asarray([30, 1, 0, 49, 20, 0], jnp.int32)

    @jax.jit
    def both(x, w, dy):
        q = quantize(x, fmt, alignment=32 if "mx" in fmt else 0)
        wide = dequantize(q, jnp.float32)

        def ours(stand_in, w):
            return grouped_matmul(q, w, sizes, straight_through=stand_in, implementation=implementation)

        out = []
        for function, rows in ((ours, x * jnp.nan), (lambda r, w: grouped_matmul_reference(r, w, sizes), wide)):
            y, pull = jax.vjp(function, rows, w)
            out.append((y, *pull(dy)))
        return out, wide

    (ours, plain), wide = both(x, w, dy)
    for a, b in zip(ours, plain, strict=True):
        assert relative(a, b) < 1e-6
    assert 1e-3 < relative(wide, x) < 0.15


def test_a_global_scale_for_each_output_column_is_applied(rng, implementation):
    x, w, _ = arrays(rng)
    sizes = jnp.asarray([25] * G, jnp.int32)

    @jax.jit
    def run(x, w):
        q = quantize_weights(w, "nvfp4")
        columns = jnp.exp2((jnp.arange(G * N, dtype=jnp.float32) % 5).reshape(G, N))
        scaled = QTensor(q.data, q.block_scale, q.global_scale[:, None] * columns, q.format, q.k)
        wide = dequantize(q, jnp.float32) * columns[:, :, None]
        return grouped_matmul(x, scaled, sizes, implementation=implementation), grouped_matmul_reference(x, wide, sizes)

    assert relative(*run(x, w)) < 1e-6


def test_work_is_that_of_the_occupied_groups_only(rng):
    """No product of all rows with all groups, and no dequantised copy of all weights, is anywhere in the program."""
    x, w, _ = arrays(rng)
    sizes = jnp.asarray([25] * G, jnp.int32)
    largest = max(M * N, M * K, G * N * K)

    def shapes(fun, *args):
        compiled = jax.jit(fun).lower(*args).as_text()
        for text in re.findall(r"tensor<((?:\d+x)+)(?:f32|bf16)>", compiled):
            yield int(np.prod([int(d) for d in text[:-1].split("x")]))

    assert max(shapes(lambda x, w: grouped_matmul(x, w, sizes), x, w)) == largest
    assert max(shapes(lambda x, w: grouped_matmul_reference(x, w, sizes), x, w)) == G * M * N
    q = jax.jit(lambda w: quantize_weights(w, "mxfp8"))(w)
    assert max(shapes(lambda x, q: grouped_matmul(x, q, sizes), x, q)) == max(M * N, M * K) > N * K


def test_arguments_that_do_not_fit_are_refused_with_what_would():
    x, w, sizes = jnp.ones((8, 128)), jnp.ones((2, 4, 128)), jnp.asarray([4, 4], jnp.int32)
    q = jax.jit(lambda x: quantize(x, "mxfp8"))(x)
    swizzled = QTensor(q.data, swizzle_scales(q.block_scale), None, q.format, q.k, "swizzled")
    tiles = jax.jit(lambda x: quantize(x, "fp8_128x128"))(x)
    for message, call in (
        (r"same K.*transpose w", lambda: grouped_matmul(x, jnp.ones((2, 128, 4)), sizes)),
        (r"must be \[2\].*group_offset", lambda: grouped_matmul(x, w, jnp.ones((3,), jnp.int32))),
        (r"2 weights and group_sizes of float32", lambda: grouped_matmul(x, w, jnp.ones((2,)))),
        (r"0 weights and.*one weight or more", lambda: grouped_matmul(x, w[:0], sizes[:0])),
        (r"swizzled.*unswizzle_scales", lambda: grouped_matmul(swizzled, w, sizes)),
        (r"fp8_128x128.*scale for each row", lambda: grouped_matmul(tiles, w, sizes)),
        (r"x is an array of int8.*QTensor", lambda: grouped_matmul(x.astype(jnp.int8), w, sizes)),
        (r"w is an array of uint8.*QTensor", lambda: grouped_matmul(x, w.astype(jnp.uint8), sizes)),
        (r"out_dtype=int32 must be a float type", lambda: grouped_matmul(x, w, sizes, out_dtype=jnp.int32)),
        (r"QTensor x of the same shape", lambda: grouped_matmul(x, w, sizes, straight_through=x)),
        (r"no implementation='cutlass'.*'portable'", lambda: grouped_matmul(x, w, sizes, implementation="cutlass")),
    ):
        with pytest.raises(ValueError, match=message):
            call()


def test_an_implementation_that_cannot_says_why_and_the_default_takes_the_next(rng, monkeypatch):
    def never(*args, **kwargs):
        raise AssertionError("must not be called")

    calls = []
    base = IMPLEMENTATIONS[-1]

    def forward(*args, **kwargs):
        calls.append("forward")
        return base.forward(*args, **kwargs)

    fake = [
        Implementation("blackwell", lambda p: f"it needs compute capability 10.0, this is {p.platform}", *[never] * 3),
        Implementation("forward_only", lambda p: None if p.op == "forward" else "no gradients", forward, never, never),
    ]
    monkeypatch.setattr(api, "IMPLEMENTATIONS", (*fake, base))
    x, w, dy = arrays(rng)
    sizes = jnp.asarray([25] * G, jnp.int32)
    reason = r"'blackwell'.*needs compute capability 10.0, this is .*'forward_only', 'portable'"
    with pytest.raises(ValueError, match=reason):
        grouped_matmul(x, w, sizes, implementation="blackwell")
    for name in (None, "forward_only"):
        assert np.isfinite(jax.grad(lambda x, n=name: grouped_matmul(x, w, sizes, implementation=n).sum())(x)).all()
    assert calls == ["forward", "forward"]
