"""Compiles the kernels for few tokens to machine code without a GPU; run as `python aot_few_tokens.py sm_90|sm_100`.

Prints what `aot_quantize.py` prints, with its exit statuses.
"""

import sys

from aot_quantize import main

FORMATS = ("bfloat16", "nvfp4", "mxfp4", "mxfp8", "fp8_128x128")
MODELS = {"Qwen3-30B-A3B": (2048, 768, 128), "half DeepSeek-V3": (7168, 2048, 64)}  # D, F, E


def kernels():
    """(name, function, argument shapes): 8 experts of each of 1 and 4 tokens."""
    import jax
    import jax.numpy as jnp

    from pallas_kernels.grouped_matmul import Gate, mosaic_vector
    from pallas_kernels.quantize import quantize_weights
    from pallas_kernels.route import Rule

    bf16, i32, f32, struct = jnp.bfloat16, jnp.int32, jnp.float32, jax.ShapeDtypeStruct

    def weight(fmt, *shape):
        w = struct(shape, bf16)
        return w if fmt == "bfloat16" else jax.eval_shape(lambda w: quantize_weights(w, fmt), w)

    def of_leaves(name, f, *args):
        leaves, tree = jax.tree.flatten(args)
        return name, lambda *leaves: f(*jax.tree.unflatten(tree, leaves)), [(a.shape, a.dtype) for a in leaves]

    def up(x, w, ids):
        return mosaic_vector.run_multiply(x, w, ids, gate=Gate(), out_dtype=bf16)

    def down(x, w, ids, weights):
        return mosaic_vector.run_sum(x, w, ids, weights, out_dtype=bf16)

    def chosen(x, w, logits, following):
        how = dict(rule=Rule(8), bias=None, valid=None, gate=Gate(), gate_up_bias=None, following=following)
        return mosaic_vector.run_chosen(x, w, logits, **how)

    for fmt in FORMATS:
        for model, (d, f, e) in MODELS.items():
            for tokens in (1, 4):
                ids, name = struct((tokens, 8), i32), f"{fmt}, {model}, {tokens} tokens"
                flat = struct((tokens * 8,), i32)
                yield of_leaves(f"{name}, up", up, struct((tokens, d), bf16), weight(fmt, e, 2, f, d), flat)
                if tokens == 1:
                    given = struct((1, d), bf16), weight(fmt, e, 2, f, d), struct((1, e), f32), weight(fmt, e, d, f)
                    yield of_leaves(f"{name}, chosen", chosen, *given)
                hidden = struct((tokens * 8, f), bf16)
                yield of_leaves(f"{name}, down", down, hidden, weight(fmt, e, d, f), ids, struct(ids.shape, f32))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], kernels))
