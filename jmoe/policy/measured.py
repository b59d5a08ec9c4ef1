"""What was measured of the exchange on one NVLink host, in one place: the policy's thresholds and times quote it.

Each curve: (bytes that leave one rank, seconds of one call in a chain), rows of D = 7168 between two H200s, 2026-11.
`jmoe bench dispatch` measures these figures; a busy host adds up to 20 us to calls of few rows, not to those of many.
"""

from __future__ import annotations

MEASURED_ON = "2 x H200, NVLink 4"

Curve = tuple[tuple[float, float], ...]

CURVES: dict[str, Curve] = {
    # Dispatch of BF16 rows: 1, 128, 1024, 2048, 8192 and 32768 for each rank.
    "remote_writes": (
        (14.3e3, 12e-6), (1.84e6, 20e-6), (14.7e6, 64e-6), (29.3e6, 111e-6), (117e6, 353e-6), (468e6, 1317e-6)
    ),
    # Quantised in the kernel that sends: MXFP8 (1, 128, 1024, 8192 rows) and NVFP4 (8192).
    "remote_writes, quantised": ((7.5e3, 18e-6), (0.95e6, 28e-6), (7.6e6, 55e-6), (33.6e6, 127e-6), (60.8e6, 204e-6)),
    # Combine of BF16 rows: 128, 1024, 2048 and 8192.
    "remote_writes, back": ((1.84e6, 19e-6), (14.7e6, 69e-6), (29.3e6, 124e-6), (117e6, 370e-6)),
    # lax.all_to_all (NCCL) of BF16 rows: 128, 1024, 8192, 32768.
    "collectives": ((1.84e6, 22e-6), (14.7e6, 50e-6), (117e6, 446e-6), (468e6, 1603e-6)),
    # lax.ragged_all_to_all of the same.
    "ragged": ((1.84e6, 216e-6), (14.7e6, 2.9e-3), (117e6, 21.7e-3), (468e6, 157e-3)),
}  # fmt: skip

# Remote writes against NCCL in one run: (rows for each rank, seconds, NCCL's seconds).
AGAINST_NCCL = ((128, 21e-6, 43e-6), (1024, 64e-6, 95e-6), (8192, 353e-6, 446e-6))


def against_nccl() -> str:
    """Those figures, for people."""
    pairs = ", ".join(f"{us * 1e6:.0f} against {nccl * 1e6:.0f} us at {rows} rows" for rows, us, nccl in AGAINST_NCCL)
    return f"{MEASURED_ON}, D 7168: {pairs}"
