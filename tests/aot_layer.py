"""Compiles the whole layer to machine code without a GPU; run as `python aot_layer.py sm_80|sm_89|sm_90|sm_100 RANKS`.

Prints one line of JSON: for each kind of layer the custom calls of its program ("mosaic_gpu_v2" are Pallas kernels).
Exit status 77 and a reason where the CUDA compiler wheels are absent. What the README calls "compiled" is this.
"""

import json
import os
import re
import sys

from aot_quantize import CHIPS, TARGET

CHIPS = CHIPS | {"sm_80": ("NVIDIA A100", 8, 108), "sm_89": ("NVIDIA L40S", 8, 142)}
# (activations, weights): each is a layer of its own
LAYERS = ((None, None), ("mxfp8", "mxfp8"), ("nvfp4_token", "nvfp4"), ("fp8_128", "fp8_128x128"), (None, "mxfp4"))


def main(arch: str, ranks: int) -> int:
    os.environ.update(JAX_SKIP_CUDA_CONSTRAINTS_CHECK="1", JAX_PLATFORMS="cpu")
    import jax
    import jax.numpy as jnp
    import numpy as np
    from jax.experimental import topologies
    from jax.sharding import Mesh, NamedSharding, PartitionSpec

    from jmoe import MoEConfig, QuantConfig, build_moe, init_params, moe, quantize_params
    from jmoe.caps import DeviceCaps
    from pallas_kernels.permute import thread
    from pallas_kernels.quantize import api

    name, major, cores = CHIPS[arch]
    minor = int(arch[-1])
    target = TARGET.format(name=name, major=major, cores=cores).replace("minor: 0", f"minor: {minor}")
    try:
        topology = topologies.get_topology_desc(
            platform="cuda", topology_name="", topology=f"1x1x{ranks}", target_config=target
        )
    except Exception as e:
        print(f"the CUDA compiler wheels are not installed ({str(e).splitlines()[0][:120]})")
        return 77
    # The kernels ask the process's GPU what it can do; here there is none, and the answer is the target's.
    capability = float(f"{major}.{minor}")
    api._gpu_capability = lambda: capability
    thread.environment_obstacle.__defaults__ = (capability,)
    mesh = Mesh(np.array(topology.devices), ("ep",))
    here = NamedSharding(mesh, PartitionSpec())
    link = "local" if ranks == 1 else "host" if arch == "sm_89" else "nvlink"
    caps = DeviceCaps("gpu", (major, minor), ranks, link, name=name)
    report = {}
    for activations, weights in LAYERS:
        config = MoEConfig(512, 256, 8, 2, quant=QuantConfig(activations=activations, weights=weights))
        layer = build_moe(config, mesh=mesh if ranks > 1 else None, caps=caps)

        def make(config=config, weights=weights):
            params = init_params(jax.random.key(0), config, dtype=jnp.bfloat16)
            return quantize_params(params, weights) if weights else params

        place = lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=here)  # noqa: E731
        params = jax.tree.map(place, jax.eval_shape(make))
        x = place(jax.ShapeDtypeStruct((256, 512), jnp.bfloat16))
        run = jax.jit(lambda params, x, layer=layer: moe(layer, params, x))
        compiled = run.trace(params, x).lower(lowering_platforms=("cuda",)).compile()
        calls = sorted(set(re.findall(r'custom_call_target="([^"]+)"', compiled.as_text())))
        report[f"{activations} activations, {weights} weights"] = [layer.decision(256 // ranks).transport, *calls]
    print(json.dumps(report))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], int(sys.argv[2])))
