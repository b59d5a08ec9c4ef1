"""Compiles the quantisation kernels to machine code without a GPU; run as `python aot_quantize.py sm_90|sm_100`.

Prints one JSON line {"NAME": [registers, spilled bytes, whether matrix instructions wait for each other because there
are too few registers], ...}. Exit status 77 and a reason where the CUDA compiler wheels are absent. One architecture
per process: Mosaic binds the assembler's target once.
"""

import contextlib
import json
import os
import re
import sys
import tempfile

CHIPS = {"sm_90": ("NVIDIA H200", 9, 132), "sm_100": ("NVIDIA B200", 10, 148)}
TARGET = """
gpu_device_info {{
  threads_per_block_limit: 1024 threads_per_warp: 32 shared_memory_per_block: 49152 shared_memory_per_core: 233472
  threads_per_core_limit: 2048 core_count: {cores} fpus_per_core: 128 block_dim_limit_x: 2147483647
  block_dim_limit_y: 65535 block_dim_limit_z: 65535 memory_bandwidth: 4800000000000 l2_cache_size: 62914560
  clock_rate_ghz: 1.98 device_memory_size: 150000000000 shared_memory_per_block_optin: 232448
  cuda_compute_capability {{ major: {major} minor: 0 }} registers_per_core_limit: 65536 registers_per_block_limit: 65536
}}
platform_name: "CUDA" dnn_version_info {{ major: 9 minor: 12 patch: 0 }}
runtime_version {{ major: 13 minor: 0 patch: 0 }}
device_description_str: "{name}"
"""


@contextlib.contextmanager
def output_of_compiler(texts):
    """Everything that is written to the process's stdout and stderr, appended to `texts`."""
    sys.stdout.flush()
    kept = os.dup(1), os.dup(2)
    with tempfile.TemporaryFile() as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
        try:
            yield
        finally:
            sys.stdout.flush()
            os.dup2(kept[0], 1)
            os.dup2(kept[1], 2)
            file.seek(0)
            texts.append(file.read().decode(errors="replace"))


def kernels():
    """(name, function, argument shapes) of everything that is compiled."""
    import jax.numpy as jnp

    from pallas_kernels import quantize as q

    how = dict(implementation="mosaic_sm90")
    x = ((16384, 7168), jnp.bfloat16)
    for fmt, spec in q.FORMATS.items():
        if spec.block_rows == 1:
            scale = [((), jnp.float32)] if spec.global_scale == "tensor" else []
            yield fmt, lambda x, g=None, fmt=fmt: q.quantize(x, fmt, global_scale=g, **how), [x, *scale]
    for dtype in (jnp.float16, jnp.float32):
        for fmt in ("mxfp8", "nvfp4_token", "nvfp4_token_4o6"):
            yield f"{fmt} {dtype.__name__}", lambda x, fmt=fmt: q.quantize(x, fmt, **how), [(x[0], dtype)]
        scaled = [(x[0], dtype), ((), jnp.float32)]
        yield f"nvfp4_4o6 {dtype.__name__}", lambda x, g: q.quantize(x, "nvfp4_4o6", global_scale=g, **how), scaled
    for columns in (1024, 2048, 3072, 4096):  # rows that groups of threads walk over
        short = [((16384, columns), jnp.bfloat16)]
        yield f"nvfp4_token {columns}", lambda x: q.quantize(x, "nvfp4_token", **how), short
    yield "nvfp4 dynamic", lambda x: q.quantize(x, "nvfp4", **how), [x]
    swizzled = dict(layout="swizzled", alignment=256, **how)
    yield "mxfp8 swizzled", lambda x, n: q.quantize(x, "mxfp8", num_valid_rows=n, **swizzled), [x, ((), jnp.int32)]
    yield "gather", lambda x, i: q.gather_quantize(x, i, "fp8_128", **how), [x, ((64,), jnp.int32)]
    yield "swiglu", lambda x: q.swiglu_quantize(x, "mxfp8", **how), [x]
    yield "swiglu token", lambda x: q.swiglu_quantize(x, "nvfp4_token", activation="swiglu_oai", **how), [x]
    packed = dict(row_bytes=4112, scale_offset=3584, row_scale_offset=4032, tail_offset=4036, **how)
    yield "packed", lambda x, t: q.quantize_rows(x, "nvfp4_token", t, **packed), [x, ((16384, 16), jnp.int32)]
    for fmt in ("mxfp8", "mxfp4", "nvfp4_token", "fp8_128"):
        yield f"round trip {fmt}", lambda x, fmt=fmt: q.dequantize(q.quantize(x, fmt, **how), **how), [x]


def main(arch: str, kernels=kernels) -> int:
    os.environ.update(JAX_SKIP_CUDA_CONSTRAINTS_CHECK="1", MOSAIC_GPU_DUMP_PTXAS="1", JAX_PLATFORMS="cpu")
    import jax
    import numpy as np
    from jax.experimental import topologies
    from jax.sharding import Mesh, NamedSharding, PartitionSpec

    name, major, cores = CHIPS[arch]
    try:
        topology = topologies.get_topology_desc(
            platform="cuda",
            topology_name="",
            topology="1x1x1",
            target_config=TARGET.format(name=name, major=major, cores=cores),
        )
    except Exception as e:
        print(f"the CUDA compiler wheels are not installed ({str(e).splitlines()[0][:120]})")
        return 77
    sharding = NamedSharding(Mesh(np.array(topology.devices), ("x",)), PartitionSpec())
    report = {}
    for label, f, shapes in kernels():
        texts = []
        with output_of_compiler(texts):
            arguments = [jax.ShapeDtypeStruct(s, d, sharding=sharding) for s, d in shapes]
            jax.jit(f).lower(*arguments).compile()
        registers = [int(n) for n in re.findall(r"Used (\d+) registers", texts[0])]
        spills = [int(n) for n in re.findall(r"(\d+) bytes spill", texts[0])]
        serialized = "instructions are serialized" in texts[0]
        report[label] = [max(registers, default=0), sum(spills), serialized]
    print(json.dumps(report))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
