"""What the machine can do, as plain data: every decision can be made, and tested, for a machine that one lacks."""

from __future__ import annotations

import ctypes
import dataclasses
import functools
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import jax

from . import compat

Link = Literal["local", "nvlink", "pcie", "host", "network"]

# What each link means, for messages.
LINKS = {
    "local": "one device",
    "nvlink": "one NVLink domain",
    "pcie": "peer access over PCIe",
    "host": "one host, no peer access between the devices",
    "network": "several processes or hosts",
}

_P2P_ACCESS, _P2P_ATOMICS = 2, 3  # CUdevice_P2PAttribute: ACCESS_SUPPORTED, NATIVE_ATOMIC_SUPPORTED


@dataclasses.dataclass(frozen=True)
class DeviceCaps:
    """What a policy needs to know of the devices.

    platform: "gpu", "cpu" or another JAX platform. compute_capability: (9, 0) on Hopper, (10, 0) on Blackwell, None
    where there is none. num_devices: of the mesh. link: how the devices reach each other, see LINKS. kernels: whether
    this JAX can run the GPU kernels (>= 0.11); kernels_reason says why not. name: for people. num_hosts: hosts over
    which the ranks are spread in equal consecutive blocks, 1 where they are not. local_kernels: whether the
    remote-write kernels serve the GPUs of one host of a mesh of several. No JAX up to 0.12 has that: its table of peers
    spans the whole mesh, and from process to process it asks for multicast memory. Opt-in, with an expert axis (hosts,
    ranks). ragged: whether lax.ragged_all_to_all works between processes.
    """

    platform: str = "cpu"
    compute_capability: tuple[int, int] | None = None
    num_devices: int = 1
    link: Link = "local"
    kernels: bool = True
    kernels_reason: str = ""
    name: str = ""
    num_hosts: int = 1
    local_kernels: bool = False
    ragged: bool = True

    def __post_init__(self):
        if self.link not in LINKS:
            raise ValueError(f"link={self.link!r} is not known; choose one of {', '.join(LINKS)}.")
        if self.num_devices < 1:
            raise ValueError(f"num_devices={self.num_devices} must be at least 1.")
        if self.num_hosts < 1 or self.num_devices % self.num_hosts:
            raise ValueError(
                f"num_hosts={self.num_hosts} for {self.num_devices} devices; hosts must hold equally many. Use 1 where "
                "they do not."
            )

    @classmethod
    def detect(cls, devices: Sequence[Any] | None = None) -> DeviceCaps:
        """The capabilities of `devices` (JAX devices; default: all of them)."""
        devices = list(jax.devices() if devices is None else devices)
        first = devices[0]
        return cls(
            platform=first.platform,
            compute_capability=parse_capability(getattr(first, "compute_capability", None)),
            num_devices=len(devices),
            link=detect_link(devices),
            kernels=compat.KERNELS_SUPPORTED,
            kernels_reason="" if compat.KERNELS_SUPPORTED else compat.KERNELS_REASON,
            name=first.device_kind,
            num_hosts=count_hosts(devices),
            ragged=first.platform != "gpu" or compat.RAGGED_BETWEEN_PROCESSES,
        )

    @property
    def generation(self) -> str:
        """ "Blackwell", "Hopper", ... or the platform's name."""
        if self.compute_capability is None:
            return self.platform.upper()
        major, minor = self.compute_capability
        if major == 8:
            return "Ada" if minor == 9 else "Ampere"
        return {7: "Volta or Turing", 9: "Hopper", 10: "Blackwell", 11: "Blackwell", 12: "Blackwell"}.get(
            major, f"sm_{major}{minor}"
        )

    def describe(self) -> str:
        """One line for people: "8 x NVIDIA H200, Hopper, one NVLink domain"."""
        name = self.name or self.generation
        where = f", {self.generation}" if self.compute_capability and self.name else ""
        hosts = f" ({self.num_hosts} hosts)" if self.num_hosts > 1 else ""
        return f"{self.num_devices} x {name}{where}, {LINKS[self.link]}{hosts}"


def parse_capability(text: object) -> tuple[int, int] | None:
    """ "9.0" -> (9, 0); anything else -> None."""
    parts = str(text).split(".") if text else []
    return (int(parts[0]), int(parts[1])) if len(parts) == 2 and all(p.isdigit() for p in parts) else None


def host_of(device: Any) -> int:
    """The host of a JAX device: on GPUs what JAX calls a slice (processes of one host share it), else its process."""
    place = getattr(device, "slice_index", None) if device.platform == "gpu" else None
    return device.process_index if place is None else place


def count_hosts(devices: Sequence[Any]) -> int:
    """H where `devices`, in this order, are H equal blocks of different hosts; 1 where they are not."""
    hosts = [host_of(d) for d in devices]
    different = list(dict.fromkeys(hosts))
    blocks = [host for host in different for _ in range(len(hosts) // len(different))]
    return len(different) if hosts == blocks else 1


def detect_link(devices: Sequence[Any]) -> Link:
    """How JAX devices reach each other."""
    if len(devices) == 1:
        return "local"
    if len({d.process_index for d in devices}) > 1:
        return "network"
    if devices[0].platform != "gpu":
        return "host"
    ordinals = tuple(sorted(getattr(d, "local_hardware_id", i) for i, d in enumerate(devices)))
    return link_of(peer_matrix(ordinals))


def link_of(peers: Mapping[tuple[int, int], tuple[bool, bool]] | None) -> Link:
    """The link of several GPUs in one process, from their `peer_matrix`."""
    if peers is None or not all(access for access, _ in peers.values()):
        return "host"
    return "nvlink" if all(atomics for _, atomics in peers.values()) else "pcie"


@functools.cache
def peer_matrix(ordinals: tuple[int, ...]) -> dict[tuple[int, int], tuple[bool, bool]] | None:
    """For each ordered pair of CUDA devices: whether one can reach the other's memory, and with native atomics.

    Native atomics between two GPUs exist over NVLink and not over PCIe. None where the driver cannot be asked.
    """
    try:
        cuda = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return None
    if cuda.cuInit(0) != 0:
        return None
    handles = {}
    for ordinal in ordinals:
        handle = ctypes.c_int()
        if cuda.cuDeviceGet(ctypes.byref(handle), ordinal) != 0:
            return None
        handles[ordinal] = handle

    def attribute(which: int, a: int, b: int) -> bool:
        value = ctypes.c_int()
        status = cuda.cuDeviceGetP2PAttribute(ctypes.byref(value), which, handles[a], handles[b])
        return status == 0 and bool(value.value)

    pairs = [(a, b) for a in ordinals for b in ordinals if a != b]
    return {(a, b): (attribute(_P2P_ACCESS, a, b), attribute(_P2P_ATOMICS, a, b)) for a, b in pairs}
