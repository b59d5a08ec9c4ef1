"""ragged_all_to_all: the meaning of lax's operation, on a platform that does not have it, with the right derivative."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, PartitionSpec

from jmoe import compat
from pallas_kernels.all_to_all import ragged_all_to_all

R, ROWS, WIDTH = 4, 24, 3
P = PartitionSpec("ep")


def slices(rng, per_peer):
    """Sizes with empty slices, and offsets that leave gaps in inputs and outputs: int32 [R, R * per_peer] each."""
    send = rng.integers(0, 3, (R, R, per_peer))
    send[1], send[:, 2] = 0, 0  # rank 1 sends nothing, rank 2 gets nothing
    sizes = send.reshape(R, -1)
    begin = np.cumsum(sizes, 1) - sizes + rng.integers(0, 3, (R, 1))
    order = np.transpose(send, (1, 2, 0))  # at the receiver: by slice, then by source
    place = (np.cumsum(order.reshape(R, -1), 1) - order.reshape(R, -1)).reshape(order.shape) + 1
    place = np.transpose(place, (2, 0, 1)).reshape(R, -1)
    receive = np.transpose(send, (1, 0, 2)).reshape(R, -1)
    return [np.asarray(a, np.int32) for a in (begin, sizes, place, receive)]


def expected(x, out, begin, sizes, place, per_peer):
    out = out.copy()
    for source in range(R):
        for i, n in enumerate(sizes[source]):
            target = i // per_peer
            out[target, place[source, i] : place[source, i] + n] = x[source, begin[source, i] : begin[source, i] + n]
    return out


@functools.cache
def exchange():
    def body(x, out, *tables):
        return ragged_all_to_all(x[0], out[0], *(t[0] for t in tables), axis_name="ep")[None]

    mesh = jax.make_mesh((R,), ("ep",), axis_types=(AxisType.Auto,), devices=jax.devices()[:R])
    return jax.jit(compat.shard_map(body, mesh=mesh, in_specs=P, out_specs=P))


@pytest.mark.parametrize("per_peer", (1, 2))
@pytest.mark.parametrize("dtype", ("float32", "bfloat16", "uint8", "float8_e4m3fn"))
def test_slices_land_where_the_offsets_say(per_peer, dtype):
    rng = np.random.default_rng(7)
    tables = slices(rng, per_peer)
    x = np.asarray(jnp.asarray(rng.integers(0, 9, (R, ROWS, WIDTH))).astype(dtype))
    out = np.asarray(jnp.ones((R, ROWS, WIDTH), dtype))
    got = np.asarray(exchange()(x, out, *tables))
    want = expected(x.astype(np.float32), out.astype(np.float32), *tables[:3], per_peer)
    assert got.dtype == x.dtype
    np.testing.assert_array_equal(got.astype(np.float32), want)


def test_gradients_are_those_of_the_linear_map_also_where_slices_are_empty():
    rng = np.random.default_rng(8)
    begin, sizes, place, receive = slices(rng, 2)
    integers = lambda: rng.integers(-8, 9, (R, ROWS, WIDTH)).astype(np.float32)  # noqa: E731
    x, out, ct = integers(), integers(), integers()
    _, vjp = jax.vjp(lambda x, out: exchange()(x, out, begin, sizes, place, receive), x, out)
    dx, dout = map(np.asarray, vjp(ct))
    want_dx, want_dout = np.zeros_like(x), ct.copy()
    for source in range(R):
        for i, n in enumerate(sizes[source]):
            here, there = begin[source, i], place[source, i]
            want_dx[source, here : here + n] = ct[i // 2, there : there + n]
            want_dout[i // 2, there : there + n] = 0
    assert (sizes == 0).any()
    np.testing.assert_array_equal(dx, want_dx)
    np.testing.assert_array_equal(dout, want_dout)
    y0 = np.asarray(exchange()(x, np.zeros_like(out), begin, sizes, place, receive))
    assert (y0 * ct).sum() == (x * dx).sum()


def test_nothing_to_send_and_axes_of_larger_meshes():
    mesh = jax.make_mesh((2, 2), ("dp", "ep"), axis_types=(AxisType.Auto,) * 2, devices=jax.devices()[:4])
    both = PartitionSpec(("dp", "ep"))

    def run(axis, per_rank, x, sizes, place):
        def body(x, sizes, place):
            zeros = jnp.zeros_like(sizes[0])
            y = ragged_all_to_all(x[0], jnp.zeros_like(x[0]), zeros, sizes[0], place[0], sizes[0], axis_name=axis)
            empty = ragged_all_to_all(x[0, :0], x[0], zeros, zeros, zeros, zeros, axis_name=axis)
            return y[None], empty[None]

        assert sizes.shape[1] == per_rank
        return jax.jit(compat.shard_map(body, mesh=mesh, in_specs=both, out_specs=both))(x, sizes, place)

    x = np.arange(4 * 4 * 2, dtype=np.float32).reshape(4, 4, 2)
    one = np.ones((4, 2), np.int32)
    y, empty = run("ep", 2, x, one, np.tile(np.int32([[0], [1]]), (2, 2)))
    np.testing.assert_array_equal(y[:, :2, :], x[:, 0].reshape(2, 1, 2, 2).repeat(2, 1).reshape(4, 2, 2))
    np.testing.assert_array_equal(empty, x)
    y, _ = run(("dp", "ep"), 4, x, np.ones((4, 4), np.int32), np.tile(np.arange(4, dtype=np.int32)[:, None], (1, 4)))
    np.testing.assert_array_equal(y, np.broadcast_to(x[:, 0], (4, 4, 2)))


def test_calls_that_cannot_work_are_refused():
    x, table = jnp.ones((4, 2)), jnp.zeros((2,), jnp.int32)
    call = functools.partial(ragged_all_to_all, axis_name="ep")
    with pytest.raises(ValueError, match=r"operand float32\(4, 2\) and output bfloat16.*must agree"):
        call(x, x.astype(jnp.bfloat16), table, table, table, table)
    with pytest.raises(ValueError, match=r"of equal length. Flatten them"):
        call(x, x, table, table[:1], table, table)
    with pytest.raises(ValueError, match=r"must be integers, got float32"):
        call(x, x, table, table.astype(jnp.float32), table, table)
    with pytest.raises(ValueError, match=r"axis_index_groups is not supported.*axis of their own"):
        call(x, x, table, table, table, table, axis_index_groups=[[0], [1]])
    with pytest.raises(ValueError, match=r"implementation='nccl' is not known.*'reference', 'lax'"):
        call(x, x, table, table, table, table, implementation="nccl")
    with pytest.raises(ValueError, match=r"3 slices do not divide among 4 ranks.*size 0"):
        three = np.zeros((R, 3), np.int32)
        exchange()(np.ones((R, 4, 2)), np.ones((R, 4, 2)), three, three, three, three)
