"""One MoE layer, expert-parallel over the GPUs of several hosts, trained for a few steps.

Every process runs this same program. JAX joins them; the experts are spread over all their devices, host by host, and
each token crosses once to each host that holds one of its experts (`jmoe.backends.hierarchical`).

Two hosts of 8 GPUs from two shells, one process for each host:

    hostA$ python examples/multihost.py --coordinator hostA:9876 --processes 2 --process 0
    hostB$ python examples/multihost.py --coordinator hostA:9876 --processes 2 --process 1

The same with one process for each GPU (NODE is 0 on hostA and 1 on hostB):

    for i in 0 1 2 3 4 5 6 7; do
      python examples/multihost.py --coordinator hostA:9876 --processes 16 --process $((8 * NODE + i)) \\
        --local-id $i --local-devices 1 &
    done; wait

Under SLURM the numbers are found by themselves; say only how many GPUs a process has:

    srun -N 2 --ntasks-per-node 1 --gpus-per-node 8 --kill-on-bad-exit python examples/multihost.py --local-devices 8
    srun -N 2 --ntasks-per-node 8 --gpus-per-node 8 --kill-on-bad-exit python examples/multihost.py --local-devices 1

Without GPUs, on a laptop: two processes with four virtual devices each, in place of two hosts. (Or --hosts 2 and four
processes with one device each, in place of one process for each GPU.)

    for i in 0 1; do
      python examples/multihost.py --cpu --coordinator localhost:9876 --processes 2 --process $i --local-devices 4 &
    done; wait

One process for each host is the better choice where a program feeds its GPUs in time: it compiles once for a host. One
for each GPU keeps Python from being the limit. Both number the devices host by host, which is what the exchange in two
steps needs. If NCCL picks the wrong network, set NCCL_SOCKET_IFNAME (and read its NCCL_DEBUG=INFO).

When a process dies, the others end too, within --silent seconds and with an error that says so; nothing waits for ever
(`jmoe.distributed` says what ends which wait). Try it: kill one of the two.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import time


def parse(argv=None) -> argparse.Namespace:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--coordinator", help="host:port of process 0; found by itself under SLURM")
    p.add_argument("--processes", type=int, help="how many there are in all; found by itself under SLURM")
    p.add_argument("--process", type=int, help="the number of this one; found by itself under SLURM")
    p.add_argument("--local-id", type=int, help="the number of this process on its host (0, or SLURM's)")
    p.add_argument("--local-devices", type=int, help="devices of this process; all GPUs that it sees, unless told")
    p.add_argument("--cpu", action="store_true", help="virtual devices of the CPU in place of GPUs")
    p.add_argument("--hosts", type=int, help="how many; found by itself, but each process is one on CPUs")
    p.add_argument("--backend", default="auto")
    p.add_argument("--quant", default="none", help="format of the experts' input: none, mxfp8, nvfp4_token, ...")
    p.add_argument("--steps", type=int, default=20)
    p.add_argument("--tokens", type=int, default=64, help="on each device")
    p.add_argument("--hidden", type=int, default=128)
    p.add_argument("--experts", type=int, default=32)
    p.add_argument("--top-k", type=int, default=4)
    p.add_argument("--startup", type=int, default=120, help="seconds to wait for the other processes")
    p.add_argument("--silent", type=int, default=60, help="seconds without a heartbeat after which a process is dead")
    p.add_argument("--step-limit", type=float, default=300, help="seconds that a step, compilation included, may take")
    return p.parse_args(argv)


def main(argv=None) -> float:
    """Trains, and returns the last loss."""
    args = parse(argv)
    import jax

    from jmoe import distributed

    gpus = None
    if args.cpu:
        jax.config.update("jax_platforms", "cpu")
        jax.config.update("jax_num_cpu_devices", args.local_devices or 4)
    elif args.local_devices:
        first = args.local_devices * (args.local_id or int(os.environ.get("SLURM_LOCALID", 0)))
        gpus = range(first, first + args.local_devices)
    distributed.initialize(
        args.coordinator,
        args.processes,
        args.process,
        local_device_ids=gpus,
        startup_seconds=args.startup,
        silent_seconds=args.silent,
    )
    with distributed.guarded():
        loss = train(args)
    jax.distributed.shutdown()  # waits for the others, --silent seconds at most
    return loss


def train(args: argparse.Namespace) -> float:
    import jax
    import jax.numpy as jnp
    import numpy as np

    from jmoe import MoEConfig, QuantConfig, build_moe, distributed, init_params, moe
    from jmoe.caps import DeviceCaps
    from jmoe.placement import even_placement

    # jax.devices() lists the devices process by process. An axis in that order is host by host.
    mesh = jax.make_mesh((jax.device_count(),), ("ep",), axis_types=(jax.sharding.AxisType.Auto,))
    by_rank, everywhere = jax.NamedSharding(mesh, jax.P("ep")), jax.NamedSharding(mesh, jax.P())
    quant = QuantConfig(activations=None if args.quant == "none" else args.quant)
    config = MoEConfig(args.hidden, 2 * args.hidden, args.experts, args.top_k, quant=quant)
    caps = DeviceCaps.detect(list(mesh.devices.flat))
    if args.hosts is not None:
        caps = dataclasses.replace(caps, num_hosts=args.hosts)
    layer = build_moe(config, mesh=mesh, backend=args.backend, caps=caps)
    first = jax.process_index() == 0
    if first:
        print(f"{jax.process_count()} processes, {jax.device_count()} devices: {layer.caps.describe()}")
        decision = layer.decision(args.tokens)
        print(f"{decision.backend}: {decision.transport_reason}", flush=True)

    # Every process asks for the same parameters, and holds those of its own devices.
    placement = even_placement(config.num_experts, layer.num_ranks)
    make = lambda: init_params(jax.random.key(0), config, placement=placement)  # noqa: E731
    shapes = jax.eval_shape(make)
    place = lambda path, _: by_rank if path[0].name == "experts" else everywhere  # noqa: E731
    params = jax.jit(make, out_shardings=jax.tree_util.tree_map_with_path(place, shapes))()

    # Every process makes the tokens of its own devices, and no others.
    rng = np.random.default_rng(jax.process_index())
    local = rng.standard_normal((args.tokens * jax.local_device_count(), args.hidden), np.float32)
    x = jax.make_array_from_process_local_data(by_rank, local)
    target = jax.jit(lambda x: jnp.roll(jnp.tanh(2 * x), 1, axis=1))(x)

    @jax.jit
    def step(params, x, target):
        def loss_of(params):
            return jnp.mean((moe(layer, params, x) - target) ** 2)

        loss, grads = jax.value_and_grad(loss_of)(params)
        return jax.tree.map(lambda p, g: p - 10.0 * g.astype(p.dtype), params, grads), loss

    loss, seconds = np.inf, []
    for i in range(args.steps):
        started = time.perf_counter()
        with distributed.deadline(args.step_limit, f"in step {i}: another process makes no progress"):
            params, loss = step(params, x, target)
            loss = float(loss)  # the same number on every process
        seconds.append(time.perf_counter() - started)
        if first:
            print(f"step {i}: loss {loss:.6f}, {1e3 * seconds[-1]:.1f} ms", flush=True)
    print(f"process {jax.process_index()} of {jax.process_count()}: done, loss {loss:.6f}", flush=True)
    return loss


if __name__ == "__main__":
    main()
