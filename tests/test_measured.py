"""The policy's figures of the exchange are those of the benchmark's file."""

import json
import pathlib

import pytest

from jmoe.policy.measured import AGAINST_NCCL, CURVES

FIGURES = pathlib.Path(__file__).parent.parent / "docs" / "figures" / "dispatch.json"

# curve -> (start of the records' names, whose seconds)
RECORDS = {
    "remote_writes": (("dispatch nvlink_one_sided bfloat16",), "mine"),
    "remote_writes, quantised": (("dispatch nvlink_one_sided mxfp8", "dispatch nvlink_one_sided nvfp4_token"), "mine"),
    "remote_writes, back": (("combine nvlink_one_sided bfloat16",), "mine"),
    "remote_writes, back, quantised": (("combine nvlink_one_sided mxfp8",), "mine"),
    "collectives": (("dispatch nvlink_one_sided bfloat16",), "peer"),
    "ragged": (("ragged_all_to_all, 1 slice for each rank",), "peer"),
}


@pytest.fixture
def records():
    if not FIGURES.exists():
        pytest.skip("docs/figures/dispatch.json is not there")
    return json.loads(FIGURES.read_text())["records"]


def points(records, names, whose):
    """bytes that leave a rank -> seconds."""
    found = {}
    for r in records:
        p = r["parameters"]
        if r["name"].startswith(names):
            rows = p["remote_rows"] if whose == "mine" else p["T"] * (p["R"] - 1)
            found[rows * p["row_bytes"]] = r["seconds"] if whose == "mine" else p["peer_seconds"]
    return found


def test_curves_ascend():
    for curve in CURVES.values():
        assert list(curve) == sorted(curve) and [s for _, s in curve] == sorted(s for _, s in curve)


@pytest.mark.parametrize("curve", RECORDS)
def test_every_point_of_a_curve_was_measured(records, curve):
    found = points(records, *RECORDS[curve])
    for nbytes, seconds in CURVES[curve]:
        nearest = min(found, key=lambda b: abs(b - nbytes))
        assert nbytes == pytest.approx(nearest, rel=0.01)
        assert seconds == pytest.approx(found[nearest], rel=0.03)


def test_the_comparison_with_nccl_was_measured(records):
    name = ("dispatch nvlink_one_sided bfloat16",)
    seen = {r["parameters"]["T"]: r for r in records if r["name"].startswith(name)}
    for rows, seconds, nccl in AGAINST_NCCL:
        assert seconds == pytest.approx(seen[rows]["seconds"], rel=0.03)
        assert nccl == pytest.approx(seen[rows]["parameters"]["peer_seconds"], rel=0.03)
