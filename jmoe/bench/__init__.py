"""`jmoe bench`: every figure with its unit, its ceiling, its peers and its error, measured in one run.

A benchmark is a module of this package with

* `run(smoke: bool, progress: Progress) -> list[Record]`; `smoke` means tiny shapes, a few seconds on a CPU, the error
  columns filled and `meaningful=False` on every speed;
* optionally a keyword `only` of `run`, what `--only` gives: see `common.wanted`;
* optionally `plot(records, path)`; without it `jmoe.bench.plot.bars` draws the records;
* optionally `tune(progress) -> list[Record]`, what `--tune` calls.
"""

from __future__ import annotations

BENCHES = {
    "quantize": "block quantisation and its inverse against the copy bandwidth",
    "dispatch": "dispatch and combine over the links, every backend and wire format",
    "grouped-matmul": "grouped matmul against the roofline and CUTLASS",
    "layer": "the whole MoE layer",
    "links": "what the order of a dispatch does to the links at 2 to 72 ranks, simulated",
    "model": "prefill and decode of a whole model of Qwen3-30B-A3B's shape",
}


def module_name(bench: str) -> str:
    """The module that implements `bench`; ValueError lists the names that exist."""
    if bench not in BENCHES:
        raise ValueError(f"There is no benchmark {bench!r}; choose one of {', '.join(BENCHES)}.")
    return f"jmoe.bench.{bench.replace('-', '_')}"
