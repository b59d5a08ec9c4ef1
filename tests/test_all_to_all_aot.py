"""The exchange's kernels compiled to machine code for four and eight GPUs, without any."""

import pytest
from aot_report import aot_report

from jmoe import compat

pytestmark = [
    pytest.mark.slow,
    pytest.mark.aot,
    pytest.mark.skipif(not compat.KERNELS_SUPPORTED, reason=compat.KERNELS_REASON),
]


@pytest.mark.parametrize("ranks", [4, 8])
def test_the_exchange_compiles_for_several_gpus_without_spilling_a_register(ranks):
    report = aot_report("aot_all_to_all.py", ranks)
    assert len(report) == 16
    for name, found in report.items():
        assert found["spilled"] == 0 and 0 < found["registers"] <= 168, (name, found)
        assert found["symmetric"] == 0, (name, found)  # NVLink multicast stays off
        assert found["kernels"] >= 2, (name, found)  # a dispatch and a combine; others quantise
        assert bool(found["groups"]) == (name == "inside two hosts"), (name, found)


def test_for_two_hosts_of_eight_gpus_nccl_exchanges_between_equal_numbers_and_inside_a_host():
    (found,) = aot_report("aot_all_to_all.py", 16).values()
    pairs = ",".join(f"{{{i},{i + 8}}}" for i in range(8))
    assert found["groups"] == ["{{0,1,2,3,4,5,6,7},{8,9,10,11,12,13,14,15}}", f"{{{pairs}}}"]
    assert found["symmetric"] == 0 and found["spilled"] == 0
