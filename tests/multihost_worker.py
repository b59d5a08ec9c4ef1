"""One of two processes with four CPU devices each: the exchange in two steps against the flat one, between processes.

Run as `python multihost_worker.py PORT NUMBER`; prints one line for each case, and "all equal" at the end.
"""

import dataclasses
import sys

import jax

jax.config.update("jax_num_cpu_devices", 4)

import numpy as np  # noqa: E402
from exchange_helpers import Case, as_bytes, exchange_fn, inputs, mesh_for  # noqa: E402
from jax.sharding import NamedSharding, PartitionSpec  # noqa: E402

from jmoe import distributed  # noqa: E402
from jmoe.backends.hierarchical import hierarchical_engine  # noqa: E402
from jmoe.caps import DeviceCaps  # noqa: E402

CASES = (
    Case("nvlink_one_sided", 8, "mxfp8"),
    Case("nvlink_one_sided", 8, "float32", "float32", axis=("host", "local"), num_hosts=2),
    Case("low_latency", 8, "fp8_128", hidden=128),
)


def local(array):
    """This process's part of an array, by device."""
    return {s.device.id: as_bytes(s.data) for s in array.addressable_shards}


def differing(case) -> int:
    two = dataclasses.replace(case, num_hosts=2, engine=hierarchical_engine())
    flat = dataclasses.replace(case, num_hosts=1)
    mesh = mesh_for(two)
    wrong = 0
    for name in ("uniform", "one_hot_rank", "empty_ranks"):
        arrays = inputs(case, np.random.default_rng(0), name)
        specs = [PartitionSpec(case.axis)] * 3 + [PartitionSpec()]
        put = lambda a, s: jax.make_array_from_callback(a.shape, NamedSharding(mesh, s), lambda i: np.asarray(a)[i])  # noqa: E731
        arrays = [put(a, s) for a, s in zip(arrays, specs, strict=True)]
        (out, got, _), (want_out, want, _) = exchange_fn(two)(*arrays), exchange_fn(flat)(*arrays)
        real = {s.device.id: (np.asarray(s.data) >= 0).any(1) for s in want.ids.addressable_shards}
        assert sum(r.sum() for r in real.values()) > 0 or name == "one_hot_rank"
        for a, b in zip(jax.tree.leaves(got.x), jax.tree.leaves(want.x), strict=True):
            a, b = local(a), local(b)
            wrong += sum(int((a[d][real[d]] != b[d][real[d]]).sum()) for d in real)
        for a, b in ((got.ids, want.ids), (got.weights, want.weights), (got.counts, want.counts)):
            a, b = local(a), local(b)
            wrong += sum(int((a[d] != b[d]).sum()) for d in a)
        if case.dtype == "float32" and case.wire == "float32":
            a, b = (np.concatenate([np.asarray(s.data) for s in o.addressable_shards]) for o in (out, want_out))
            wrong += int((np.abs(a - b) > 1e-5 * np.abs(b).max()).sum())
    return wrong


def main(port: str, number: int) -> None:
    distributed.initialize(f"127.0.0.1:{port}", 2, number, startup_seconds=120, silent_seconds=20)
    with distributed.guarded(), distributed.deadline(240, "in the cases"):
        caps = DeviceCaps.detect()
        assert (caps.link, caps.num_hosts, caps.num_devices) == ("network", 2, 8), caps
        wrong = 0
        for case in CASES:
            bad = differing(case)
            wrong += bad
            print(f"{case.backend} {case.wire} {case.axis}: {bad} bytes differ", flush=True)
        print("all equal" if wrong == 0 else "NOT EQUAL", flush=True)
    jax.distributed.shutdown()


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
