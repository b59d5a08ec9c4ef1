"""The row on the wire: sizes, packing, sentinels, workspaces, capacity and token buckets."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jmoe.payload import (
    RowLayout,
    Workspace,
    capacity,
    pack,
    pad_tokens,
    row_layout,
    token_bucket,
    unpack,
    unpack_data,
    wire_names,
    workspace_bytes,
)
from pallas_kernels.quantize import QTensor, dequantize, quantize

K = 3
jit_quantize = jax.jit(quantize, static_argnums=1, static_argnames="alignment")


def example(wire, tokens=5, hidden=128, seed=0):
    rng = np.random.default_rng(seed)
    layout = row_layout(hidden, wire, K)
    x = jnp.asarray(rng.normal(size=(tokens, hidden)), jnp.float32)
    x = jit_quantize(x, wire) if layout.format else x.astype(wire)
    ids = jnp.asarray(rng.integers(-1, 8, (tokens, K)), jnp.int32)
    weights = jnp.asarray(rng.random((tokens, K)), jnp.float32)
    return layout, x, ids, weights


@pytest.mark.parametrize(
    "hidden, wire, alignment, expected",
    [
        (7168, "bfloat16", 0, (14336, 0, 0)),
        (7168, "nvfp4", 0, (3584, 448, 0)),
        (7168, "nvfp4_token", 0, (3584, 448, 4)),
        (7168, "mxfp8", 256, (7168, 224, 0)),
        (7168, "fp8_128", 0, (7168, 224, 0)),
        (2880, "bfloat16", 0, (5760, 0, 0)),
        (2880, "nvfp4", 0, (1440, 180, 0)),
        (2880, "mxfp8", 0, (2880, 90, 0)),
        (2880, "mxfp8", 256, (3072, 96, 0)),
        (64, "mxfp8", 0, (64, 2, 0)),
    ],
)
def test_F01_bytes_of_a_token_are_the_published_ones(hidden, wire, alignment, expected):
    layout = row_layout(hidden, wire, 8, mx_alignment=alignment)
    assert (layout.data_bytes, layout.scale_bytes, layout.row_scale_bytes) == expected
    assert layout.row_bytes % 16 == 0 and layout.row_bytes - layout.payload_bytes - 64 < 32


@pytest.mark.parametrize("wire", wire_names())
def test_F01_row_has_room_for_exactly_what_the_quantiser_makes(wire):
    tokens, layout = 16, row_layout(256, wire, 8)
    x = jax.ShapeDtypeStruct((tokens, 256), jnp.float32)
    made = jax.eval_shape(lambda x: quantize(x, wire) if layout.format else x.astype(wire), x)
    travels = [leaf for leaf in jax.tree.leaves(made) if leaf.shape]  # a per-tensor scale does not
    assert layout.payload_bytes * tokens == sum(leaf.size * leaf.dtype.itemsize for leaf in travels)
    offsets = [0, layout.scale_offset, layout.row_scale_offset, layout.ids_offset, layout.weights_offset]
    assert offsets == sorted(offsets) and layout.ids_offset % 4 == 0 and layout.row_scale_offset % 1 == 0
    assert layout.weights_offset + 32 <= layout.row_bytes
    if layout.scale_dtype is not None:
        assert layout.scale_offset % layout.scale_dtype.itemsize == 0


def test_F02_layout_follows_what_is_sent():
    sent = row_layout(64, "bfloat16", 2)  # a layer that quantises to nvfp4 but whose experts want unquantised input
    assert (sent.data_bytes, sent.scale_bytes) == (128, 0)
    assert row_layout(64, "nvfp4", 2).payload_bytes == 36
    with pytest.raises(ValueError, match=r"bfloat16 array of shape \(4, 64\) for a row of 64 elements of nvfp4"):
        pack(
            jnp.ones((4, 64), jnp.bfloat16), jnp.zeros((4, 2), jnp.int32), jnp.ones((4, 2)), row_layout(64, "nvfp4", 2)
        )


def test_F03_workspace_sizes_and_their_union():
    sizes = dict(num_ranks=8, capacity=512)
    layouts = {w: row_layout(7168, w, 8, mx_alignment=256) for w in ("nvfp4", "mxfp8", "bfloat16")}
    assert {w: workspace_bytes(layout, **sizes) for w, layout in layouts.items()} == {
        "nvfp4": 75_497_472,
        "mxfp8": 89_260_032,
        "bfloat16": 117_702_656,
    }
    small, large = (Workspace.of(layouts[w], **sizes) for w in ("nvfp4", "bfloat16"))
    assert small.union(large) == large and large.union(small) == large
    other = Workspace.of(row_layout(7168, "nvfp4", 4), **sizes)
    with pytest.raises(ValueError, match=r"top_k=8 and top_k=4 cannot share one workspace"):
        small.union(other)


def test_F41_heterogeneous_layers_share_a_workspace_whatever_their_order():
    base = Workspace.of(row_layout(64, "nvfp4", 2), num_ranks=4, capacity=8)
    draft = Workspace.of(row_layout(64, "bfloat16", 2), num_ranks=4, capacity=8, combine_row_bytes=0)
    both = base.union(draft)
    assert both == draft.union(base)
    assert both.dispatch_bytes == 4 * 8 * row_layout(64, "bfloat16", 2).row_bytes
    assert both.combine_bytes == 4 * 8 * 128 and both.total == both.dispatch_bytes + both.combine_bytes


@pytest.mark.parametrize("wire", [w for w in wire_names() if w not in ("mxfp8_floor", "mxfp4_floor")])
def test_F26_ids_weights_and_data_come_back_by_name_bit_for_bit(wire):
    layout, x, ids, weights = example(wire)
    rows = pack(x, ids, weights, layout)
    assert rows.shape == (5, layout.row_bytes) and rows.dtype == jnp.uint8
    scale = x.global_scale if isinstance(x, QTensor) and layout.format.global_scale == "tensor" else None
    got, local, got_weights = unpack(rows, layout, rank=1, num_local=3, global_scale=scale)
    mine = (np.asarray(ids) >= 3) & (np.asarray(ids) < 6)
    np.testing.assert_array_equal(local, np.where(mine, np.asarray(ids) - 3, -1))
    np.testing.assert_array_equal(got_weights, np.where(mine, weights, 0))
    assert jax.tree.structure(got) == jax.tree.structure(x)
    for arrived, sent in zip(jax.tree.leaves(got), jax.tree.leaves(x), strict=True):
        assert arrived.dtype == sent.dtype and np.asarray(arrived).tobytes() == np.asarray(sent).tobytes()


def test_F17_columns_of_alignment_travel_and_are_cut_off_on_arrival():
    layout = row_layout(48, "mxfp8", K, mx_alignment=64)
    assert layout.columns == 64 and layout.scale_bytes == 2
    x = jnp.asarray(np.random.default_rng(0).normal(size=(4, 48)), jnp.float32)
    q = jit_quantize(x, "mxfp8", alignment=64)
    rows = pack(q, jnp.zeros((4, K), jnp.int32), jnp.ones((4, K)), layout)
    got = unpack_data(rows, layout)
    assert got.shape == (4, 48)
    np.testing.assert_array_equal(dequantize(got, jnp.float32), dequantize(q, jnp.float32))


def test_F23_padding_is_marked_by_counts_or_by_the_empty_row_whatever_else_it_holds():
    layout, x, ids, weights = example("bfloat16")
    rows = np.array(pack(x, jnp.full_like(ids, 7), weights, layout))
    rows[3:] = 0xFF  # NaN data and weights
    rows[3:, layout.ids_offset : layout.weights_offset] = np.tile(np.int32([7]).view(np.uint8), K)
    valid = jnp.arange(5) < 3
    _, local, got = unpack(jnp.asarray(rows), layout, rank=0, num_local=8, valid=valid)
    np.testing.assert_array_equal(local, np.where(np.asarray(valid)[:, None], 7, np.full((5, K), -1)))
    assert np.isfinite(np.asarray(got)).all() and not np.asarray(got)[3:].any()
    empty = jnp.asarray(layout.empty_row())[None]
    _, local, got = unpack(empty, layout, rank=0, num_local=8)
    np.testing.assert_array_equal(local, -1)


def test_F24_ids_of_other_ranks_and_of_no_expert_are_ignored():
    layout = row_layout(8, "float32", 5)
    ids = jnp.asarray([[0, 7, -1, 8, 2**31 - 1]], jnp.int32)
    rows = pack(jnp.ones((1, 8)), ids, jnp.ones((1, 5)), layout)
    _, first, weights = unpack(rows, layout, rank=0, num_local=4)
    np.testing.assert_array_equal(first, [[0, -1, -1, -1, -1]])
    np.testing.assert_array_equal(weights, [[1, 0, 0, 0, 0]])
    _, second, _ = unpack(rows, layout, rank=1, num_local=4)
    np.testing.assert_array_equal(second, [[-1, 3, -1, -1, -1]])


def test_F27_no_rows():
    layout = row_layout(64, "mxfp8", K)
    x = jax.eval_shape(lambda x: quantize(x, "mxfp8"), jax.ShapeDtypeStruct((0, 64), jnp.float32))
    rows = jax.eval_shape(
        lambda q, i, w: unpack(pack(q, i, w, layout), layout, rank=0, num_local=1),
        x,
        jax.ShapeDtypeStruct((0, K), jnp.int32),
        jax.ShapeDtypeStruct((0, K), jnp.float32),
    )
    assert rows[0].shape == (0, 64) and rows[1].shape == (0, K)


def test_rows_that_cannot_travel_are_refused_with_what_can():
    with pytest.raises(ValueError, match=r"'int8' cannot travel; choose one of bfloat16.*nvfp4_token.*'auto'"):
        row_layout(64, "int8", 2)
    with pytest.raises(ValueError, match=r"'fp8_128x128' shares each scale among 128 rows.*'fp8_128'"):
        row_layout(256, "fp8_128x128", 2)
    with pytest.raises(ValueError, match=r"hidden=0 must be positive"):
        row_layout(0, "bfloat16", 2)
    with pytest.raises(ValueError, match=r"blocks of 32, which do not divide hidden size 48.*mx_alignment=32"):
        row_layout(48, "mxfp8", 2)
    layout, x, ids, weights = example("mxfp8")
    with pytest.raises(ValueError, match=r"format 'mxfp8' with 128 columns for a row of 'mxfp4'"):
        pack(x, ids, weights, row_layout(128, "mxfp4", K))
    with pytest.raises(ValueError, match=r"swizzled scales.*swizzle after the exchange"):
        pack(jax.eval_shape(lambda: quantize(jnp.ones((5, 128)), "mxfp8", layout="swizzled")), ids, weights, layout)
    with pytest.raises(ValueError, match=r"do not fill 256 bytes of a row"):
        pack(x, ids, weights, row_layout(128, "mxfp8", K, mx_alignment=256))
    with pytest.raises(ValueError, match=r"do not fit a row of top_k=2"):
        pack(x, ids, weights, row_layout(128, "mxfp8", 2))
    with pytest.raises(ValueError, match=r"'nvfp4' has one scale for the whole tensor.*shared_global_scale"):
        layout = row_layout(128, "nvfp4", K)
        unpack_data(jnp.zeros((1, layout.row_bytes), jnp.uint8), layout)


def test_F44_fp8_blocks_must_divide_the_hidden_size():
    with pytest.raises(ValueError, match=r"'fp8_128' quantises blocks of 128, which do not divide hidden size 192"):
        row_layout(192, "fp8_128", 2)
    assert isinstance(row_layout(256, "fp8_128", 2), RowLayout)


@pytest.mark.parametrize(
    "tokens, targets, factor, expected",
    [(512, 8, None, 512), (512, 8, 1.0, 512), (512, 8, 0.5, 256), (7, 4, 0.5, 4), (512, 256, 1.25, 20), (0, 8, 2.0, 0)],
)
def test_F22_capacity(tokens, targets, factor, expected):
    assert capacity(tokens, targets, 8, factor) == expected


def test_F28_token_counts_fall_into_few_buckets_and_padding_changes_nothing():
    assert [token_bucket(t, 48) for t in (0, 1, 2, 3, 5, 9, 17, 32, 33, 48)] == [0, 1, 2, 4, 8, 16, 32, 32, 48, 48]
    with pytest.raises(ValueError, match=r"65 tokens exceed max_tokens=64"):
        token_bucket(65, 64)

    @jax.jit
    @chex.assert_max_traces(n=7)
    def layer(x, valid):
        return jnp.where(valid[:, None], jnp.tanh(x) * 3, 0)

    x = np.random.default_rng(0).normal(size=(64, 4)).astype(np.float32)
    want = np.asarray(layer(x, jnp.ones(64, bool)))
    for tokens in range(1, 65):
        padded, valid = pad_tokens(x[:tokens], token_bucket(tokens, 64))
        assert int(valid.sum()) == tokens
        np.testing.assert_array_equal(np.asarray(layer(padded, valid))[:tokens], want[:tokens])
    with pytest.raises(ValueError, match=r"must be equal and at most bucket=4"):
        pad_tokens((jnp.ones((3, 2)), jnp.ones((4, 2))), 4)
