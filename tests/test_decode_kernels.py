"""The kernels of a decode step, run thread by thread on the host, against plain JAX."""

import jax
import jax.numpy as jnp
import numpy as np
import permute_emulator
import pytest
from aot_report import aot_report

from jmoe import compat
from pallas_kernels import decode
from pallas_kernels.decode import mosaic_attend, mosaic_common, mosaic_experts, mosaic_linear, reference
from pallas_kernels.route import Rule, choose_experts
from pallas_kernels.route import mosaic_sm90 as route_sm90

HEAD = 128


def launch_in_place(program, task, operands, outputs, *, updated=(), **how):
    """`mosaic_common.launch_updating` on the host: what is written in place is an output that starts as the operand."""
    memory = {name: np.array(operands[name]) for name in updated}
    data = {name: a.view(np.uint8).reshape(-1) for name, a in memory.items()}

    def run(o, t, refs):
        program(o, t, refs | {name: permute_emulator.Memory(d) for name, d in data.items()})

    rest = {name: value for name, value in operands.items() if name not in updated}
    return permute_emulator.launch(run, task, rest, outputs, **how) | {n: jnp.asarray(a) for n, a in memory.items()}


@pytest.fixture(autouse=True)
def on_the_host(monkeypatch):
    modules = (mosaic_linear, mosaic_attend, mosaic_experts)
    permute_emulator.install(monkeypatch, *modules, mosaic_common, route_sm90)
    for module in modules:
        monkeypatch.setattr(module, "launch_updating", launch_in_place)


def close(actual, expected, limit):
    a, b = (np.asarray(x, np.float64) for x in (actual, expected))
    assert a.shape == b.shape
    assert np.linalg.norm(a - b) <= limit * np.linalg.norm(b)


def draw(rng, *shape, dtype=jnp.bfloat16):
    return jnp.asarray(rng.normal(size=shape).astype(np.float32)).astype(dtype)


@pytest.mark.parametrize(
    ("columns", "outputs", "added"),
    [(256, 5, True), (256, 5, False), (512, 200, True), (2048, 2080, True), (2048, 2080, False), (256, 40001, True)],
)
def test_norm_and_linear_map(columns, outputs, added, rng):
    x, scale, w = draw(rng, 1, columns), draw(rng, columns) + 1, draw(rng, outputs, columns)
    add = draw(rng, 1, columns) if added else None
    for dtype in (jnp.bfloat16, jnp.float32):
        how = dict(eps=1e-6, out_dtype=jnp.dtype(dtype), copies=1)
        out, total, normed = mosaic_linear.run_normed_linear(x, scale, w, add, None, None, **how)
        expected = reference.normed_linear(x, scale, w, add, None, None, **how)
        np.testing.assert_array_equal(total, expected[1])
        close(normed, expected[2], 1e-3)  # an ulp here and there: the root is the hardware's
        close(out, expected[0], 4e-3 if dtype == jnp.bfloat16 else 1e-3)
        assert out.dtype == dtype


@pytest.mark.parametrize("outputs", [16, 300])
def test_a_weighted_sum_of_rows_is_added_and_the_normed_row_is_copied(outputs, rng):
    x, scale, w, rows = draw(rng, 1, 512), draw(rng, 512), draw(rng, outputs, 512), draw(rng, 6, 512)
    places = jnp.asarray([4, 0, -1, 5], jnp.int32)
    weights = jnp.asarray([0.5, -2.0, np.nan, 0.25], jnp.float32)
    how = dict(eps=1e-6, out_dtype=jnp.dtype(jnp.float32), copies=6)
    out, total, normed = mosaic_linear.run_normed_linear(x, scale, w, rows, places, weights, **how)
    by_hand = np.asarray(rows, np.float64)[[4, 0, 5]] * np.asarray([[0.5], [-2.0], [0.25]])
    close(total, np.asarray(x, np.float64) + by_hand.sum(0), 4e-3)
    expected = reference.normed_linear(x, scale, w, rows, places, weights, **how)
    for a, b in zip((out, total, normed), expected, strict=True):
        close(a, b, 2e-3)
    assert normed.shape == (6, 512) and (np.asarray(normed) == np.asarray(normed)[:1]).all()
    nowhere = mosaic_linear.run_normed_linear(x, scale, w, rows, places * 0 - 1, weights, **how)
    np.testing.assert_array_equal(nowhere[1], x)


@pytest.mark.parametrize("experts", [32, 128, 256])
@pytest.mark.parametrize("valid", [True, False])
def test_experts_of_one_token_and_their_places(experts, valid, rng):
    rule = Rule(8) if experts > 32 else Rule(4, score="sigmoid")
    logits = jnp.asarray(rng.normal(size=(1, experts)) * 3, jnp.float32)
    bias = None if experts > 32 else jnp.asarray(rng.normal(size=experts), jnp.float32)
    flag = jnp.asarray([valid])
    weights, places, sizes = map(np.asarray, mosaic_experts.run_route(rule, logits, bias, flag))
    expected = reference.route(rule, logits, bias, flag)
    np.testing.assert_allclose(weights, expected[0], 1e-6)
    np.testing.assert_array_equal(places, expected[1])
    np.testing.assert_array_equal(sizes, expected[2])
    assert sizes.sum() == (rule.top_k if valid else 0)
    assert sorted(places) == (list(range(rule.top_k)) if valid else [-1] * rule.top_k)
    ids, _ = choose_experts(logits, bias, rule)
    if valid:  # the copy in place p belongs to the expert that has it
        np.testing.assert_array_equal(np.repeat(np.arange(experts), sizes)[places], ids[0])


SHAPES = [(8, 1, 128, 5), (8, 2, 300, 260), (4, 4, 130, 0), (4, 2, 700, 699), (2, 2, 5000, 4999), (16, 2, 2100, 77)]


def attention_inputs(rng, heads, groups, slots, slot):
    angles = rng.normal(size=HEAD // 2)
    rotation = [jnp.asarray(f(angles), jnp.float32) for f in (np.cos, np.sin)]
    cache = [draw(rng, 1, groups, slots, HEAD) for _ in "kv"]
    valid = jnp.asarray(rng.random((1, slots)) < 0.8).at[0, slot].set(True)
    scales = [draw(rng, HEAD) + 1 for _ in "qk"]
    return draw(rng, 1, (heads + 2 * groups) * HEAD), *scales, *rotation, *cache, valid, jnp.int32(slot)


@pytest.mark.parametrize(("heads", "groups", "slots", "slot"), SHAPES)
def test_attention_in_parts(heads, groups, slots, slot, rng):
    args = attention_inputs(rng, heads, groups, slots, slot)
    how = dict(eps=1e-6, splits=mosaic_attend.parts(slots))
    out, weight, keys, values = mosaic_attend.run_attend(*args, **how)
    expected = reference.attend(*args, **how)
    untouched = np.arange(slots) != slot
    for mine, theirs, before in ((keys, expected[2], args[5]), (values, expected[3], args[6])):
        close(mine, theirs, 1e-4)
        np.testing.assert_array_equal(np.asarray(mine)[:, :, untouched], np.asarray(before)[:, :, untouched])
    close(reference.merge(out, weight), reference.merge(*expected[:2]), 4e-3)


def test_a_part_that_sees_nothing_weighs_nothing(rng):
    args = list(attention_inputs(rng, 4, 2, 512, 400))
    args[7] = args[7].at[0, :256].set(False)
    out, weight, *_ = mosaic_attend.run_attend(*args, eps=1e-6, splits=4)
    assert (np.asarray(weight)[:2, :, 1] == 0).all() and (np.asarray(out)[:2] == 0).all()
    close(reference.merge(out, weight), reference.merge(*reference.attend(*args, eps=1e-6, splits=4)[:2]), 4e-3)


@pytest.mark.parametrize(("heads", "outputs", "parts"), [(2, 40, 1), (8, 256, 9), (32, 100, 16)])
def test_merge_and_linear_map(heads, outputs, parts, rng):
    out, w, add = draw(rng, parts, heads, HEAD), draw(rng, outputs, heads * HEAD), draw(rng, 1, outputs)
    weight = jnp.asarray(
        np.stack([rng.normal(size=(parts, heads)) * 5, rng.random((parts, heads)) * 99], -1), jnp.float32
    )
    if parts > 1:
        weight = weight.at[0, 0].set(jnp.asarray([mosaic_attend.NEVER, 0.0]))
    actual = mosaic_linear.run_merged_linear(out, weight, w, add)
    exact = reference.linear(reference.merge(out, weight), w, jnp.float32) + add.astype(jnp.float32)
    close(actual, exact, 6e-3)


def test_plain_form_is_attention_over_the_whole_cache(rng):
    args = attention_inputs(rng, 8, 2, 300, 250)
    qkv, q_scale, k_scale, cos, sin, keys, values, valid, slot = args
    partial, cache = decode.attend(qkv, q_scale, k_scale, (cos, sin), (keys, values), valid, slot, eps=1e-6)
    assert partial.out.shape == (3, 8, HEAD)
    q = reference.rotate(reference.rms_norm(qkv.reshape(-1, HEAD)[:8], q_scale, 1e-6), cos, sin)
    k, v = (np.repeat(np.asarray(a[0], np.float64), 4, 0) for a in cache)
    scores = np.einsum("hd,hnd->hn", np.asarray(q, np.float64), k) / np.sqrt(HEAD)
    scores[:, ~np.asarray(valid[0]) | (np.arange(300) > 250)] = -np.inf
    weights = np.exp(scores - scores.max(1, keepdims=True))
    whole = np.einsum("hn,hnd->hd", weights / weights.sum(1, keepdims=True), v).reshape(1, -1)
    close(reference.merge(*partial), whole, 5e-3)
    w, add = draw(rng, 256, 8 * HEAD), draw(rng, 1, 256)
    close(
        decode.merged_linear(partial, w, add), whole @ np.asarray(w, np.float64).T + np.asarray(add, np.float64), 1e-2
    )


def test_what_the_kernels_cannot_do_is_said(rng):
    x, scale, w = draw(rng, 1, 320), draw(rng, 320), draw(rng, 8, 320)
    with pytest.raises(ValueError, match="multiples of 256 values, not of 320"):
        decode.normed_linear(x, scale, w, eps=1e-6, implementation="mosaic_sm90")
    y, _, _ = decode.normed_linear(x, scale, w, eps=1e-6)
    assert y.shape == (1, 8)
    with pytest.raises(ValueError, match=r"takes \[1, D\], \[D\] and \[N, D\]"):
        decode.normed_linear(x, scale, w.T, eps=1e-6)
    args = attention_inputs(rng, 6, 2, 64, 3)
    qkv, q_scale, k_scale, cos, sin, keys, values, valid, slot = args
    with pytest.raises(ValueError, match="1, 2, 4 or 8 query heads to a key head, not 3"):
        decode.attend(
            qkv, q_scale, k_scale, (cos, sin), (keys, values), valid, slot, eps=1e-6, implementation="mosaic_sm90"
        )
    with pytest.raises(ValueError, match=r"attend got qkv .* valid \(1, 9\)"):
        decode.attend(qkv, q_scale, k_scale, (cos, sin), (keys, values), valid[:, :9], slot, eps=1e-6)
    jax.eval_shape(
        lambda *a: decode.attend(*a[:3], a[3:5], a[5:7], *a[7:], eps=1e-6), *args
    )  # three to a key head: the plain form


@pytest.mark.aot
@pytest.mark.skipif(not compat.KERNELS_SUPPORTED, reason="Mosaic kernels need JAX >= 0.11")
@pytest.mark.parametrize("arch", ["sm_90", "sm_100"])
def test_machine_code_fits_the_registers(arch):
    report = aot_report("aot_decode.py", arch)
    assert len(report) == 8
    assert all(0 < registers <= 168 and not spilled for registers, spilled, _ in report.values()), report
