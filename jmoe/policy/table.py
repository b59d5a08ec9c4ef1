"""The policy as data: what each backend sends for each family of formats, who quantises, and the thresholds.

Sources of the matrix: the all2all backends of vLLM, FlashInfer, DeepEP, NIXL EP and SGLang under the names that they
have there. Nothing here looks at a machine or at the environment.
"""

from __future__ import annotations

import dataclasses
from typing import Literal

from pallas_kernels.quantize.formats import FORMATS

Where = Literal["sender", "kernel", "receiver", "experts", "nobody"]
Form = Literal["standard", "batched"]

FLOAT_WIRES = ("bfloat16", "float16", "float32")

# --- families of formats. The matrix speaks of families; members differ in rounding or scale selection only.


def family(name: str) -> str:
    """The family of a format: "fp8_128", "mxfp8", "mxfp4", "nvfp4" (per tensor), "nvfp4_token", or "weights"."""
    fmt = FORMATS[name]
    if fmt.block_rows != 1:
        return "weights"
    if fmt.scale == "f32":
        return "fp8_128"
    if fmt.scale == "e8m0":
        return "mxfp8" if fmt.element == "e4m3" else "mxfp4"
    return "nvfp4_token" if fmt.global_scale == "token" else "nvfp4"


FAMILIES = tuple(dict.fromkeys(family(n) for n in FORMATS if family(n) != "weights"))
ACTIVATION_FORMATS = tuple(n for n in FORMATS if family(n) != "weights")


def members(names: tuple[str, ...]) -> tuple[str, ...]:
    """The formats of these families, in the order of the format table."""
    return tuple(n for n in FORMATS if family(n) in names)


# --- the matrix


@dataclasses.dataclass(frozen=True)
class Rule:
    """What happens to the activations of one family on one backend.

    where: who quantises. Quantised by the sender or its kernel, the format travels; otherwise the layer's own dtype
    does.
    """

    where: Where
    why: str

    @property
    def quantised_wire(self) -> bool:
        """Whether the format itself travels, rather than the layer's dtype."""
        return self.where in ("sender", "kernel")


_ONCE = Rule("sender", "each token is quantised once, before it is copied to several ranks")
_ROW_SCALE = Rule("sender", "the packed row carries the token's float32 row scale beside its blocks")
_LOCAL = Rule("sender", "nothing travels on one rank; the activations are quantised once, before the experts sort them")
_IN_KERNEL = Rule("kernel", "the dispatch kernel quantises 1x128 blocks on the way out")
_PLAIN = Rule("receiver", "this backend sends only {carries} quantised; the receiver quantises what arrives")
_TO_EXPERTS = Rule("experts", "nothing is quantised in transit or after it; the batched experts take the rows as sent")
_OPT_IN = Rule("kernel", "JMOE_DEEPEP_LL_NVFP4 lets the low-latency dispatch kernel quantise to NVFP4")


@dataclasses.dataclass(frozen=True)
class BackendRow:
    """One backend. rules: family -> Rule; a family that is absent is refused. carries: families that `QuantConfig.wire`
    may ask for. defers: can send unquantised rows to experts that quantise for themselves. uses: what moves the bytes.
    """

    name: str
    form: Form
    role: str
    rules: dict[str, Rule]
    carries: tuple[str, ...]
    defers: bool
    uses: Literal["nothing", "collectives", "ragged", "remote_writes"]


_ANY = dict.fromkeys(FAMILIES, _ONCE) | {"nvfp4_token": _ROW_SCALE}

BACKENDS: dict[str, BackendRow] = {
    row.name: row
    for row in (
        BackendRow(
            name="local",
            form="standard",
            role="one rank: nothing travels",
            rules=dict.fromkeys(FAMILIES, _LOCAL),
            carries=FAMILIES,
            defers=True,
            uses="nothing",
        ),
        BackendRow(
            name="allgather_reducescatter",
            form="standard",
            role="few ranks, any link: every rank sees every row",
            rules=_ANY,
            carries=FAMILIES,
            defers=True,
            uses="collectives",
        ),
        BackendRow(
            name="nvlink_two_sided",
            form="standard",
            role="fixed-capacity all-to-all through XLA, any link",
            rules=_ANY | {"mxfp4": _PLAIN},
            carries=FAMILIES,
            defers=True,
            uses="collectives",
        ),
        BackendRow(
            name="nvlink_one_sided",
            form="standard",
            role="one NVLink domain: remote writes",
            rules={"fp8_128": _ONCE, "mxfp8": _ONCE, "nvfp4": _ONCE, "nvfp4_token": _ROW_SCALE},
            carries=("fp8_128", "mxfp8", "nvfp4", "nvfp4_token"),
            defers=True,
            uses="remote_writes",
        ),
        BackendRow(
            name="deepep_high_throughput",
            form="standard",
            role="many hosts, large batches: ragged all-to-all",
            rules=dict.fromkeys(FAMILIES, _PLAIN) | {"fp8_128": _ONCE},
            carries=("fp8_128", "mxfp8"),
            defers=True,
            uses="ragged",
        ),
        BackendRow(
            name="low_latency",
            form="batched",
            role="decode: one row for each (token, expert)",
            rules={"fp8_128": _IN_KERNEL, "mxfp8": _PLAIN, "mxfp4": _PLAIN, "nvfp4": _TO_EXPERTS},
            carries=("fp8_128",),
            defers=False,
            uses="remote_writes",
        ),
        BackendRow(
            name="nixl_ep",
            form="batched",
            role="decode with ranks that come and go",
            rules={"fp8_128": _IN_KERNEL, "mxfp8": _PLAIN, "mxfp4": _PLAIN, "nvfp4": _TO_EXPERTS},
            carries=("fp8_128",),
            defers=False,
            uses="remote_writes",
        ),
    )
}

# Environment opt-ins: each belongs to one backend and adds rules to that backend's row only.
OPT_INS: dict[str, tuple[str, dict[str, Rule], tuple[str, ...]]] = {
    "deepep_ll_nvfp4": ("low_latency", {"nvfp4": _OPT_IN}, ("fp8_128", "nvfp4")),
}

# Families in whose place something has to be said, when a backend refuses them.
REFUSAL_REASONS: dict[tuple[str, str], str] = {
    ("low_latency", "nvfp4_token"): "its rows have no slot for a token's scale, so it stays per tensor",
    ("nixl_ep", "nvfp4_token"): "its rows have no slot for a token's scale, so it stays per tensor",
}

# Backends that refusals point to: both take every family.
FALLBACKS = ("nvlink_two_sided", "allgather_reducescatter")


# --- what a device multiplies as it is

# family -> compute capabilities (major) whose matrix units take it without dequantising
NATIVE: dict[str, tuple[int, ...]] = {
    "fp8_128": (9, 10),  # FP8 wgmma / tcgen05 with promotion of each 128-block in float32
    "mxfp8": (10,),  # tcgen05 block-scaled
    "mxfp4": (10,),
    "nvfp4": (10,),
    "nvfp4_token": (10,),  # the row scale multiplies the output rows
}
REMOTE_WRITES_SINCE = (9, 0)  # Pallas Mosaic remote references: Hopper and later

# --- thresholds, with where they come from

# Up to here all_gather + reduce_scatter moves no more than 10 % above what all-to-all does: R <= 2, or R <= 4 with K
# >= 8 (a token's K experts then lie on 0.9 R of the ranks). Counted, not measured.
ALLGATHER_RANKS = 2
ALLGATHER_RANKS_MANY_EXPERTS = (4, 8)  # (R, K)

# Unquantised experts: bytes of BF16 rows that leave a rank from which compressing the wire alone pays on NVLink.
# Where a dispatch of MXFP8 rows takes 4 us less than one of BF16 rows (`measured.CURVES`: 280 rows of 7168, 1000 of
# 2048; up to 128 of 7168 they take the same). What arrives is dequantised on its way into expert order, at the speed of
# moving BF16 rows. Whole layers: 1.06 times as fast with 33 MB (8192 rows of 2048), 1.02 with 117 MB (8192 of 7168),
# 0.97 with 0.9 MB (64 of 7168). Only advice: it changes the numbers, so the user has to ask for it.
COMPRESSION_PAYS_BYTES = 4e6
# The same across hosts, where links are several times slower: about 64 tokens for each rank (DeepEP, counted).
COMPRESSION_PAYS_TOKENS_NETWORK = 64
# MXFP8 combine: 0.94x at <= 64 tokens, 1.05x at 512, 1.13x at 1024 (FlashInfer, GB200 EP4, quantised in its kernel).
# Advised between hosts only. On one NVLink host it is ahead of the BF16 combine of the same rows (8192 of 7168: 243 and
# 346 us, `measured.CURVES`), but those rows, the experts' sums, are made first, in float32, where the BF16 combine of
# many rows takes them on its way (465 us with the sums, which alone take 316).
QUANTISED_COMBINE_TOKENS = 512
# One-sided remote writes against NCCL's all-to-all on 2 x H200: ahead at every size measured (`measured.AGAINST_NCCL`).
ONE_SIDED_FROM_TOKENS = 0
# `auto` chooses low_latency below this many tokens for each rank. 0: never, until it is measured to be ahead of
# nvlink_one_sided on the same machine.
LOW_LATENCY_BELOW_TOKENS = 0
# What QuantConfig(wire="fastest") compares with the lossless wire: the mildest of the formats, 31 dB.
FASTEST_WIRE = "mxfp8"
