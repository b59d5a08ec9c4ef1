"""Compiles the kernels of a decode step to machine code without a GPU; run as `python aot_decode.py sm_90|sm_100`.

Prints what `aot_quantize.py` prints, with its exit statuses.
"""

import sys

from aot_quantize import main


def kernels():
    """(name, function, argument shapes) at Qwen3-30B-A3B's sizes."""
    import jax.numpy as jnp

    from pallas_kernels import decode
    from pallas_kernels.route import Rule

    bf16, f32, i32, how = jnp.bfloat16, jnp.float32, jnp.int32, dict(implementation="mosaic_sm90")
    row, scale, d, heads, groups = ((1, 2048), bf16), ((2048,), bf16), 2048, 32, 4
    weighted = [((8, d), bf16), ((8,), i32), ((8,), f32)]

    def norm(x, s, w, *add, out=bf16, copies=1):
        more = decode.Weighted(*add) if add else None
        return decode.normed_linear(x, s, w, add=more, eps=1e-6, out_dtype=out, copies=copies, **how)

    yield "projections", norm, [row, scale, ((5120, d), bf16), *weighted]
    yield "router", lambda *a: norm(*a, out=f32, copies=8), [row, scale, ((128, d), bf16)]
    yield "vocabulary", lambda *a: norm(*a, out=f32), [row, scale, ((151936, d), bf16), *weighted]
    for slots in (1056, 32768):
        cache, head = ((1, groups, slots, 128), bf16), ((128,), bf16)
        shapes = [
            ((1, 5120), bf16),
            head,
            head,
            ((64,), f32),
            ((64,), f32),
            cache,
            cache,
            ((1, slots), bool),
            ((), i32),
        ]
        parts = min(16, -(-slots // 128))

        def attend(qkv, q, k, cos, sin, keys, values, valid, slot):
            pair = (keys, values)
            return decode.attend(qkv, q, k, (cos, sin), pair, valid, slot, eps=1e-6, **how)

        yield f"attention, {slots} slots", attend, shapes
        merged = [((parts, heads, 128), bf16), ((parts, heads, 2), f32), ((d, 4096), bf16), row]
        yield f"output, {parts} parts", lambda o, w, *a: decode.merged_linear(decode.Partial(o, w), *a, **how), merged
    yield "choice", lambda x, v: decode.route(x, None, Rule(8), valid=v, **how), [((1, 128), f32), ((1,), bool)]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], kernels))
