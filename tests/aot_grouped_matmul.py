"""Compiles the Hopper matmuls to machine code without a GPU; run as `python aot_grouped_matmul.py WEIGHTS...`.

Prints what aot_quantize.py prints, for every rule of the shipped table that holds for weights of these formats
("bfloat16" among them), and of 4-bit weights for tiles of 8 and 16 tokens by warps, whether a rule ships them or not.
"""

import contextlib
import functools
import sys

import aot_quantize


def kernels(formats):
    """(name, function, argument shapes) of everything that is compiled."""
    import jax
    import jax.numpy as jnp

    from pallas_kernels import compat
    from pallas_kernels.grouped_matmul import Gate, mosaic_entry, tuning
    from pallas_kernels.quantize import get_format, quantize, quantize_weights

    groups, bf16, how = 128, jnp.bfloat16, dict(out_dtype=jnp.bfloat16)

    def argument_of(make, *shape):
        """The arrays that make(bfloat16 array) is made of, and what puts them together."""
        leaves, tree = jax.tree.flatten(jax.eval_shape(make, jax.ShapeDtypeStruct(shape, bf16)))
        return [(a.shape, a.dtype) for a in leaves], functools.partial(jax.tree.unflatten, tree)

    def product(x, w, sizes):
        return mosaic_entry.gated(x, w, sizes, Gate("silu"), **how) if w.ndim == 4 else forward(x, w, sizes)

    def forward(x, w, sizes):
        return mosaic_entry.forward(x, w, sizes, **how)

    def case(name, run, x, w, configs=None):
        (x_leaves, x_of), (w_leaves, w_of) = x, w

        def f(sizes, *leaves):
            with tuning.override(configs) if configs else contextlib.nullcontext():
                return run(x_of(leaves[: len(x_leaves)]), w_of(leaves[len(x_leaves) :]), sizes)

        return name, f, [((groups,), jnp.int32), *x_leaves, *w_leaves]

    def plain(a):
        return a

    n, k = 768, 2048
    for fmt in formats:
        pack = plain if fmt == "bfloat16" else functools.partial(quantize_weights, fmt=fmt)
        for parts in (1, 2):
            w = argument_of(pack, groups, *(() if parts == 1 else (2,)), n, k)
            for rows in (1, *(m * groups for m in (4, 8, 12, 24, 64, 128))):
                yield case(f"{fmt}, {parts} of {rows} rows", product, argument_of(plain, rows, k), w)
            for block_t in (8, 16) if fmt in ("nvfp4", "mxfp4") else ():
                many = dict(consumers=4, chunks=2, stages=2) if block_t == 8 and parts == 1 else {}
                config = dict(block_t=block_t, consumers=2, chunks=1, stages=4, per_sm=1, warp=True) | many
                configs, x = {"decode": config, "decode_gated": config}, argument_of(plain, 8 * groups, k)
                yield case(f"{fmt}, {parts} of by warps, {block_t} tokens", product, x, w, configs)
    m, n = 65536, 4096
    x = argument_of(plain, m, k)
    if "fp8_128x128" in formats:
        fp8 = argument_of(functools.partial(quantize, fmt="fp8_128"), m, k)
        pack = functools.partial(quantize_weights, fmt="fp8_128x128")
        yield case("fp8", forward, fp8, argument_of(pack, groups, n, k))
        for kind in ("silu", "swiglu_oai") if compat.REGISTERS_MOVE else ():
            gate = Gate(kind), get_format("fp8_128")
            joined = functools.partial(lambda gate, x, w, sizes: mosaic_entry.gated_quantize(x, w, sizes, *gate), gate)
            yield case(f"fp8 gated, {kind}", joined, fp8, argument_of(pack, groups, 2, 768, k))
    if "bfloat16" in formats:
        w = argument_of(plain, groups, n, k)
        yield case("prefill", forward, x, w)
        yield case("prefill, long rows", forward, argument_of(plain, m, 4096), argument_of(plain, groups, n, 4096))
        gated = argument_of(plain, groups, 2, 768, k)
        yield case("gated, many rows", product, argument_of(plain, 2 * m, k), gated)
        for name, rows in (("dlhs", m), ("dlhs, many rows", 2 * m)):
            dy = argument_of(plain, rows, n)
            yield case(name, lambda dy, w, sizes: mosaic_entry.dlhs(dy, w, sizes, **how), dy, w)
        drhs = functools.partial(mosaic_entry.drhs, num_groups=groups, **how)
        yield case("drhs", lambda dy, x, sizes: drhs(dy, x, sizes), argument_of(plain, m, n), x)


if __name__ == "__main__":
    sys.exit(aot_quantize.main("sm_90", functools.partial(kernels, sys.argv[1:])))
