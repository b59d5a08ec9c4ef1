"""The benchmark of block quantisation: its peers do the same work, and one that cannot run says why."""

import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jmoe.bench import profile, quantize_peers
from jmoe.bench import quantize as bench
from jmoe.formats import quantize


def bytes_of(x):
    return np.asarray(x).view(np.uint8)


@pytest.mark.parametrize("name", bench.QUANTISED)
def test_the_plain_peer_computes_the_same_format(name):
    x = jax.random.normal(jax.random.key(0), (64, 256), jnp.float32).astype(jnp.bfloat16)
    q = jax.jit(lambda x: quantize(x, name, global_scale=bench.given_scale(name), implementation="reference"))(x)
    data, scale, *row_scale = jax.jit(lambda x: quantize_peers.plain_xla(x, name))(x)
    assert (bytes_of(data) != bytes_of(q.data)).mean() < 0.01
    if name == "fp8_128":  # divided in another order
        np.testing.assert_allclose(scale, q.block_scale, rtol=3e-7)
    else:
        assert (bytes_of(scale) != bytes_of(q.block_scale)).mean() < 0.01
    assert len(row_scale) == (q.format.global_scale == "token")


def test_a_torch_peer_that_cannot_run_gives_its_reason(tmp_path, monkeypatch):
    (tmp_path / "torch.py").write_text("raise ImportError('no such luck')\n")
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}:{':'.join(sys.path)}")
    peers = quantize_peers.TorchPeers([(16, 256)])
    peers.wait()
    assert not peers.seconds and peers.reasons == {"torch": "cannot be imported: no such luck"}


def test_torch_peers_that_crash_or_hang_are_reported_and_ended(tmp_path, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}:{':'.join(sys.path)}")
    (tmp_path / "torch.py").write_text("raise SystemError('out of luck')\n")
    peers = quantize_peers.TorchPeers([(16, 256)])
    peers.wait()
    assert "out of luck" in peers.reasons["torch"]
    (tmp_path / "torch.py").write_text("import time\ntime.sleep(600)\n")
    peers = quantize_peers.TorchPeers([(16, 256)])
    peers.wait(limit=5.0)
    assert "5 s" in peers.reasons["torch"] and peers.process is None


def test_every_record_says_what_share_of_an_elementwise_pass_it_reaches():
    records = bench.run(smoke=True)
    assert {r.name for r in records} == {*(f"quantise {n}" for n in bench.SMOKE_FORMATS), "dequantise mxfp8"}
    for r in records:
        about = r.parameters
        assert about["differing_bytes"] == 0 and about["peers_that_failed"] == {}
        assert about["share_of_elementwise_pass"] == pytest.approx(r.value / about["elementwise_pass"])


def test_a_plain_peer_that_fails_is_named_and_costs_no_other_figure(monkeypatch):
    def broken(x, name):
        if name == "fp8_128":
            raise NotImplementedError("not today")
        return quantize_peers.plain_xla(x, name)

    monkeypatch.setattr(bench, "plain_xla", broken)
    by_name = {r.name: r for r in bench.run(smoke=True)}
    failed = by_name["quantise fp8_128"]
    assert failed.peer is None and failed.value and "not today" in failed.parameters["peers_that_failed"]["plain XLA"]
    assert by_name["quantise mxfp8"].peer


def test_kernels_of_several_runs_are_told_apart_by_their_pauses():
    ms = 1e6
    events = [(0, "a", 1 * ms), (1.1 * ms, "b", 2 * ms), (9 * ms, "c", 1 * ms), (20 * ms, "d", 0.5 * ms)]
    assert profile._grouped(events, 1.5 * ms, 3) == pytest.approx([3e-3, 1e-3, 5e-4])
    assert profile._grouped(events, 1.5 * ms, 2) is None and profile._grouped([], ms, 1) is None
