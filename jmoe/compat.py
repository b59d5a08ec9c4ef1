"""What differs between the JAX versions we support (0.10.2 to 0.12); for the kernels: pallas_kernels/compat.py."""

from __future__ import annotations

import jax

from pallas_kernels.compat import JAX_VERSION, KERNELS_SUPPORTED  # noqa: F401

KERNELS_REASON = (
    f"jmoe's GPU kernels need JAX >= 0.11 (this is {jax.__version__}; JAX >= 0.11 needs Python >= 3.12). "
    "The portable implementations are used instead."
)

# From 0.11.2 on XLA:GPU refuses a ragged all-to-all between processes, unless told to use NCCL's send and receive
# (--xla_gpu_allow_ragged_all_to_all_nccl_send_recv_fallback).
RAGGED_BETWEEN_PROCESSES = JAX_VERSION < (0, 11, 2)


def shard_map(f, *, mesh, in_specs, out_specs):
    """jax.shard_map over all axes of `mesh`, without the varying-axes check (Pallas calls do not carry it)."""
    return jax.shard_map(f, mesh=mesh, in_specs=in_specs, out_specs=out_specs, check_vma=False)


def _explicit(mesh) -> bool:
    return any(t == jax.sharding.AxisType.Explicit for t in mesh.axis_types)


def reshard(tree, mesh, specs):
    """Arrays in the shardings that shard_map's in_specs ask for. Only meshes with Explicit axes insist on that."""
    if not _explicit(mesh):
        return tree
    move = lambda a, s: jax.sharding.reshard(a, jax.sharding.NamedSharding(mesh, s))  # noqa: E731
    return jax.tree.map(move, tree, specs)


def replicate(x, mesh):
    """x on every device of the mesh, where its axes are Explicit and a reshape would otherwise be ambiguous."""
    if not _explicit(mesh):
        return x
    return jax.sharding.reshard(x, jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec()))
