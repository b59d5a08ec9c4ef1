"""What was measured of the exchange on one NVLink host, in one place: the policy's thresholds and times quote it.

Each curve: (bytes that leave one rank, seconds of one call in a chain), rows of D = 7168 between two H200s, 2026-11.
`jmoe bench dispatch` measures these figures, and docs/figures/dispatch.json has them.
"""

from __future__ import annotations

MEASURED_ON = "2 x H200, NVLink 4"

Curve = tuple[tuple[float, float], ...]

CURVES: dict[str, Curve] = {
    # Dispatch of BF16 rows: 1, 128, 1024, 8192 and 32768 for each rank.
    "remote_writes": ((14.4e3, 10e-6), (1.84e6, 15.2e-6), (14.7e6, 51.6e-6), (117.7e6, 333.1e-6), (470e6, 1299e-6)),
    # Quantised in the kernel that sends: MXFP8 of 1, 128 and 1024 rows, then NVFP4 and MXFP8 of 8192 and of 32768.
    "remote_writes, quantised": (
        (7.456e3, 10.7e-6), (0.954e6, 14.7e-6), (7.62e6, 33.1e-6),
        (33.6e6, 112.4e-6), (60.95e6, 185.9e-6), (134.3e6, 384.2e-6), (243.5e6, 686.8e-6),
    ),
    # Combine of BF16 rows: 1, 128, 1024, 8192 and 32768.
    "remote_writes, back": (
        (14.3e3, 10.1e-6), (1.84e6, 16.3e-6), (14.65e6, 56.1e-6), (117.2e6, 346.1e-6), (468e6, 1293e-6),
    ),
    # Combine of MXFP8 rows, quantised in the kernel that sends, decoded and added up by one kernel: the same numbers.
    "remote_writes, back, quantised": (
        (7.392e3, 12.5e-6), (0.946e6, 17.7e-6), (7.56e6, 46.9e-6), (60.4e6, 242.9e-6), (241.4e6, 905e-6),
    ),
    # lax.all_to_all (NCCL) of BF16 rows: 1, 128, 1024, 8192, 32768.
    "collectives": ((14.4e3, 16.3e-6), (1.84e6, 22.1e-6), (14.7e6, 75.6e-6), (118e6, 427.8e-6), (472e6, 1407e-6)),
    # lax.ragged_all_to_all of 128, 1024 and 8192 rows.
    "ragged": ((1.835e6, 400.9e-6), (14.68e6, 5.438e-3), (117.4e6, 44.47e-3)),
}  # fmt: skip

# Remote writes against NCCL in one run: (rows for each rank, seconds, NCCL's seconds).
AGAINST_NCCL = (
    (1, 10e-6, 16.3e-6),
    (128, 15.2e-6, 22.1e-6),
    (1024, 51.6e-6, 75.6e-6),
    (8192, 333.1e-6, 427.8e-6),
    (32768, 1299e-6, 1407e-6),
)
# Combine of 8192 rows that takes the sums of K = 8 experts itself, against a kernel that takes them and a combine of
# its results: (D, seconds, seconds of the two), in a chain. The threshold, `jmoe.backends.engine.GATHERING_CAPACITY`,
# is above what did not gain: 1024 rows of 2048: 38.7 and 38.1 us; 128 of 7168: 26.8 and 26.0; 1 of 2048: 25.0 and 14.9.
GATHERING = ((2048, 172.2e-6, 228.3e-6), (7168, 464.6e-6, 659.8e-6))


def gathering() -> str:
    """Those figures, for people."""
    pairs = ", ".join(f"{us * 1e6:.0f} against {two * 1e6:.0f} us at D {d}" for d, us, two in GATHERING)
    return f"{MEASURED_ON}, 8192 tokens: {pairs}"


def against_nccl() -> str:
    """Those figures, for people."""
    pairs = ", ".join(f"{us * 1e6:.0f} against {nccl * 1e6:.0f} us at {rows}" for rows, us, nccl in AGAINST_NCCL)
    return f"{MEASURED_ON}, D 7168: {pairs} rows"
