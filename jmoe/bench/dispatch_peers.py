"""What the exchange is measured against in PyTorch: NCCL's all_to_all, and NVSHMEM's with sizes that the GPU knows.

T tokens on one rank, R ranks: T rows go from every rank to every rank, the own one included. A process for each rank,
eager calls, timed by CUDA events: at few rows it is the launches that count, as they do for whoever calls them so.
NVLink multicast stays off, as on the JAX side.
"""

from __future__ import annotations

import dataclasses
import importlib.util
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

NCCL, NVSHMEM = "NCCL all_to_all (PyTorch)", "NVSHMEM all_to_all_vdev (PyTorch)"
LIMIT_SECONDS = {NCCL: 30, NVSHMEM: 25}  # of all sizes together, imports and start included
_NO_MULTICAST = {"NCCL_NVLS_ENABLE": "0", "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1", "NVSHMEM_DISABLE_NVLS": "1"}

Size = tuple[str, int, int]  # what, T, bytes of a row


@dataclasses.dataclass(frozen=True)
class Found:
    """asked: all sizes. seconds: of those that were measured. reasons: why others were not, by what."""

    asked: list[Size]
    seconds: dict[Size, float]
    reasons: dict[str, str]


def torch_seconds(tokens: Sequence[int], row_bytes: Sequence[int], num_ranks: int, *, skip: bool = False) -> Found:
    """Median seconds of one call for every T and row length (NVSHMEM: the longest row, where its memory suffices)."""
    several = {NCCL: row_bytes, NVSHMEM: (max(row_bytes),)}
    asked = [(what, t, n) for what, lengths in several.items() for t in tokens for n in lengths]
    if skip or num_ranks < 2:
        return Found([], {}, {})
    if importlib.util.find_spec("torch") is None:
        return Found(asked, {}, dict.fromkeys(several, "PyTorch is not installed"))
    seconds, reasons = {}, {}
    for what in several:
        sizes = sorted((t, n) for w, t, n in asked if w == what)  # a size that does not fit ends the process: last
        found, reasons[what] = _measure(what, sizes, num_ranks)
        seconds |= {(what, *size): s for size, s in found.items()}
    return Found(asked, seconds, reasons)


def _measure(what: str, sizes: list[tuple[int, int]], num_ranks: int) -> tuple[dict[tuple[int, int], float], str]:
    """Seconds of each size, and why some may be missing."""
    with tempfile.TemporaryDirectory() as folder:
        argument = json.dumps([what == NVSHMEM, sizes, num_ranks, str(Path(folder) / "meet")])
        start = lambda rank: subprocess.Popen(  # noqa: E731
            [sys.executable, "-c", _TORCH, argument, str(rank)],
            stdout=(Path(folder) / f"{rank}").open("w"),
            stderr=subprocess.STDOUT,
            env=os.environ | _NO_MULTICAST,
        )
        running = [start(rank) for rank in range(num_ranks)]
        end = time.monotonic() + LIMIT_SECONDS[what]
        try:
            for process in running:
                process.wait(max(0.1, end - time.monotonic()))
            late = False
        except subprocess.TimeoutExpired:
            late = True
        for process in running:
            process.kill()
            process.wait()
        said = [line for line in (Path(folder) / "0").read_text().splitlines() if line.strip()]
    found = [json.loads(line.removeprefix("seconds ")) for line in said if line.startswith("seconds ")]
    # What Python raised; other lines of a C++ error name its frames and a page to read.
    errors = [line for line in said if re.match(r"\s*[\w.]+Error: ", line)] or said or ["it said nothing"]
    reason = f"not done after {LIMIT_SECONDS[what]} s" if late else errors[-1].strip()[:120]
    return {(t, n): s for t, n, s in found}, reason


_TORCH = """
import json, os, sys
import torch
import torch.distributed as dist

nvshmem, sizes, ranks, meet = json.loads(sys.argv[1])
rank = int(sys.argv[2])
torch.cuda.set_device(rank)
os.environ.update(LOCAL_RANK=str(rank), RANK=str(rank), WORLD_SIZE=str(ranks))
dist.init_process_group(
    "nccl", init_method="file://" + meet, rank=rank, world_size=ranks, device_id=torch.device("cuda", rank)
)
group = dist.group.WORLD.group_name
if nvshmem:
    import torch.distributed._symmetric_memory as symmetric
    symmetric.set_backend("NVSHMEM")

def make(tokens, row_bytes):
    if not nvshmem:
        x = torch.randint(0, 255, (ranks * tokens, row_bytes), device="cuda", dtype=torch.uint8)
        y = torch.empty_like(x)
        return lambda: dist.all_to_all_single(y, x)
    shared = lambda *shape, dtype: symmetric.empty(*shape, dtype=dtype, device=f"cuda:{rank}")
    x, y = (shared(ranks * tokens, row_bytes // 2, dtype=torch.bfloat16) for _ in range(2))
    given, got = shared(ranks, dtype=torch.int64), shared(2, ranks, dtype=torch.int64)
    x.normal_()
    given.fill_(tokens)
    for part in (x, y, given, got):
        symmetric.rendezvous(part, group)
    return lambda: torch.ops.symm_mem.all_to_all_vdev(x, y, given, got, group)

for tokens, row_bytes in sizes:
    call = make(tokens, row_bytes)
    for _ in range(3):
        call()
    taken = []
    for _ in range(5):
        torch.cuda.synchronize()
        dist.barrier()
        a, b = torch.cuda.Event(True), torch.cuda.Event(True)
        a.record()
        for _ in range(20):
            call()
        b.record()
        torch.cuda.synchronize()
        taken.append(a.elapsed_time(b) / 20e3)
    print("seconds", json.dumps([tokens, row_bytes, sorted(taken)[2]]), flush=True)
    del call
dist.destroy_process_group()
"""
