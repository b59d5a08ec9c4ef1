"""Compiles the Blackwell grouped matmul for sm_100a without a GPU, as aot_quantize.py does; run without arguments."""

import sys

import aot_quantize


def kernels():
    """(name, function, argument shapes) of everything that is compiled, with N and K that end inside a tile too."""
    import jax.numpy as jnp

    from pallas_kernels.grouped_matmul import blackwell_entry
    from pallas_kernels.quantize import quantize, quantize_weights

    sizes = ((4,), jnp.int32)

    def shapes(m, n, k, dtype=jnp.bfloat16):
        return [((m, k), dtype), ((4, n, k), dtype), sizes]

    def run(kernel, fx=None, fw=None, out=jnp.bfloat16):
        def f(x, w, sizes):
            if fx:
                x, w = quantize(x, fx, implementation="reference"), quantize_weights(w, fw)
            return kernel(x, w, sizes, out_dtype=out)

        return f

    forward, dlhs = blackwell_entry.forward, blackwell_entry.dlhs
    yield "bf16", run(forward), shapes(300, 512, 1024)
    yield "bf16, narrow", run(forward, out=jnp.float32), shapes(40, 192, 192)
    yield "f16", run(forward, out=jnp.float16), shapes(300, 512, 1024, jnp.float16)
    yield "bf16 dlhs", run(dlhs), [((300, 512), jnp.bfloat16), ((4, 512, 1024), jnp.bfloat16), sizes]
    yield "mxfp8", run(forward, "mxfp8", "mxfp8"), shapes(300, 2880, 2880)
    yield "mxfp4", run(forward, "mxfp4", "mxfp4"), shapes(300, 2880, 2880)
    yield "nvfp4 token", run(forward, "nvfp4_token", "nvfp4"), shapes(300, 512, 1024)
    yield "nvfp4 tensor", run(forward, "nvfp4", "nvfp4", jnp.float32), shapes(300, 2880, 2880)


if __name__ == "__main__":
    sys.exit(aot_quantize.main("sm_100", kernels))
