"""BF16 grouped matmul for Hopper: x [M, K] rows sorted by group, w [G, N, K], out [M, N].

Persistent and warp-specialised. Each block of three warpgroups loops over output tiles of block_m x block_n: one
warpgroup feeds a ring of shared-memory stages through TMA, running ahead into the next tile while the other two
multiply and store. A tile's rows come as boxes of 64 rows (schedule.py), so ragged groups need no masks and no other
store than a full box; only groups with fewer than 64 rows are stored row by row. A tile at the end of a group has as
many boxes as its rows need: the two warpgroups take half of the boxes each, and half the columns of an odd one.

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

from .gate import Gate, gated_product
from .schedule import Schedule, each_tile, num_tiles, read_boxes, read_pair

BOX = 64
SWIZZLE = 128
CONSUMERS = 2
SMEM_BYTES = 227 * 1024


def wasteful(cluster: int, tiles: int) -> bool:
    """Whether clusters of blocks adjacent along N do over a tenth more than `tiles` tiles."""
    return -tiles % cluster > 0.1 * tiles


@dataclasses.dataclass(frozen=True)
class Config:
    """Tile shape and order of the prefill kernel.

    block_m, block_n, block_k: output tile of a block and the depth of one stage (elements). cluster: blocks that share
    what they load through TMA multicast. share: what that is, always "rows", by blocks adjacent along N, or where a
    group has rows for two blocks "weights" (of a cluster of two). band: columns of tiles walked together before moving
    along N (0: all), which decides what stays in the L2 cache. lead: steps by which one multiplying warpgroup begins
    before the other, so that one stores while the other multiplies; less than stages. prefetch: steps for which
    weights are called into the L2 cache at a time, as many steps ahead of the copies; up to 4, 0 for none.
    """

    block_n: int = 256
    block_k: int = 64
    stages: int = 4
    cluster: int = 1
    share: Literal["rows", "weights"] = "rows"
    band: int = 0
    block_m: int = 128
    out_slots: int = 2
    lead: int = 0
    prefetch: int = 0
    num_blocks: int | None = None

    def __post_init__(self):
        if self.block_m not in (2 * BOX, 4 * BOX):
            raise ValueError(f"block_m={self.block_m}: choose {2 * BOX} or {4 * BOX}.")
        if self.block_n % 64 or not 64 <= self.block_n <= 512 * BOX // self.block_m:
            raise ValueError(
                f"block_n={self.block_n}: choose a multiple of 64 up to {512 * BOX // self.block_m} for block_m="
                f"{self.block_m}; the accumulators of a warpgroup have to fit into its registers."
            )
        if self.block_k != 64:
            raise ValueError(f"block_k={self.block_k}: a row of one stage is one 128-byte swizzle; use 64.")
        if not 0 <= self.lead <= self.stages:
            raise ValueError(f"lead={self.lead}: choose 0 to {self.stages}, the stages; none gets further alone.")
        if not 0 <= self.prefetch * self.block_k <= 256:
            raise ValueError(f"prefetch={self.prefetch}: choose 0 to 4.")
        if self.share == "weights" and (self.cluster, self.block_m) != (2, 2 * BOX):
            raise ValueError(
                f"share='weights' with cluster={self.cluster}, block_m={self.block_m}: it is for clusters of two "
                f"blocks of {2 * BOX} rows."
            )

    def fitted(self, tiles: int) -> Config:
        """For `tiles` tiles along N: without a cluster, of which one block would have nothing to do too often."""
        return dataclasses.replace(self, cluster=1, share="rows") if wasteful(self.cluster, tiles) else self

    def smem_bytes(self, itemsize: int = 2) -> int:
        """Shared memory of one block, barriers left out."""
        stage = (self.block_m + self.block_n) * self.block_k * itemsize
        return self.stages * stage + CONSUMERS * self.out_slots * BOX * 64 * 2


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


def arrive(barrier, *, cluster: int, interpret: bool):
    """Arrives on a barrier of a block, or of a cluster, when the whole warpgroup is there.

    One warp alone signals the blocks of a cluster, without waiting for the other three, whose products may still read
    what is about to be overwritten.
    """
    if cluster > 1 and not interpret:
        from jax.experimental.mosaic import gpu as mgpu

        @plgpu.inline_mgpu()
        def together(ctx):
            del ctx
            mgpu.utils.warpgroup_barrier()

        together()  # pyright: ignore[reportCallIssue]
    plgpu.barrier_arrive(barrier)


def prefetch(windows, tile, following, step, width: int, k_steps: int):
    """Calls the weights of `width` steps into the L2 cache, once in as many, that much ahead of the copies.

    Wide windows are long runs of a weight's rows, which memory serves better than the copies' 128 bytes.
    windows(weight, n_tile, first step, steps): slices of the weights. Past this tile's last window comes the next tile.
    """
    index = lax.div(step, width) + 1
    here = index < pl.cdiv(k_steps, width)
    weight, n_tile = (jnp.where(here, tile[i], following[i]) for i in (0, -1))
    for window in windows(jnp.maximum(weight, 0), n_tile, jnp.where(here, index * width, 0), width):
        due = (weight >= 0) & (lax.rem(step, width) == 0)
        plgpu.async_prefetch(window, predicate=due)  # pyright: ignore[reportCallIssue]


def follow(wg, ahead):
    """Has the second multiplying warpgroup wait for `lead_on` of the first."""
    pl.when(wg == 1)(lambda: plgpu.barrier_wait(ahead))


def lead_on(wg, ahead, now):
    """The first warpgroup lets the second begin, once, where `now` holds."""
    pl.when((wg == 0) & now)(lambda: plgpu.barrier_arrive(ahead))


def drain(steps, stages: int, empty):
    """Waits until the last stages are released: a block may leave only when nobody will arrive on its barriers."""

    def wait(i, _):
        plgpu.barrier_wait(empty.at[lax.rem(i, stages)])
        return ()

    lax.fori_loop(jnp.maximum(steps - stages, 0), steps, wait, ())


def nth_tile(i):
    """Index of a block's i-th tile. Every second round goes backwards: rounds of unequal tiles even out."""
    block, blocks = lax.axis_index("block"), lax.axis_size("block")
    return i * blocks + jnp.where(lax.rem(i, 2) == 1, blocks - 1 - block, block)


def tiles_of_block(count):
    """How many of `count` tiles a block has."""
    rounds = lax.div(count, lax.axis_size("block"))
    return rounds + jnp.where(nth_tile(rounds) < count, 1, 0)


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


def store_box(value, first_row, columns, out_gmem, write_view, box_view):
    """Stores value [64, C] at out[first_row:, columns]."""
    write_view[...] = value
    plgpu.commit_smem()
    plgpu.copy_smem_to_gmem(box_view, out_gmem.at[pl.ds(first_row, BOX), columns])


def store_rows(value, first_row, rows, columns, out_gmem, write_view, box_view, row_view):
    """Stores value [64, C] at out[first_row:, columns]: a whole box, or row by row where the group has fewer rows."""

    @pl.when(rows >= BOX)
    def _():
        store_box(value, first_row, columns, out_gmem, write_view, box_view)

    @pl.when(rows < BOX)
    def _():
        row_view[...] = value
        plgpu.commit_smem()

        def one(i, _):
            plgpu.copy_smem_to_gmem(row_view.at[pl.ds(i, 1)], out_gmem.at[pl.ds(first_row + i, 1), columns])
            return ()

        lax.fori_loop(0, rows, one, ())


def columns_halve(width: int) -> bool:
    """Whether the warpgroups can take half the columns each, in the chunks of 64 that are stored."""
    return width % (CONSUMERS * 64) == 0


def shares(boxes: int, wg, width: int) -> list[tuple[Any, Any, int]]:
    """(box, first column, columns) of what a multiplying warpgroup does of a tile of `boxes` boxes x `width` columns.

    Where an odd box cannot be halved in chunks of 64 columns, the second warpgroup gets a box that is not there.
    """
    whole, odd = divmod(boxes, CONSUMERS)
    if odd and not columns_halve(width):
        whole, odd = whole + 1, 0
    half = width // CONSUMERS
    return [(wg * whole + i, 0, width) for i in range(whole)] + [(boxes - 1, wg * half, half)] * odd


def _body(
    schedule,
    x,
    w,
    out,
    a_smem,
    b_smem,
    out_smem,
    full,
    empty,
    ahead=None,
    *,
    config,
    gate,
    transposed,
    zero_tail,
    interpret,
):
    c: Config = config
    _, k = x.shape
    _, n = out.shape
    parts = 2 if gate else 1
    tile_n = c.block_n // parts
    a_smem, a_load = as_views(a_smem, 2, interpret)
    out_write, out_box, out_row = as_views(out_smem, 3, interpret)
    k_steps = pl.cdiv(k, c.block_k)
    max_boxes = c.block_m // BOX
    n_tiles = pl.cdiv(n, tile_n * c.cluster)
    wg = lax.axis_index("wg")
    num_m = num_tiles(schedule, x.shape[0], c.block_m, zero_tail=zero_tail)
    my_tiles = tiles_of_block(num_m * n_tiles)

    def tile_at(i):
        m_tile, n_tile = walk(nth_tile(i), num_m, n_tiles, c.band)
        if c.share == "weights":
            paired, side, rows = read_pair(schedule, m_tile, lax.axis_index("cluster"), c.block_m, BOX)
            return *rows, paired, n_tile * 2 + side
        if c.cluster > 1:
            n_tile = n_tile * c.cluster + lax.axis_index("cluster")
        return *read_boxes(schedule, m_tile, c.block_m, BOX), jnp.bool_(False), n_tile

    @pl.when(wg == CONSUMERS)
    def _produce():
        plgpu.set_max_registers(40, action="decrease")

        def weights(weight, n_tile, j, steps=1):
            ks, columns = pl.ds(j * c.block_k, steps * c.block_k), pl.ds(n_tile * tile_n, tile_n)
            if transposed:
                return [w.at[weight, ks, columns]]
            return [w.at[weight, part, columns, ks] for part in range(parts)] if gate else [w.at[weight, columns, ks]]

        def per_tile(i, tile, step):
            weight, first, last, boxes, _, paired, n_tile = tile
            following = tile_at(i + 1)

            def per_step(j, step):
                slot = lax.rem(step, c.stages)

                @pl.when(step >= c.stages)
                def _():
                    plgpu.barrier_wait(empty.at[slot])

                ks = pl.ds(j * c.block_k, c.block_k)
                together: Any = dict(collective_axes="cluster") if c.cluster > 1 else {}

                def load(rows_shared: Any, weights_shared: Any):
                    for box in range(max_boxes):
                        row = jnp.where(box < boxes - 1, first + box * BOX, last)
                        source, target = x.at[pl.ds(row, BOX), ks], a_load.at[slot, pl.ds(box * BOX, BOX)]
                        needed: Any = dict(predicate=box < boxes) if box and not interpret else {}
                        plgpu.copy_gmem_to_smem(source, target, full.at[slot], **rows_shared, **needed)
                    for part, window in enumerate(weights(weight, n_tile, j)):
                        target = b_smem.at[slot, pl.ds(part * tile_n, tile_n)] if gate else b_smem.at[slot]
                        plgpu.copy_gmem_to_smem(window, target, full.at[slot], **weights_shared)

                if c.share == "weights":
                    pl.when(paired)(lambda: load({}, together))
                    pl.when(jnp.logical_not(paired))(lambda: load(together, {}))
                else:
                    load(together, {})
                if c.prefetch and not interpret:
                    prefetch(weights, tile, following, j, c.prefetch, k_steps)
                return step + 1

            return following, lax.fori_loop(0, jnp.where(weight >= 0, k_steps, 0), per_step, step)

        _, steps = lax.fori_loop(0, my_tiles, lambda i, carry: per_tile(i, *carry), (tile_at(0), jnp.int32(0)))
        drain(steps, c.stages, empty)

    @pl.when(wg < CONSUMERS)
    def _multiply():
        plgpu.set_max_registers(232, action="increase")
        chunk_n = SWIZZLE // jnp.dtype(out.dtype).itemsize

        def release(step):
            arrive(empty.at[lax.rem(step, c.stages)], cluster=c.cluster, interpret=interpret)

        def multiply(acc, slot, box, first_column, columns):
            """acc [64, parts * columns] += a box times these columns of each part of the weights."""
            a = a_smem.at[slot, pl.ds(box * BOX, BOX)]
            joined = (
                [(0, c.block_n)] if columns == tile_n else [(p * tile_n + first_column, columns) for p in range(parts)]
            )
            for p, (start, width) in enumerate(joined):
                at = pl.ds(start, width)
                b = b_smem.at[slot, :, at] if transposed else b_smem.at[slot, at].T
                target = acc if len(joined) == 1 else acc.at[:, p * columns : (p + 1) * columns]
                plgpu.wgmma(target, a, b)
            return len(joined)

        def totals(work, step, steps):
            """The sums over K of the boxes and columns in `work`, cast for the store."""

            def scope(*accs):
                def per_step(j, step):
                    slot = lax.rem(step, c.stages)
                    if c.lead:
                        lead_on(wg, ahead, step == c.lead)
                    plgpu.barrier_wait(full.at[slot])
                    plgpu.wgmma_wait(sum(multiply(acc, slot, *piece) for acc, piece in zip(accs, work, strict=True)))

                    @pl.when(j > 0)
                    def _():
                        release(step - 1)

                    return step + 1

                end = lax.fori_loop(0, steps, per_step, step)
                values = [acc[...] for acc in accs]

                @pl.when(steps > 0)
                def _():
                    release(end - 1)

                if gate:
                    values = [gated_product(v[:, : v.shape[1] // 2], v[:, v.shape[1] // 2 :], gate) for v in values]
                return [v.astype(out.dtype) for v in values]

            accs = [plgpu.WGMMAAccumulatorRef((BOX, parts * columns), jnp.float32) for _, _, columns in work]
            return pl.run_scoped(scope, *accs)

        def tile_of(boxes, tile, step, steps):
            """A tile of this many boxes, which is known when the kernel is compiled."""
            _, first, last, _, group_rows, _, n_tile = tile
            work = shares(boxes, wg, tile_n)
            always_whole = boxes > 1 and (boxes % CONSUMERS == 0 or columns_halve(tile_n))
            chunk = 0
            for (box, first_column, columns), value in zip(work, totals(work, step, steps), strict=True):
                row = jnp.where(box < boxes - 1, first + box * BOX, last)
                rows = jnp.where(box < boxes, group_rows, 0)
                for start in range(0, columns, chunk_n):
                    slot = chunk % c.out_slots
                    where = pl.ds(n_tile * tile_n + first_column + start, chunk_n), out
                    views = [view.at[wg, slot] for view in (out_write, out_box, out_row)]
                    plgpu.wait_smem_to_gmem(c.out_slots - 1, wait_read_only=True)
                    part = value[:, start : start + chunk_n]
                    if always_whole:
                        store_box(part, row, *where, *views[:2])
                    else:
                        store_rows(part, row, rows, *where, *views)
                    chunk += 1

        def per_tile(tile, step):
            steps = jnp.where(tile[0] >= 0, k_steps, 0)
            for boxes in range(1, max_boxes + 1):
                pl.when(tile[3] == boxes)(functools.partial(tile_of, boxes, tile, step, steps))
            return step + steps

        if c.lead:
            follow(wg, ahead)
        end = each_tile(my_tiles, tile_at, per_tile)
        if c.lead:
            lead_on(wg, ahead, end <= c.lead)
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
    c = config.fitted(pl.cdiv(n, config.block_n // (2 if gate else 1)))
    out_dtype = jnp.dtype(out_dtype or x.dtype)
    if m < BOX or n % 64 or k % 64:
        raise ValueError(
            f"x {x.shape}, w {w.shape}: this kernel takes M >= {BOX} and N, K that are multiples of 64; pad the arrays."
        )
    if gate and transposed:
        raise ValueError("gate goes with weights [G, 2, N, K]; use those.")
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
            full=plgpu.Barrier(num_arrivals=c.block_m // BOX + (2 if gate else 1), num_barriers=c.stages),
            empty=empty,
            **(dict(ahead=plgpu.Barrier()) if c.lead else {}),
        ),
        compiler_params=compiler_params(),
        **({} if interpret is None else {"interpret": interpret}),
    )
    return kernel(schedule, x, w)
