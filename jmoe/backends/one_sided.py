"""Each rank stores its rows straight into the receivers' buffers: one NVLink domain, one process.

The layout is that of `nvlink_two_sided`, row source * C + slot. A kernel (`Exchange.engine`) reads rows from where they
are and writes only the slots in use; without one the same rows move through lax.all_to_all.
"""

from __future__ import annotations

from .two_sided import TwoSided


class OneSided(TwoSided):
    """Remote writes into the receivers' buffers, in the layout of `TwoSided`. See the module."""

    name = "nvlink_one_sided"
    aliases = ("flashinfer_nvlink_one_sided",)
    kernel_slot = True
