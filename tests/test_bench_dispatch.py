"""The exchange's benchmark: what it does with peers that are absent, break off or hang."""

import dataclasses
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jmoe.backends import Engine, exchange_for, get_backend
from jmoe.backends.engine import ENGINE
from jmoe.bench import dispatch, dispatch_peers
from jmoe.bench.dispatch_peers import NCCL, NVSHMEM
from jmoe.payload import row_layout

TALKS = """
import json, sys
nvshmem, sizes, ranks, meet = json.loads(sys.argv[1])
for tokens, row_bytes in sizes:
    print("seconds", json.dumps([tokens, row_bytes, 1e-6 * tokens]), flush=True)
    if nvshmem:
        END
"""


@pytest.fixture
def torch_says(monkeypatch):
    """Peers whose processes run that in place of PyTorch: NVSHMEM's do `end` after the first size."""

    def set_up(end):
        monkeypatch.setattr(dispatch_peers, "_TORCH", TALKS.replace("END", end))
        monkeypatch.setattr(dispatch_peers, "LIMIT_SECONDS", {NCCL: 30, NVSHMEM: 2})
        monkeypatch.setattr(dispatch_peers.importlib.util, "find_spec", lambda name: True)
        return dispatch_peers.torch_seconds((128, 1), (32, 64), 2)

    return set_up


@pytest.mark.parametrize(
    "end, reason",
    [
        ("print('MemoryError: no more'); print('bye'); print(); sys.exit(1)", "MemoryError: no more"),
        ("import time; time.sleep(60)", "not done after 2 s"),
    ],
)
def test_a_peer_that_ends_early_leaves_what_it_measured_and_the_reason(torch_says, end, reason):
    found = torch_says(end)
    assert {size: s for size, s in found.seconds.items() if size[0] == NCCL} == {
        (NCCL, 128, 32): 128e-6,
        (NCCL, 128, 64): 128e-6,
        (NCCL, 1, 32): 1e-6,
        (NCCL, 1, 64): 1e-6,
    }
    assert (NVSHMEM, 1, 64) in found.seconds and (NVSHMEM, 128, 64) not in found.seconds
    assert found.reasons[NVSHMEM] == reason
    bench = dispatch.Bench(dispatch.Shape(64, 8, 2), dispatch.Timer(1, 1), meaningful=False)
    records = dispatch.torch_records(dispatch.Tokens(bench, 128), found, {"bfloat16": 64, "mxfp8": 32, "fp8_128": 32})
    assert [r.seconds for r in records] == [128e-6, 128e-6, 128e-6, None]
    assert records[-1].value is None and f"not measured: {reason}" in records[-1].case


def test_without_pytorch_the_records_say_so(monkeypatch):
    monkeypatch.setattr(dispatch_peers.importlib.util, "find_spec", lambda name: None)
    found = dispatch_peers.torch_seconds((1,), (64,), 2)
    assert found.reasons[NCCL] == "PyTorch is not installed" and not found.seconds and len(found.asked) == 2


def test_wrong_bytes_of_an_engine_show_in_the_record():
    bench = dispatch.Bench(dispatch.Shape(64, 8 * jax.device_count(), 2), dispatch.Timer(1, 1), meaningful=False)
    backend = get_backend("nvlink_one_sided")

    def push(rows, plan, exchange):  # every row's first byte is wrong
        plain = dataclasses.replace(exchange, engine=None)
        received = backend.send(rows.at[:, 0].add(1), plan, plain)
        return received, backend.exchange_counts(plan, plain)

    at = dispatch.Tokens(bench, 4)
    assert dispatch.Case(at, backend, "mxfp8").figures()[0].measure().error == 0
    bench.engine = Engine("breaks", push, ENGINE.reduce)
    record = dispatch.Case(at, backend, "mxfp8").figures()[0].measure()
    assert record.error == pytest.approx(1 / row_layout(64, "mxfp8", 2).payload_bytes)
    assert record.parameters["remote_rows"] > 0 and record.name.endswith("(kernel)")


def test_only_the_wanted_figures_are_made():
    names = [r.name for r in dispatch.run(True, only=re.compile("^combine.*mxfp8.*T=8 "))]
    assert sorted(names) == ["combine low_latency mxfp8", "combine nvlink_one_sided mxfp8"]


def test_a_token_that_the_receiver_copies_crosses_once():
    ids = jnp.asarray([[[0, 1, 2], [3, 2, -1]], [[3, 3, 0], [0, 1, 0]]], jnp.int32)  # two ranks of two experts
    backend = get_backend("low_latency")
    exchange = exchange_for(backend, tokens=2, num_ranks=2, num_local=2, top_k=3, axis_name="ep")
    plans = jax.tree.map(lambda *a: jnp.stack(a), *[backend.plan(i, exchange) for i in ids])
    np.testing.assert_array_equal(dispatch.rows_once(plans, 2), [[1, 2], [2, 1]])
    np.testing.assert_array_equal(plans.counts.reshape(2, 2, 2).sum(-1), [[2, 3], [3, 1]])
