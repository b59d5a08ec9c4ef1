"""The kernels of a decode step of one token, against XLA on a GPU."""

import pathlib
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jmoe.config import QuantConfig
from pallas_kernels import decode
from pallas_kernels.decode import reference
from pallas_kernels.route import Rule

pytestmark = pytest.mark.gpu


def both(function, *args, arrays=None, **options):
    """The results of the kernel and of XLA; arrays: options that are arrays."""

    def run(how):
        return jax.jit(lambda a, more: function(*a, implementation=how, **more, **options))(args, arrays or {})

    return [run(how) for how in ("mosaic_sm90", "xla")]


def error(actual, expected):
    a, b = (np.asarray(jnp.asarray(x).astype(jnp.float32), np.float64) for x in (actual, expected))
    return np.linalg.norm(a - b) / np.linalg.norm(b)


def draw(rng, *shape):
    return jnp.asarray(rng.standard_normal(shape), jnp.bfloat16)


@pytest.mark.parametrize("columns,outputs", [(2048, 5120), (2048, 128), (2048, 151936), (7168, 1000), (256, 3)])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_norm_and_linear_map(rng, columns, outputs, dtype):
    x, add, scale = draw(rng, 1, columns), draw(rng, 1, columns), draw(rng, columns)
    w = draw(rng, outputs, columns)
    for more in (None, add):
        kernel, xla = both(
            decode.normed_linear, x, scale, w, arrays={"add": more}, eps=1e-6, out_dtype=jnp.dtype(dtype)
        )
        np.testing.assert_array_equal(kernel[1], xla[1])
        assert error(kernel[2], xla[2]) < 2e-3 and error(kernel[0], xla[0]) < 5e-3


@pytest.mark.parametrize("outputs", [128, 5120])
def test_a_weighted_sum_of_rows_is_added_and_the_normed_row_is_copied(rng, outputs):
    x, scale, w, rows = draw(rng, 1, 2048), draw(rng, 2048), draw(rng, outputs, 2048), draw(rng, 8, 2048)
    places = jnp.asarray([3, 0, -1, 7, 2, 1, 6, 5], jnp.int32)
    weights = jnp.asarray(rng.standard_normal(8), jnp.float32).at[2].set(jnp.nan)
    add = decode.Weighted(rows, places, weights)
    kernel, xla = both(decode.normed_linear, x, scale, w, arrays={"add": add}, eps=1e-6, copies=8)
    assert all(error(a, b) < 5e-3 for a, b in zip(kernel, xla, strict=True))


@pytest.mark.parametrize("experts,rule", [(128, Rule(8)), (256, Rule(8, score="sigmoid", num_groups=8, group_topk=4))])
@pytest.mark.parametrize("valid", [True, False])
def test_experts_of_one_token_and_their_places(rng, experts, rule, valid):
    logits = jnp.asarray(rng.standard_normal((1, experts)) * 3, jnp.float32)
    kernel, xla = both(decode.route, logits, None, rule=rule, arrays={"valid": jnp.asarray([valid])})
    np.testing.assert_allclose(kernel[0], xla[0], 1e-6)
    np.testing.assert_array_equal(kernel[1], xla[1])
    np.testing.assert_array_equal(kernel[2], xla[2])


@pytest.mark.parametrize(
    "heads,groups,slots,slot",
    [(32, 4, 1024, 1000), (32, 4, 1056, 1055), (8, 8, 200, 0), (64, 8, 8192, 5000), (16, 4, 32768, 32767)],
)
def test_attention_in_parts_and_their_sum(rng, heads, groups, slots, slot):
    size = 128
    angle = jnp.asarray(rng.standard_normal(size // 2), jnp.float32)
    w, add = draw(rng, 2048, heads * size), draw(rng, 1, 2048)
    args = (
        draw(rng, 1, (heads + 2 * groups) * size),
        draw(rng, size),
        draw(rng, size),
        (jnp.cos(angle), jnp.sin(angle)),
        (draw(rng, 1, groups, slots, size), draw(rng, 1, groups, slots, size)),
        jnp.asarray(rng.random((1, slots)) < 0.7).at[0, slot].set(True),
        jnp.int32(slot),
    )
    kernel, xla = both(decode.attend, *args, eps=1e-6)
    assert error(reference.merge(*kernel[0]), reference.merge(*xla[0])) < 6e-3
    for mine, theirs in zip(kernel[1], xla[1], strict=True):
        assert error(mine, theirs) < 1e-3  # a key's last bit here and there, in one slot of them all
    outs = both(decode.merged_linear, xla[0], w, add)
    assert error(*outs) < 6e-3


def test_a_cache_is_updated_in_place_in_a_loop(rng):
    """200 steps write 200 slots, each step's token depending on what the last one read."""
    args = [draw(rng, 1, 16 * 128), draw(rng, 128), draw(rng, 128)]
    angle = jnp.asarray(rng.standard_normal(64), jnp.float32)

    def run(cache, implementation):
        def step(i, carry):
            qkv, cache = carry
            valid = jnp.arange(256)[None] <= i
            partial, cache = decode.attend(
                qkv, *args[1:], (jnp.cos(angle), jnp.sin(angle)), cache, valid, jnp.int32(i), eps=1e-6,
                implementation=implementation,
            )  # fmt: skip
            return jnp.tile(reference.merge(*partial), (1, 2)), cache

        return jax.lax.fori_loop(0, 200, step, (args[0], cache))

    empty = tuple(jnp.zeros((1, 4, 256, 128), jnp.bfloat16) for _ in "kv")
    kernel, xla = both(run, empty)
    assert error(kernel[0], xla[0]) < 0.05
    for mine, theirs in zip(kernel[1], xla[1], strict=True):
        assert error(mine, theirs) < 0.05 and not np.asarray(mine[:, :, 200:]).any()


@pytest.mark.parametrize("weights", [None, "nvfp4"])
def test_a_step_of_one_sequence_is_the_models(weights):
    """The median of a dozen sequences: where two experts are nearly tied, a rounding can choose the other one."""
    sys.path.append(str(pathlib.Path(__file__).parents[2] / "examples"))
    import one_token
    import qwen3_moe
    from random_checkpoint import QWEN3_30B_A3B

    hf = QWEN3_30B_A3B | {"num_hidden_layers": 2, "num_experts": 32, "vocab_size": 4096}
    with jax.numpy_dtype_promotion("standard"):
        config = qwen3_moe.Config.from_hf(hf, dtype="bfloat16", quant=QuantConfig(weights=weights))
        model = qwen3_moe.random_model(config, key=jax.random.key(0))
        assert one_token.why_not(model, 1) is None
        ids = jax.random.randint(jax.random.key(1), (12, 40), 0, 4096, jnp.int32)
        _, cache = qwen3_moe.prefill(model, ids, jnp.ones(ids.shape, bool), size=44, side="right")
        token, valid = ids[:, :1], jnp.ones((12, 1), bool)
        few, general = jax.jit(one_token.read), jax.jit(model_step)
        expected = general(model, token, valid, cache)
        errors = []
        for i in range(12):
            part = jax.tree.map(lambda a, i=i: a[i : i + 1] if a.ndim else a, cache)
            logits, written = few(model, token[i : i + 1], valid[i : i + 1], part)
            errors.append(error(logits[0], expected[i]))
            assert int(written.used) == 41 and bool(written.valid[0, 40])
    assert np.median(errors) < 0.03, errors


def model_step(model, ids, valid, cache):
    hidden, _, _ = model.hidden(ids, valid=valid, cache=cache)
    return model.logits(hidden[:, 0])
