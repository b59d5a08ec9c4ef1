"""Compiles the Hopper matmuls for quantised weights to machine code without a GPU; run as `python aot_few_rows.py`.

Prints what aot_quantize.py prints, for every rule of the shipped table for 4-bit weights, and for tiles of 8 and 16
tokens by warps, whether a rule ships them or not.
"""

import contextlib
import sys

import aot_quantize


def kernels():
    """(name, function, argument shapes) of everything that is compiled."""
    import jax
    import jax.numpy as jnp

    from pallas_kernels.grouped_matmul import Gate, mosaic_entry, tuning
    from pallas_kernels.quantize import quantize_weights

    k, n, groups = 2048, 768, 128
    for fmt in ("nvfp4", "mxfp4"):
        for parts in (1, 2):
            dense = jax.ShapeDtypeStruct((groups, *(() if parts == 1 else (2,)), n, k), jnp.bfloat16)
            leaves, tree = jax.tree.flatten(jax.eval_shape(lambda w, fmt=fmt: quantize_weights(w, fmt), dense))
            cases = [(f"{rows} rows", rows, None) for rows in (1, *(m * groups for m in (4, 8, 12, 24, 64, 128)))]
            for block_t in (8, 16):
                config = dict(block_t=block_t, consumers=2, chunks=1, stages=4, per_sm=1, warp=True)
                cases.append((f"by warps, {block_t} tokens", 8 * groups, {"decode": config, "decode_gated": config}))
            for name, rows, configs in cases:

                def run(x, sizes, *leaves, tree=tree, parts=parts, configs=configs):
                    w = jax.tree.unflatten(tree, leaves)
                    how = dict(out_dtype=jnp.bfloat16)
                    with tuning.override(configs) if configs else contextlib.nullcontext():
                        if parts == 2:
                            return mosaic_entry.gated(x, w, sizes, Gate("silu"), **how)
                        return mosaic_entry.forward(x, w, sizes, **how)

                shapes = [((rows, k), jnp.bfloat16), ((groups,), jnp.int32), *((a.shape, a.dtype) for a in leaves)]
                yield f"{fmt}, {parts} of {name}", run, shapes


if __name__ == "__main__":
    sys.exit(aot_quantize.main("sm_90", kernels))
