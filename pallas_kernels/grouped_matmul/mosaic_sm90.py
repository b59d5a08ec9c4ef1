"""BF16 grouped matmul for Hopper: x [M, K] rows sorted by group, w [G, N, K], out [M, N].

Persistent and warp-specialised. Each block of three warpgroups loops over output tiles of block_m x block_n: one
warpgroup feeds a ring of shared-memory stages through TMA, running ahead into the next tile while the other two
multiply and store. A tile's rows come as boxes of 64 rows (schedule.py), so ragged groups need no masks and no other
store than a full box; only groups with fewer than 64 rows are stored row by row.

Two variants of the weights: transposed ([G, K, N], for the gradient of x), and gated ([G, 2, F, K], F = N: a tile
holds the same columns of the gate and of the up projection, and only their product is stored).
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from .schedule import Schedule, each_tile, num_tiles, read_tile

BOX = 64
SWIZZLE = 128
CONSUMERS = 2
SMEM_BYTES = 227 * 1024


@dataclasses.dataclass(frozen=True)
class Config:
    """Tile shape and order of the prefill kernel.

    block_m, block_n, block_k: output tile of a block and the depth of one stage (elements). split: how the two
    multiplying warpgroups share a tile: "m" (64 rows each) or "n" (block_n / 2 columns each).
    cluster: blocks that share the rows they load through TMA multicast, adjacent along N.
    band: columns of tiles walked together before moving along N (0: all), which decides what stays in the L2 cache.
    tail: give tiles of at most 64 rows, the ends of groups, half the work instead of a half-empty tile.
    """

    block_n: int = 256
    block_k: int = 64
    stages: int = 4
    split: Literal["m", "n"] = "m"
    cluster: int = 1
    band: int = 0
    block_m: int = 128
    out_slots: int = 2
    tail: bool = True
    num_blocks: int | None = None

    def __post_init__(self):
        if self.block_m != 2 * BOX:
            raise ValueError(f"block_m={self.block_m}: this kernel works on tiles of {2 * BOX} rows; use that.")
        if self.block_n % 64 or not 64 <= self.block_n <= 256:
            raise ValueError(f"block_n={self.block_n}: choose a multiple of 64 up to 256.")
        if self.block_k != 64:
            raise ValueError(f"block_k={self.block_k}: a row of one stage is one 128-byte swizzle; use 64.")
        if self.split == "n" and self.block_n % 128:
            raise ValueError(f"block_n={self.block_n} cannot be halved in chunks of 64 columns; use split='m'.")
        if self.split == "n" and self.cluster > 1:
            # Relative errors of 0.4 to 0.7 for ragged groups on an H200, not explained yet.
            raise ValueError(
                f"cluster={self.cluster} with split='n' has given wrong sums for ragged groups; use cluster=1 or "
                "split='m'."
            )

    @property
    def shares_box(self) -> bool:
        """Whether a tile of at most 64 rows is halved along N, so that both warpgroups have work."""
        return self.tail and self.split == "m" and self.block_n % 256 == 0

    def smem_bytes(self, itemsize: int = 2) -> int:
        """Shared memory of one block, barriers left out."""
        stage = (self.block_m + self.block_n) * self.block_k * itemsize
        return self.stages * stage + CONSUMERS * self.out_slots * BOX * 64 * 2


@dataclasses.dataclass(frozen=True)
class Gate:
    """The product of gate and up projection: "silu", "gelu_tanh", or "swiglu_oai" with its alpha and clamp limit."""

    kind: Literal["silu", "gelu_tanh", "swiglu_oai"] = "silu"
    alpha: float = 1.702
    limit: float = 7.0


def num_sms() -> int:
    """Multiprocessors of the device that is compiled for; 132 (H100, H200) where none is attached."""
    device = jax.sharding.get_abstract_mesh().abstract_device
    cores = getattr(device, "num_cores", None)
    if cores is None:
        cores = getattr(jax.devices()[0], "core_count", None)
    return cores or 132


def swizzled(dtype) -> tuple:
    """Transforms of a shared-memory tile that wgmma and TMA both read without bank conflicts."""
    return (
        plgpu.TilingTransform((8, SWIZZLE // jnp.dtype(dtype).itemsize)),  # pyright: ignore[reportAbstractUsage]
        plgpu.SwizzleTransform(SWIZZLE),  # pyright: ignore[reportAbstractUsage]
    )


def compiler_params() -> plgpu.CompilerParams:
    """No automatic barriers: every kernel here writes shared memory either by registers or by copies, never both, and
    commits what it writes."""
    return plgpu.CompilerParams(
        lowering_semantics=plgpu.LoweringSemantics.Warpgroup, approx_math=True, unsafe_no_auto_barriers=True
    )


def row_views(shape: tuple[int, ...], dtype, *, plain: bool, interpret: bool):
    """Scratch for rows that are copied from or to any row of an array, under several names for the same bytes.

    The tiling that wgmma and register stores use makes Pallas demand copies that start at multiples of 8 rows. The same
    bytes, described with tiles of a single row, carry no such demand: the 128-byte swizzle lives in the address bits.
    Returns the scratch type; the kernel gets (matrix unit's view, copy engine's view[, view without swizzle]).
    """
    width = SWIZZLE // jnp.dtype(dtype).itemsize
    views = [
        plgpu.SMEM(shape, dtype, transforms=swizzled(dtype)),
        plgpu.SMEM(shape, dtype, transforms=(plgpu.TilingTransform((1, width)), plgpu.SwizzleTransform(SWIZZLE))),  # pyright: ignore[reportAbstractUsage]
    ]
    if plain:
        views.append(plgpu.SMEM(shape, dtype))
    return views[0] if interpret else plgpu.RefUnion(*views)


def as_views(ref, count: int, interpret: bool):
    """The views of a row_views() scratch; the interpreter keeps one buffer and uses it for all."""
    return (ref,) * count if interpret else tuple(ref)


def load_rows(ref) -> jax.Array:
    """One float of each of 64 rows from global memory, in the lanes that hold these rows of an accumulator."""
    layout = plgpu.Layout.WGMMA.reduce(1)
    return plgpu.load(ref, layout=layout, optimized=False)  # pyright: ignore[reportCallIssue]


def drain(steps, stages: int, empty):
    """Waits until the last stages are released: a block may leave only when nobody will arrive on its barriers."""

    def wait(i, _):
        plgpu.barrier_wait(empty.at[lax.rem(i, stages)])
        return ()

    lax.fori_loop(jnp.maximum(steps - stages, 0), steps, wait, ())


def walk(index, num_m, num_n: int, band: int):
    """Tile coordinates (along M, along N) of the index-th tile: bands of `band` columns, snaking along M."""
    if band in (0, num_n) or num_n % band:
        return index // num_n, lax.rem(index, num_n)
    per_band = num_m * band
    which = lax.div(index, per_band)
    within = lax.rem(index, per_band)
    m = lax.div(within, band)
    m = jnp.where(lax.rem(which, 2) == 1, num_m - 1 - m, m)
    return m, which * band + lax.rem(within, band)


def store_rows(value, first_row, rows, columns, out_gmem, write_view, box_view, row_view):
    """Stores value [64, C] at out[first_row:, columns]: a whole box, or row by row where the group has fewer rows."""

    @pl.when(rows >= BOX)
    def _():
        write_view[...] = value
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(box_view, out_gmem.at[pl.ds(first_row, BOX), columns])

    @pl.when(rows < BOX)
    def _():
        row_view[...] = value
        plgpu.commit_smem()

        def one(i, _):
            plgpu.copy_smem_to_gmem(row_view.at[pl.ds(i, 1)], out_gmem.at[pl.ds(first_row + i, 1), columns])
            return ()

        lax.fori_loop(0, rows, one, ())


def gated_product(gate: jax.Array, up: jax.Array, activation: Gate) -> jax.Array:
    """activation(gate) * up in float32."""
    if activation.kind == "swiglu_oai":
        gate = jnp.minimum(gate, activation.limit)
        up = jnp.maximum(jnp.minimum(up, activation.limit), -activation.limit)
        return gate / (1.0 + jnp.exp(-activation.alpha * gate)) * (up + 1.0)
    if activation.kind == "silu":
        return gate / (1.0 + jnp.exp(-gate)) * up
    inner = 0.7978845608028654 * (gate + 0.044715 * gate * gate * gate)
    return 0.5 * gate * (1.0 + jnp.tanh(inner)) * up


def _body(
    schedule, x, w, out, a_smem, b_smem, out_smem, full, empty, *, config, gate, transposed, zero_tail, interpret
):
    c: Config = config
    _, k = x.shape
    _, n = out.shape
    parts = 2 if gate else 1
    tile_n = c.block_n // parts
    a_smem, a_load = as_views(a_smem, 2, interpret)
    out_write, out_box, out_row = as_views(out_smem, 3, interpret)
    k_steps = pl.cdiv(k, c.block_k)
    n_tiles = pl.cdiv(n, tile_n * c.cluster)
    wg = lax.axis_index("wg")
    num_m = num_tiles(schedule, x.shape[0], c.block_m, zero_tail=zero_tail)
    blocks = lax.axis_size("block")
    my_tiles = lax.div(num_m * n_tiles - lax.axis_index("block") + blocks - 1, blocks)

    def tile_at(i):
        m_tile, n_tile = walk(lax.axis_index("block") + i * blocks, num_m, n_tiles, c.band)
        if c.cluster > 1:
            n_tile = n_tile * c.cluster + lax.axis_index("cluster")
        return *read_tile(schedule, m_tile, c.block_m, BOX), n_tile

    @pl.when(wg == CONSUMERS)
    def _produce():
        plgpu.set_max_registers(40, action="decrease")

        def per_tile(tile, step):
            weight, row0, row1, rows, n_tile = tile
            col = n_tile * tile_n

            def per_step(j, step):
                slot = lax.rem(step, c.stages)

                @pl.when(step >= c.stages)
                def _():
                    plgpu.barrier_wait(empty.at[slot])

                ks = pl.ds(j * c.block_k, c.block_k)
                shared: Any = dict(collective_axes="cluster") if c.cluster > 1 else {}
                for box, row in enumerate((row0, row1)):
                    target = a_load.at[slot, pl.ds(box * BOX, BOX)]
                    needed: Any = dict(predicate=rows > BOX) if box and c.shares_box and not interpret else {}
                    plgpu.copy_gmem_to_smem(x.at[pl.ds(row, BOX), ks], target, full.at[slot], **shared, **needed)
                columns = pl.ds(col, tile_n)
                if transposed:
                    plgpu.copy_gmem_to_smem(w.at[weight, ks, columns], b_smem.at[slot], full.at[slot])
                elif gate:
                    for part in range(parts):
                        target = b_smem.at[slot, pl.ds(part * tile_n, tile_n)]
                        plgpu.copy_gmem_to_smem(w.at[weight, part, columns, ks], target, full.at[slot])
                else:
                    plgpu.copy_gmem_to_smem(w.at[weight, columns, ks], b_smem.at[slot], full.at[slot])
                return step + 1

            return lax.fori_loop(0, jnp.where(weight >= 0, k_steps, 0), per_step, step)

        drain(each_tile(my_tiles, tile_at, per_tile), c.stages, empty)

    @pl.when(wg < CONSUMERS)
    def _multiply():
        plgpu.set_max_registers(232, action="increase")
        chunk_n = SWIZZLE // jnp.dtype(out.dtype).itemsize
        halves = c.block_n // CONSUMERS

        def release(step):
            plgpu.barrier_arrive(empty.at[lax.rem(step, c.stages)])

        def rhs(slot, start, width):
            columns = pl.ds(start, width)
            return b_smem.at[slot, :, columns] if transposed else b_smem.at[slot, columns].T

        def total(step, steps, acc_m, acc_n, multiply):
            """The sum over K of multiply(acc, slot), cast for the store."""

            def scope(acc):
                def per_step(j, step):
                    slot = lax.rem(step, c.stages)
                    plgpu.barrier_wait(full.at[slot])
                    multiply(acc, slot)
                    plgpu.wgmma_wait(1)

                    @pl.when(j > 0)
                    def _():
                        release(step - 1)

                    return step + 1

                end = lax.fori_loop(0, steps, per_step, step)
                value = acc[...]

                @pl.when(steps > 0)
                def _():
                    release(end - 1)

                if gate:
                    value = gated_product(value[:, : acc_n // 2], value[:, acc_n // 2 :], gate)
                return value.astype(out.dtype)

            return pl.run_scoped(scope, plgpu.WGMMAAccumulatorRef((acc_m, acc_n), jnp.float32))

        def store(value, boxes, rows, first_column):
            chunk = 0
            for box, first in enumerate(boxes):
                for start in range(0, value.shape[1], chunk_n):
                    slot = chunk % c.out_slots
                    plgpu.wait_smem_to_gmem(c.out_slots - 1, wait_read_only=True)
                    store_rows(
                        value[box * BOX : (box + 1) * BOX, start : start + chunk_n],
                        first,
                        rows,
                        pl.ds(first_column + start, chunk_n),
                        out,
                        out_write.at[wg, slot],
                        out_box.at[wg, slot],
                        out_row.at[wg, slot],
                    )
                    chunk += 1

        def two_boxes(step, steps, row0, row1, rows, col):
            if c.split == "m":

                def multiply(acc, slot):
                    plgpu.wgmma(acc, a_smem.at[slot, pl.ds(wg * BOX, BOX)], rhs(slot, 0, c.block_n))

                value = total(step, steps, BOX, c.block_n, multiply)
                # Without one_box, the second box of a group with fewer rows than a box is the first: nothing to store.
                mine = rows if c.shares_box else jnp.where((rows < BOX) & (wg == 1), 0, rows)
                store(value, [jnp.where(wg == 0, row0, row1)], mine, col)
            else:

                def multiply(acc, slot):
                    plgpu.wgmma(acc, a_smem.at[slot], rhs(slot, wg * halves, halves))

                value = total(step, steps, 2 * BOX, halves, multiply)
                store(value[:BOX], [row0], rows, col + wg * halves)
                store(value[BOX:], [row1], jnp.where(rows < BOX, 0, rows), col + wg * halves)

        def one_box(step, steps, row0, rows, col):
            """A tile of at most 64 rows: the warpgroups share its columns."""

            def multiply(acc, slot):
                a = a_smem.at[slot, pl.ds(0, BOX)]
                if gate:
                    for part in range(2):
                        b = rhs(slot, part * tile_n + wg * (tile_n // 2), tile_n // 2)
                        plgpu.wgmma(acc.at[:, part * (tile_n // 2) : (part + 1) * (tile_n // 2)], a, b)
                else:
                    plgpu.wgmma(acc, a, rhs(slot, wg * halves, halves))

            value = total(step, steps, BOX, halves, multiply)
            store(value, [row0], rows, col + wg * (tile_n // 2))

        def per_tile(tile, step):
            weight, row0, row1, rows, n_tile = tile
            col = n_tile * tile_n
            steps = jnp.where(weight >= 0, k_steps, 0)
            if c.shares_box:
                pl.when(rows > BOX)(lambda: two_boxes(step, steps, row0, row1, rows, col))
                pl.when(rows <= BOX)(lambda: one_box(step, steps, row0, rows, col))
            else:
                two_boxes(step, steps, row0, row1, rows, col)
            return step + steps

        each_tile(my_tiles, tile_at, per_tile)
        plgpu.wait_smem_to_gmem(0)


@functools.partial(jax.jit, static_argnames=("config", "out_dtype", "gate", "transposed", "zero_tail", "interpret"))
def grouped_matmul(
    x: jax.Array,  # [M, K]
    w: jax.Array,  # [G, N, K]; transposed: [G, K, N]; gate: [G, 2, N, K]
    schedule: Schedule,  # for block=config.block_m
    *,
    config: Config = Config(),  # noqa: B008
    out_dtype=None,
    gate: Gate | None = None,
    transposed: bool = False,
    zero_tail: bool = True,
    interpret=None,
) -> jax.Array:  # [M, N]
    """Rows of x times the weight of their group (see the module's docstring for the variants).

    M >= 64; N and K multiples of 64. zero_tail: without it, rows past the sum of the group sizes are left unwritten.
    """
    (m, k), n = x.shape, w.shape[2 if transposed or gate else 1]
    c = config
    out_dtype = jnp.dtype(out_dtype or x.dtype)
    if m < BOX or n % 64 or k % 64:
        raise ValueError(
            f"x {x.shape}, w {w.shape}: this kernel takes M >= {BOX} and N, K that are multiples of 64; pad the arrays."
        )
    if gate and (transposed or c.split == "n"):
        raise ValueError("gate goes with weights [G, 2, N, K] and Config(split='m'); use those.")
    if c.cluster > 1:
        empty = plgpu.ClusterBarrier(collective_axes=("cluster",), num_arrivals=CONSUMERS, num_barriers=c.stages)
    else:
        empty = plgpu.Barrier(num_arrivals=CONSUMERS, num_barriers=c.stages)
    b_shape = (c.block_k, c.block_n) if transposed else (c.block_n, c.block_k)
    out_shape = (CONSUMERS, c.out_slots, BOX, SWIZZLE // out_dtype.itemsize)
    kernel = plgpu.kernel(
        functools.partial(
            _body, config=c, gate=gate, transposed=transposed, zero_tail=zero_tail, interpret=bool(interpret)
        ),
        out_type=jax.ShapeDtypeStruct((m, n), out_dtype),
        grid=(c.num_blocks or num_sms() // c.cluster,),
        grid_names=("block",),
        cluster=(c.cluster,) if c.cluster > 1 else (),
        cluster_names=("cluster",) if c.cluster > 1 else (),
        num_threads=CONSUMERS + 1,
        thread_name="wg",
        scratch_types=dict(
            a_smem=row_views((c.stages, c.block_m, c.block_k), x.dtype, plain=False, interpret=bool(interpret)),
            b_smem=plgpu.SMEM((c.stages, *b_shape), w.dtype, transforms=swizzled(w.dtype)),
            out_smem=row_views(out_shape, out_dtype, plain=True, interpret=bool(interpret)),
            full=plgpu.Barrier(num_arrivals=4 if gate else 3, num_barriers=c.stages),
            empty=empty,
        ),
        compiler_params=compiler_params(),
        **({} if interpret is None else {"interpret": interpret}),
    )
    return kernel(schedule, x, w)
