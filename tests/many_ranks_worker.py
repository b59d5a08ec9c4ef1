"""The exchange on 4 to 64 virtual devices of this process, against plain loops; run as `python many_ranks_worker.py R`.

Prints one JSON line: {"BACKEND": [rows that arrived, rows that are wrong, bytes received on a rank, bytes foretold]}.
"""

import json
import os
import sys

RANKS = int(sys.argv[1]) if __name__ == "__main__" else 4
os.environ["XLA_FLAGS"] = f"--xla_force_host_platform_device_count={RANKS}"
os.environ["JAX_PLATFORMS"] = "cpu"

import jax  # noqa: E402
import jax.numpy as jnp  # noqa: E402
import numpy as np  # noqa: E402
from exchange_helpers import as_bytes, expected_rows, mesh_of, routing  # noqa: E402
from jax.sharding import PartitionSpec  # noqa: E402

from jmoe import backends, compat  # noqa: E402
from jmoe.backends.hierarchical import hierarchical_engine  # noqa: E402
from jmoe.payload import row_layout, unpack_data  # noqa: E402
from jmoe.placement import even_placement, to_physical  # noqa: E402

T, D, E, K = 5, 32, 128, 8
HOSTS = {4: 2, 8: 2, 16: 2, 64: 8}
BACKENDS = {
    "allgather_reducescatter": 1,
    "nvlink_two_sided": 1,
    "deepep_high_throughput": 1,
    "low_latency": 1,
    "nvlink_one_sided": HOSTS[RANKS],
}
SPEC = PartitionSpec("ep")


def check(name, hosts):
    backend, placement = backends.get_backend(name), even_placement(E, RANKS)
    layout = row_layout(D, "mxfp8", K)
    exchange = backends.exchange_for(
        backend,
        tokens=T,
        num_ranks=RANKS,
        num_local=placement.num_local,
        top_k=K,
        axis_name="ep",
        engine=hierarchical_engine() if hosts > 1 else None,
        num_hosts=hosts,
    )

    def body(x, ids, weights):
        physical = to_physical(ids, placement)
        plan = backend.plan(physical, exchange)
        flight = backends.start(x, physical, weights, plan, backend=backend, exchange=exchange, layout=layout)
        got = backends.finish(flight, plan, backend=backend, exchange=exchange, layout=layout)
        y = jnp.where(jnp.any(got.ids >= 0, axis=1, keepdims=True), jnp.ones((1, D), jnp.float32), jnp.nan)
        out = backends.combine(y, weights, plan, backend=backend, exchange=exchange, recv_ids=got.ids)
        return flight.rows, got.ids, out

    run = jax.jit(compat.shard_map(body, mesh=mesh_of(RANKS), in_specs=SPEC, out_specs=SPEC))
    arrived = wrong = 0
    for name in ("uniform", "one_hot_rank", "some_invalid"):
        rng = np.random.default_rng(RANKS)
        ids = routing(name, rng, RANKS, tokens=T, num_experts=E, top_k=K)
        x = np.asarray(jnp.asarray(rng.normal(size=(RANKS * T, D)), jnp.bfloat16))
        weights = np.ones(ids.shape, np.float32)
        rows, local, out = (np.asarray(a) for a in run(x, ids, weights))
        physical = np.asarray(to_physical(jnp.asarray(ids), placement)).reshape(RANKS, T, K)
        want = expected_rows(physical, backend, RANKS, placement.num_local, exchange.capacity)
        sent = [
            as_bytes(leaf)
            for leaf in jax.tree.leaves(backends.scales.encode_rows(jnp.asarray(x), layout, axis_name=None)[0])
        ]  # noqa: E501
        held = [as_bytes(leaf) for leaf in jax.tree.leaves(unpack_data(jnp.asarray(rows), layout))]
        per_rank = rows.shape[0] // RANKS
        for rank, places in enumerate(want):
            for place, (source, token, _) in places.items():
                arrived += 1
                at, of = rank * per_rank + place, source * T + token
                wrong += any((h[at] != s[of]).any() for h, s in zip(held, sent, strict=True))
        if backend.plan_form != "gathered":
            real = (local >= 0).any(1).reshape(RANKS, -1)
            wrong += sum(set(np.flatnonzero(r)) != set(w) for r, w in zip(real, want, strict=True))
        # rows of ones come back as many times as ranks (or, weighted by ones, experts) served the token
        served = (physical >= 0).reshape(-1, K)
        owners = [len({p // placement.num_local for p in row if p >= 0}) for row in physical.reshape(-1, K)]
        times = served.sum(1) if backend.form == "batched" else np.array(owners)
        wrong += int((out.astype(np.float32) != times[:, None]).sum())
    memory = backend.memory(layout, exchange)["dispatch_receive"]
    return [arrived, int(wrong), rows.nbytes // RANKS, memory]


if __name__ == "__main__":
    print(json.dumps({name: check(name, hosts) for name, hosts in BACKENDS.items()}))
