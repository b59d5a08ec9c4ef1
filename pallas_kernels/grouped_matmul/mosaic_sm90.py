"""BF16 grouped matmul for Hopper: x [M, K] rows sorted by group, w [G, N, K], out [M, N].

Persistent and warp-specialised. Each block of three warpgroups loops over output tiles of block_m x block_n: one
warpgroup feeds a ring of shared-memory stages through TMA, running ahead into the next tile while the other two
multiply and store. A tile's rows come as boxes of 64 rows (tiles.py), so ragged groups need no masks and no other
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
from .mosaic_tiles import (
    BOX,
    CONSUMERS,
    SLAB_STEP,
    columns_halve,
    held_by,
    nth_tile,
    offset_of,
    shares,
    store_box,
    store_rows,
    store_slab,
    stores_under_way,
    table_bytes,
    tables,
    tiles_of,
    tiles_of_block,
    walk,
    where_inside,
)
from .schedule import each_tile
from .tiles import find_tile, num_tiles, read_boxes, read_pair, uneven

SWIZZLE = 128
SMEM_BYTES = 227 * 1024


def wasteful(cluster: int, tiles: int) -> bool:
    """Whether clusters of blocks adjacent along N do over a tenth more than `tiles` tiles."""
    return -tiles % cluster > 0.1 * tiles


@dataclasses.dataclass(frozen=True)
class Config:
    """Tile shape and order of the prefill kernel.

    block_m, block_n, block_k: output tile of a block and the depth of one stage (elements). cluster: blocks that share
    what they load through TMA multicast; four took 1.7 times as long as two, an H200 has not the place for enough of
    them. share: what that is, always "rows", by blocks adjacent along N, or where a group has rows for two blocks
    "weights" (of a cluster of two). band: columns of tiles walked together before moving along N (0: all), which
    decides what stays in the L2 cache. lead: steps by which one multiplying warpgroup begins before the other, so that
    one stores while the other multiplies; less than stages. slab: with shared weights, the most rows of a group beyond
    whole pairs of blocks that make one tile of both (see tiles.py), on the matrix unit's N side; 0: block_m, as boxes.
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
    slab: int = 0
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
        fits = self.slab % SLAB_STEP == 0 and self.block_m <= self.slab < 3 * BOX
        if self.slab and (not fits or (self.share, self.block_n) != ("weights", 256)):
            raise ValueError(
                f"slab={self.slab}: choose a multiple of {SLAB_STEP} from {self.block_m} up, below {3 * BOX}; it goes "
                "with share='weights' and block_n=256."
            )
        if self.share == "weights" and (self.cluster, self.block_m) != (2, 2 * BOX):
            raise ValueError(
                f"share='weights' with cluster={self.cluster}, block_m={self.block_m}: it is for clusters of two "
                f"blocks of {2 * BOX} rows."
            )

    def fitted(self, tiles: int, groups: int, out_dtype=jnp.bfloat16) -> Config:
        """For `tiles` tiles along N: without a cluster, of which one block would have nothing to do too often.

        Where the tables of many groups leave no room, results leave from one place. Slabs are for results of 16 bits.
        """
        c = self
        if wasteful(self.cluster, tiles):
            c = dataclasses.replace(c, cluster=1, share="rows", slab=0, out_slots=2)
        if jnp.dtype(out_dtype).itemsize > 2:
            c = dataclasses.replace(c, slab=0)
        fits = c.smem_bytes() + table_bytes(groups) <= SMEM_BYTES
        return c if fits else dataclasses.replace(c, out_slots=1)

    @property
    def pair_slab(self) -> int:
        """What tiles.py calls slab."""
        return (self.slab or self.block_m) if self.share == "weights" else 0

    @property
    def held_m(self) -> int:
        """Rows of x in a stage."""
        return max(self.block_m, self.slab)

    @property
    def registers(self) -> tuple[int, int]:
        """Of a thread of the copying warpgroup and of a multiplying one; the former would spill slabs' copies at 40."""
        return (48, 224) if self.slab > 2 * BOX else (40, 232)

    @property
    def slabs(self) -> range:
        """The rows that slabs are rounded up to: each is a program of its own."""
        return range(BOX + SLAB_STEP, self.slab + 1, SLAB_STEP)

    def smem_bytes(self, itemsize: int = 2) -> int:
        """Shared memory of one block, barriers left out."""
        stage = (self.held_m + self.block_n) * self.block_k * itemsize
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


def fill_stages(my_tiles, tile_at, load, k_steps: int, stages: int, empty):
    """What the copying warpgroup does: all steps of all tiles of a block into a ring of stages.

    load(tile, step of the tile, stage) starts the copies of a step, when the stage is released. A tile without a weight
    (-1) has none.
    """

    def per_tile(tile, step):
        def per_step(j, step):
            slot = lax.rem(step, stages)

            @pl.when(step >= stages)
            def _():
                plgpu.barrier_wait(empty.at[slot])

            load(tile, j, slot)
            return step + 1

        return lax.fori_loop(0, jnp.where(tile[0] >= 0, k_steps, 0), per_step, step)

    drain(each_tile(my_tiles, tile_at, per_tile), stages, empty)


def _body(
    sizes,
    offset,
    x,
    w,
    out,
    tiles_smem,
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
    num_groups,
    zero_tail,
    interpret,
):
    c: Config = config
    m, k = x.shape
    _, n = out.shape
    parts = 2 if gate else 1
    tile_n = c.block_n // parts
    a_smem, a_load = as_views(a_smem, 2, interpret)
    out_write, out_box, out_row = as_views(out_smem, 3, interpret)
    k_steps = pl.cdiv(k, c.block_k)
    max_boxes = c.block_m // BOX
    n_tiles = pl.cdiv(n, tile_n * c.cluster)
    wg = lax.axis_index("wg")
    tiles = tiles_of(sizes, tiles_smem, c.block_m, c.pair_slab)
    groups = dict(num_groups=num_groups, num_rows=m, block=c.block_m)

    def tiles_here():
        """(how many tiles this block has, what a tile of them is). Asked in either role: less to keep in registers."""
        num_m = num_tiles(tiles, **groups, slab=c.pair_slab, zero_tail=zero_tail)
        count, held = tiles_of_block(num_m * n_tiles), dict(num_weights=w.shape[0], group_offset=offset[0])
        turned = (lax.rem(lax.axis_index("block"), 2) == 1) & uneven(tiles, num_groups)

        def tile_at(i):
            i = jnp.where(turned, jnp.maximum(count - 1 - i, 0), i)
            m_tile, n_tile = walk(nth_tile(i), num_m, n_tiles, c.band)
            tile = find_tile(tiles, m_tile, **groups, **held)
            if c.share == "weights":
                rank = lax.axis_index("cluster")
                paired, side, slab_rows, boxes = read_pair(tile, rank, c.block_m, c.pair_slab, BOX)
                slab_rows = jnp.where(slab_rows > BOX, slab_rows, 0) if c.slab else jnp.int32(0)
                return *boxes, slab_rows, paired, n_tile * 2 + side
            if c.cluster > 1:
                n_tile = n_tile * c.cluster + lax.axis_index("cluster")
            return *read_boxes(tile, c.block_m, BOX), jnp.int32(0), jnp.bool_(False), n_tile

        return count, tile_at

    @pl.when(wg == CONSUMERS)
    def _produce():
        plgpu.set_max_registers(c.registers[0], action="decrease")
        my_tiles, tile_at = tiles_here()

        def weights(weight, n_tile, ks):
            columns = pl.ds(n_tile * tile_n, tile_n)
            if transposed:
                return [w.at[weight, ks, columns]]
            return [w.at[weight, part, columns, ks] for part in range(parts)] if gate else [w.at[weight, columns, ks]]

        def load_stage(tile, j, slot):
            weight, first, last, boxes, _, slab_rows, paired, n_tile = tile
            ks = pl.ds(j * c.block_k, c.block_k)
            together: Any = dict(collective_axes="cluster") if c.cluster > 1 else {}

            def copy_rows(row, at, rows: int, needed, shared: Any):
                source, target = x.at[pl.ds(row, rows), ks], a_load.at[slot, pl.ds(at, rows)]
                if needed is None or not interpret:
                    needed = {} if needed is None else dict(predicate=needed)
                    plgpu.copy_gmem_to_smem(source, target, full.at[slot], **shared, **needed)
                else:  # the interpreter has no predicates
                    pl.when(needed)(lambda: plgpu.copy_gmem_to_smem(source, target, full.at[slot], **shared))
                    pl.when(jnp.logical_not(needed))(lambda: plgpu.barrier_arrive(full.at[slot]))

            def load_slab(shared: Any):
                copy_rows(first, 0, BOX, None, shared)
                for held in c.slabs:
                    here = held_by(slab_rows, held)
                    pl.when(here)(functools.partial(copy_rows, first + BOX, BOX, held - BOX, None, shared))

            def load(rows_shared: Any, weights_shared: Any):
                for box in range(max_boxes):
                    row = jnp.where(box < boxes - 1, first + box * BOX, last)
                    copy_rows(row, box * BOX, BOX, box < boxes if box else None, rows_shared)
                load_weights(weights_shared)

            def load_weights(weights_shared: Any):
                for part, window in enumerate(weights(weight, n_tile, ks)):
                    target = b_smem.at[slot, pl.ds(part * tile_n, tile_n)] if gate else b_smem.at[slot]
                    plgpu.copy_gmem_to_smem(window, target, full.at[slot], **weights_shared)

            if c.share == "weights":
                pl.when(paired)(lambda: load({}, together))
                pl.when(jnp.logical_not(paired) & (slab_rows == 0))(lambda: load(together, {}))
                if c.slab:

                    @pl.when(slab_rows > 0)
                    def _():
                        load_slab(together)
                        load_weights({})
            else:
                load(together, {})

        fill_stages(my_tiles, tile_at, load_stage, k_steps, c.stages, empty)

    @pl.when(wg < CONSUMERS)
    def _multiply():
        plgpu.set_max_registers(c.registers[1], action="increase")
        my_tiles, tile_at = tiles_here()
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

        def totals(shapes, issue, step, steps):
            """The sums over K, in an accumulator of each shape; issue(accs, slot) starts the products of one stage."""

            def scope(*accs):
                def per_step(j, step):
                    slot = lax.rem(step, c.stages)
                    if c.lead:
                        lead_on(wg, ahead, step == c.lead)
                    plgpu.barrier_wait(full.at[slot])
                    plgpu.wgmma_wait(issue(accs, slot))

                    @pl.when(j > 0)
                    def _():
                        release(step - 1)

                    return step + 1

                end = lax.fori_loop(0, steps, per_step, step)
                values = [acc[...] for acc in accs]

                @pl.when(steps > 0)
                def _():
                    release(end - 1)

                return values

            return pl.run_scoped(scope, *(plgpu.WGMMAAccumulatorRef(shape, jnp.float32) for shape in shapes))

        def out_views(chunk):
            """Where the chunk-th piece of a tile is put for the store, once what was there before is read."""
            plgpu.wait_smem_to_gmem(stores_under_way(chunk, c.out_slots, n, tile_n), wait_read_only=True)
            return [view.at[wg, chunk % c.out_slots] for view in (out_write, out_box, out_row)]

        def tile_of(boxes, tile, step, steps):
            """A tile of this many boxes, which is known when the kernel is compiled."""
            _, first, last, _, group_rows, _, _, n_tile = tile
            work = shares(boxes, wg, tile_n)

            def issue(accs, slot):
                return sum(multiply(acc, slot, *piece) for acc, piece in zip(accs, work, strict=True))

            values = totals([(BOX, parts * columns) for _, _, columns in work], issue, step, steps)
            if gate:
                values = [gated_product(v[:, : v.shape[1] // 2], v[:, v.shape[1] // 2 :], gate) for v in values]
            always_whole = boxes > 1 and (boxes % CONSUMERS == 0 or columns_halve(tile_n))
            chunk = 0
            for (box, first_column, columns), value in zip(work, values, strict=True):
                value = value.astype(out.dtype)
                row = jnp.where(box < boxes - 1, first + box * BOX, last)
                rows = jnp.where(box < boxes, group_rows, 0)
                for start in range(0, columns, chunk_n):
                    column = n_tile * tile_n + first_column + start
                    part, where = value[:, start : start + chunk_n], (pl.ds(column, chunk_n), out)

                    @where_inside(column, n, tile_n)
                    def _(chunk=chunk, part=part, row=row, rows=rows, where=where):
                        views = out_views(chunk)
                        if always_whole:
                            store_box(part, row, *where, *views[:2])
                        else:
                            store_rows(part, row, rows, *where, *views)

                    chunk += 1

        def slab_of(held, tile, step, steps):
            """A slab of held - 15 to held rows of x, on the matrix unit's N side, where 16 more cost that of 16."""
            _, first, _, _, _, rows, _, n_tile = tile
            halves = [(i * tile_n + wg * BOX if gate else (wg * 2 + i) * BOX) for i in range(2)]

            def issue(accs, slot):
                for acc, column in zip(accs, halves, strict=True):
                    at = pl.ds(column, BOX)
                    a = b_smem.at[slot, :, at].T if transposed else b_smem.at[slot, at]
                    plgpu.wgmma(acc, a, a_smem.at[slot, pl.ds(0, held)].T)
                return len(halves)

            values = totals([(BOX, held)] * 2, issue, step, steps)
            if gate:
                values, halves = [gated_product(values[0], values[1], gate)], [wg * BOX]
            chunk = 0
            for value, column in zip(values, halves, strict=True):
                column = n_tile * tile_n + column
                columns, value = pl.ds(column, BOX), value.astype(out.dtype)
                for start in range(0, held, BOX):
                    end = min(start + BOX, held)
                    there = None if end <= held - SLAB_STEP else rows - start

                    @where_inside(column, n, tile_n)
                    def _(chunk=chunk, part=value[:, start:end], start=start, there=there, columns=columns):
                        store_slab(part, first + start, there, columns, out, *out_views(chunk))

                    chunk += 1

        def per_tile(tile, step):
            steps = jnp.where(tile[0] >= 0, k_steps, 0)
            for boxes in range(1, max_boxes + 1):
                here = (tile[3] == boxes) & (tile[5] == 0)
                pl.when(here)(functools.partial(tile_of, boxes, tile, step, steps))
            for held in c.slabs:
                pl.when(held_by(tile[5], held))(functools.partial(slab_of, held, tile, step, steps))
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
    group_sizes: jax.Array,  # int32 [groups]
    group_offset: jax.Array | None = None,  # int32 [], the group that w[0] belongs to
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
    out_dtype = jnp.dtype(out_dtype or x.dtype)
    c = config.fitted(pl.cdiv(n, config.block_n // (2 if gate else 1)), group_sizes.shape[0], out_dtype)
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
    sizes, tiles_smem = tables(group_sizes, c.block_m, c.pair_slab, interpret)
    kernel = plgpu.kernel(
        functools.partial(
            _body,
            config=c,
            gate=gate,
            transposed=transposed,
            num_groups=group_sizes.shape[0],
            zero_tail=zero_tail,
            interpret=bool(interpret),
        ),
        out_type=jax.ShapeDtypeStruct((m, n), out_dtype),
        grid=(c.num_blocks or num_sms() // c.cluster,),
        grid_names=("block",),
        cluster=(c.cluster,) if c.cluster > 1 else (),
        cluster_names=("cluster",) if c.cluster > 1 else (),
        num_threads=CONSUMERS + 1,
        thread_name="wg",
        scratch_types=dict(
            tiles_smem=tiles_smem,
            a_smem=row_views((c.stages, c.held_m, c.block_k), x.dtype, plain=False, interpret=bool(interpret)),
            b_smem=plgpu.SMEM((c.stages, *b_shape), w.dtype, transforms=swizzled(w.dtype)),
            out_smem=row_views(out_shape, out_dtype, plain=True, interpret=bool(interpret)),
            full=plgpu.Barrier(num_arrivals=c.block_m // BOX + (2 if gate else 1), num_barriers=c.stages),
            empty=empty,
            **(dict(ahead=plgpu.Barrier()) if c.lead else {}),
        ),
        compiler_params=compiler_params(),
        **({} if interpret is None else {"interpret": interpret}),
    )
    return kernel(sizes, offset_of(group_offset), x, w)
