"""The exchange's kernels compiled to machine code for four and eight GPUs, without any."""

import json
import os
import pathlib
import subprocess
import sys

import pytest

from jmoe import compat

ROOT = pathlib.Path(__file__).parent.parent


def compiled(ranks):
    environment = {k: v for k, v in os.environ.items() if k != "XLA_FLAGS"} | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, str(ROOT / "tests" / "aot_all_to_all.py"), str(ranks)],
        env=environment,
        capture_output=True,
        text=True,
        timeout=600,
    )
    if done.returncode == 77:
        pytest.skip(done.stdout.strip())
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


needs_kernels = pytest.mark.skipif(not compat.KERNELS_SUPPORTED, reason=compat.KERNELS_REASON)


@pytest.mark.slow
@needs_kernels
@pytest.mark.parametrize("ranks", [4, 8])
def test_the_exchange_compiles_for_several_gpus_without_spilling_a_register(ranks):
    report = compiled(ranks)
    assert len(report) == 6
    for name, found in report.items():
        assert found["spilled"] == 0 and 0 < found["registers"] <= 168, (name, found)
        assert found["symmetric"] == 0, (name, found)  # NVLink multicast stays off
        assert found["kernels"] >= 2, (name, found)  # a dispatch and a combine; others quantise
        assert bool(found["groups"]) == (name == "inside two hosts"), (name, found)


@pytest.mark.slow
@needs_kernels
def test_for_two_hosts_of_eight_gpus_nccl_exchanges_between_equal_numbers_and_inside_a_host():
    (found,) = compiled(16).values()
    pairs = ",".join(f"{{{i},{i + 8}}}" for i in range(8))
    assert found["groups"] == ["{{0,1,2,3,4,5,6,7},{8,9,10,11,12,13,14,15}}", f"{{{pairs}}}"]
    assert found["symmetric"] == 0 and found["spilled"] == 0
