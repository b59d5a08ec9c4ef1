"""What differs between JAX versions for the kernels, in one place."""

from __future__ import annotations

from typing import Any

import jax

JAX_VERSION: tuple[int, ...] = tuple(int(p) for p in jax.__version__.split(".")[:3] if p.isdigit())

# Mosaic GPU kernels need remote references, skip_device_barrier and the Warpgroup lowering as they are from 0.11 on.
KERNELS_SUPPORTED = JAX_VERSION >= (0, 11)
KERNELS_REASON = f"it needs JAX >= 0.11 (this is {jax.__version__})"

# Whether warpgroups of a block can hand registers to each other (plgpu.set_max_registers). From 0.12 on Mosaic has
# libnvJitLink make the machine code where it finds it, which every CUDA installation of JAX has. That compiles for
# later linking, where the assembler drops `setmaxnreg` (its notes C7504, C7511 and C7512): all warpgroups keep the even
# share, and a kernel that counted on more spills or has its matrix instructions wait for each other. Seen with
# nvJitLink 13.0 and 13.5; there is no switch.
REGISTERS_MOVE = JAX_VERSION < (0, 12)


def refuse_varying(what: str, args: Any) -> None:
    """ValueError inside a shard_map that checks varying axes, as it does unless told otherwise.

    Loops and kernels do not carry them, and JAX's own message would be about types that differ.
    """
    for leaf in jax.tree.leaves(args):
        if getattr(getattr(jax.typeof(leaf), "manual_axis_type", None), "varying", None):
            raise ValueError(
                f"{what} was called inside a shard_map that checks varying axes, which kernels do not carry; pass "
                "check_vma=False to jax.shard_map."
            )


def store_slowly(ref, value):
    """ref[...] = value for an order that costs bank conflicts; JAX 0.12 wants to be told that this is meant."""
    from jax.experimental.pallas import mosaic_gpu as plgpu

    store = getattr(plgpu, "store", None)
    if store is None:
        ref[...] = value
    else:
        store(ref, value, optimized=False)
