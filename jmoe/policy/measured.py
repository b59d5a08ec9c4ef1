"""What was measured of the exchange on one NVLink host, in one place: the policy's thresholds and times quote it.

Each curve: (bytes that leave one rank, seconds of one call in a chain), rows of D = 7168 between two H200s, 2026-11.
`jmoe bench dispatch` measures these figures, and docs/figures/dispatch.json has them. Two are from earlier runs: the
combine of 128 rows (33 us in the last one, while NCCL took 43 us beside 26 a moment before: other processes compiled on
that host) and lax.ragged_all_to_all.
"""

from __future__ import annotations

MEASURED_ON = "2 x H200, NVLink 4"

Curve = tuple[tuple[float, float], ...]

CURVES: dict[str, Curve] = {
    # Dispatch of BF16 rows: 1, 128, 1024, 8192 and 32768 for each rank.
    "remote_writes": ((14.4e3, 12e-6), (1.84e6, 17.1e-6), (14.7e6, 54.7e-6), (117.7e6, 340e-6), (470e6, 1287e-6)),
    # Quantised in the kernel that sends: MXFP8 of 1, 128 and 1024 rows, then NVFP4 and MXFP8 of 8192 and of 32768.
    "remote_writes, quantised": (
        (7.456e3, 12.7e-6), (0.954e6, 17e-6), (7.62e6, 36.1e-6),
        (33.6e6, 114.7e-6), (60.95e6, 183.4e-6), (134.3e6, 397.5e-6), (243.5e6, 686e-6),
    ),
    # Combine of BF16 rows: 128, 1024, 8192 and 32768.
    "remote_writes, back": ((1.84e6, 19e-6), (14.65e6, 57.6e-6), (117.2e6, 346e-6), (468e6, 1307e-6)),
    # lax.all_to_all (NCCL) of BF16 rows: 1, 128, 1024, 8192, 32768.
    "collectives": ((14.4e3, 23.8e-6), (1.84e6, 25.6e-6), (14.7e6, 73.8e-6), (118e6, 422.8e-6), (472e6, 1427e-6)),
    # lax.ragged_all_to_all of 128, 1024, 8192 and 32768 rows.
    "ragged": ((1.84e6, 216e-6), (14.7e6, 2.9e-3), (117e6, 21.7e-3), (468e6, 157e-3)),
}  # fmt: skip

# Remote writes against NCCL in one run: (rows for each rank, seconds, NCCL's seconds).
AGAINST_NCCL = (
    (1, 12e-6, 23.8e-6),
    (128, 17.1e-6, 25.6e-6),
    (1024, 54.7e-6, 73.8e-6),
    (8192, 340.2e-6, 422.8e-6),
    (32768, 1287e-6, 1427e-6),
)
# The MXFP8 combine, whose rows are quantised and decoded by XLA, against the BF16 one: (rows, seconds, BF16's seconds).
QUANTISED_COMBINE = ((1024, 152.8e-6, 57.6e-6), (8192, 1049e-6, 346e-6))
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
