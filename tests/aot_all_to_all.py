"""Compiles the remote-write kernels for several GPUs to machine code without one; run as `python aot_all_to_all.py R`.

Prints one JSON line {"NAME": {"registers", "spilled" bytes, "kernels", "symmetric" buffers, "groups" of ranks that
exchange through NCCL}, ...}. R = 16 stands for two hosts of eight. Exit status 77 and a reason where the CUDA compiler
wheels are absent.
"""

import dataclasses
import json
import os
import re
import sys

from aot_quantize import CHIPS, TARGET, output_of_compiler

HIDDEN, EXPERTS, TOP_K = 7168, 64, 8

# name -> (backend, wire, tokens, hosts): each a dispatch, and a combine of what arrived
EXCHANGES = {
    "one-sided bfloat16": ("nvlink_one_sided", "bfloat16", 128, 1),
    "one-sided bfloat16, many": ("nvlink_one_sided", "bfloat16", 8192, 1),
    "one-sided mxfp8": ("nvlink_one_sided", "mxfp8", 128, 1),
    "one-sided nvfp4_token": ("nvlink_one_sided", "nvfp4_token", 128, 1),
    "one-sided nvfp4_token_4o6": ("nvlink_one_sided", "nvfp4_token_4o6", 128, 1),
    "batched bfloat16": ("low_latency", "bfloat16", 16, 1),
    "batched fp8_128": ("low_latency", "fp8_128", 16, 1),
    "batched bfloat16, many": ("low_latency", "bfloat16", 128, 1),
    "batched mxfp8, many": ("low_latency", "mxfp8", 256, 1),
    "inside two hosts": ("nvlink_one_sided", "mxfp8", 128, 2),
}
# name -> (tokens, dtype of the rows): as "one-sided bfloat16", but the rows come back as MXFP8
BACK = {"one-sided, back as mxfp8": (128, "bfloat16"), "one-sided, back as mxfp8 from float32": (8192, "float32")}
# name -> (tokens, hidden size, top-k): a combine that sums the experts' rows itself
GATHERED = {
    "gathered 2048, many": (8192, 2048, 8),
    "gathered 7168": (128, 7168, 8),
    "gathered 2880, of 22": (8192, 2880, 22),
    "gathered 4096, one": (1, 4096, 4),
}
BETWEEN_HOSTS = {"between two hosts": ("nvlink_one_sided", "mxfp8", 128, 2)}  # 16 ranks: no kernel, processes apart


def exchange_of(ranks, backend, wire, tokens, hosts, axis, back=None, dtype="bfloat16"):
    """A function of one rank's (x, ids, weights): dispatch, experts that give their rows back, combine as `back`."""
    from jmoe import backends
    from jmoe.backends.engine import ENGINE
    from jmoe.backends.hierarchical import hierarchical_engine
    from jmoe.backends.scales import decode_rows
    from jmoe.payload import row_layout

    backend = backends.get_backend(backend)
    layout = row_layout(HIDDEN, wire, TOP_K)
    exchange = backends.exchange_for(
        backend,
        tokens=tokens,
        num_ranks=ranks,
        num_local=EXPERTS // ranks,
        top_k=TOP_K,
        axis_name=axis,
        engine=ENGINE if hosts == 1 else hierarchical_engine(None if axis == "ep" else ENGINE),
        num_hosts=hosts,
    )

    def run(x, ids, weights):
        plan = backend.plan(ids, exchange)
        common = dict(backend=backend, exchange=exchange)
        got = backends.dispatch_payload(x, ids, weights, plan, layout=layout, **common)
        y = decode_rows(got.x, dtype)
        return backends.combine(y, weights, plan, recv_ids=got.ids, wire=back, **common)

    return run


def gathered(ranks, tokens, hidden, top_k):
    """A function of one rank's (x, ids, weights): dispatch, rows sorted by expert, a combine that sums them."""
    import jax.numpy as jnp

    from jmoe import backends
    from jmoe.backends.engine import ENGINE, reduce_gathering
    from jmoe.payload import row_layout
    from pallas_kernels.permute import Unsummed, gather_rows, sort_by_expert

    backend = backends.get_backend("nvlink_one_sided")
    sizes = dict(tokens=tokens, num_ranks=ranks, num_local=EXPERTS // ranks, top_k=top_k, axis_name="ep")
    engine = dataclasses.replace(ENGINE, reduce_unsummed=reduce_gathering)  # whatever the number of rows
    common = dict(backend=backend, exchange=backends.exchange_for(backend, engine=engine, **sizes))

    def run(x, ids, weights):
        plan = backend.plan(ids, common["exchange"])
        layout = row_layout(hidden, "bfloat16", top_k)
        got = backends.dispatch_payload(x, ids, weights, plan, layout=layout, **common)
        order = sort_by_expert(got.ids, EXPERTS // ranks)
        y = gather_rows(got.x.astype(jnp.bfloat16), order.source, order.position, fill=False)
        rows = Unsummed(y, order.position, got.weights, hidden)
        return backends.combine(rows, weights, plan, recv_ids=got.ids, **common)

    return run


def main(ranks: int) -> int:
    os.environ.update(JAX_SKIP_CUDA_CONSTRAINTS_CHECK="1", MOSAIC_GPU_DUMP_PTXAS="1", JAX_PLATFORMS="cpu")
    import jax
    import jax.numpy as jnp
    import numpy as np
    from jax.experimental import topologies
    from jax.sharding import Mesh, NamedSharding, PartitionSpec

    from jmoe import compat

    name, major, cores = CHIPS["sm_90"]
    try:
        topology = topologies.get_topology_desc(
            platform="cuda",
            topology_name="",
            topology="1x2x8" if ranks == 16 else f"1x1x{ranks}",
            target_config=TARGET.format(name=name, major=major, cores=cores),
        )
    except Exception as e:
        print(f"the CUDA compiler wheels are not installed ({str(e).splitlines()[0][:120]})")
        return 77
    devices = np.array(topology.devices)
    programs = []  # name, axis or axes, how many hosts, function, its tokens, hidden size and top-k
    for label, (backend, wire, tokens, hosts) in (BETWEEN_HOSTS if ranks == 16 else EXCHANGES).items():
        axis = "ep" if hosts == 1 or ranks == 16 else ("host", "local")
        run = exchange_of(ranks, backend, wire, tokens, hosts, axis)
        programs.append((label, axis, hosts, run, tokens, HIDDEN, TOP_K))
    for label, (tokens, dtype) in ({} if ranks == 16 else BACK).items():
        run = exchange_of(ranks, "nvlink_one_sided", "bfloat16", tokens, 1, "ep", "mxfp8", dtype)
        programs.append((label, "ep", 1, run, tokens, HIDDEN, TOP_K))
    for label, shape in ({} if ranks == 16 else GATHERED).items():
        programs.append((label, "ep", 1, gathered(ranks, *shape), *shape))
    report = {}
    for label, axis, hosts, run, tokens, hidden, top_k in programs:
        mesh = Mesh(devices, (axis,)) if axis == "ep" else Mesh(devices.reshape(hosts, -1), axis)
        spec = PartitionSpec(axis)
        shapes = [((tokens, hidden), jnp.bfloat16), ((tokens, top_k), jnp.int32), ((tokens, top_k), jnp.float32)]
        arguments = [
            jax.ShapeDtypeStruct((ranks * s[0], s[1]), d, sharding=NamedSharding(mesh, spec)) for s, d in shapes
        ]
        texts = []
        with output_of_compiler(texts):
            mapped = jax.jit(compat.shard_map(run, mesh=mesh, in_specs=spec, out_specs=spec))
            program = mapped.lower(*arguments).compile().as_text()
        registers = [int(n) for n in re.findall(r"Used (\d+) registers", texts[0])]
        spills = [int(n) for n in re.findall(r"(\d+) bytes spill", texts[0])]
        report[label] = {
            "registers": max(registers, default=0),
            "spilled": sum(spills),
            "kernels": len(re.findall(r'custom_call_target="mosaic_gpu', program)),
            "symmetric": program.count("S(1)"),  # memory that only NVLink multicast would need
            "groups": sorted(set(re.findall(r"all-to-all.*replica_groups=({{.*?}}|mesh)", program))),
        }
    print(json.dumps(report))
    return 0


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1])))
