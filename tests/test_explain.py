"""The numbers that an explanation gives, and that it says what it should."""

import dataclasses
import json

import numpy as np
import pytest

from jmoe.caps import DeviceCaps
from jmoe.config import MoEConfig, QuantConfig
from jmoe.payload import Workspace, row_layout
from jmoe.policy import BACKENDS, BackendOptions, cost, decide, explain
from jmoe.policy.explain import row_bytes
from jmoe.policy.measured import CURVES
from jmoe.policy.render import duration, size, to_text
from jmoe.shapes import SHAPES, get_shape

HOPPER = DeviceCaps("gpu", (9, 0), 8, "nvlink", name="NVIDIA H200")
CPU = DeviceCaps("cpu", None, 8, "host")
DEEPSEEK = get_shape("deepseek-v3")


def explained(quant=None, *, shape=DEEPSEEK, backend="auto", ranks=8, tokens=512, caps=HOPPER, **changes):
    config = dataclasses.replace(shape, quant=QuantConfig(**(quant or {})), **changes)
    return explain(config, backend=backend, num_ranks=ranks, tokens=tokens, caps=caps, options=BackendOptions())


@pytest.mark.parametrize(
    "wire, data, scales, row_scale",
    [
        ("bfloat16", 14336, 0, 0),
        ("nvfp4", 3584, 448, 0),
        ("nvfp4_token", 3584, 448, 4),
        ("mxfp8", 7168, 224, 0),
        ("fp8_128", 7168, 224, 0),
    ],
)
def test_f01_rows_have_the_bytes_that_the_formats_say(wire, data, scales, row_scale):
    row = row_bytes(DEEPSEEK, wire)
    assert (row.data, row.block_scales, row.row_scale, row.ids, row.weights) == (data, scales, row_scale, 32, 32)
    assert row.total == sum(dataclasses.astuple(row)[:-1]) and row.total % 16 == 0 and row.padding < 32


def test_the_buffers_are_those_of_the_workspace():
    e = explained({"activations": "mxfp8"}, backend="nvlink_one_sided", caps=CPU)
    layout = row_layout(7168, "mxfp8", 8)
    space = Workspace.of(layout, num_ranks=8, capacity=512)
    assert e.chosen.memory["dispatch_receive"] == space.dispatch_bytes
    assert e.chosen.memory["combine_send"] == space.combine_bytes
    kernel = explained({"activations": "mxfp8"}, backend="nvlink_one_sided")
    # The kernel reads and writes rows where they lie; those that it receives start on whole lines.
    on_lines = 8 * 512 * (-(-layout.row_bytes // 128) * 128)
    assert kernel.chosen.memory["dispatch_send"] == 0 and kernel.chosen.memory["dispatch_receive"] == on_lines
    assert sum(kernel.chosen.memory.values()) == on_lines + space.combine_bytes


def test_weights_are_counted_in_their_own_format():
    matrices = 3 * 7168 * 2048 * 32
    assert explained().weight_bytes == 2 * matrices
    assert explained({"weights": "mxfp8"}).weight_bytes == matrices * 8.25 / 8
    assert explained({"weights": "nvfp4"}).weight_bytes == matrices * 4.5 / 8


def test_the_mean_number_of_ranks_of_a_token_is_that_of_random_routing(rng):
    config = MoEConfig(32, 32, 24, 4)
    draws = [len({int(e) // 4 for e in rng.choice(24, 4, replace=False)}) for _ in range(4000)]
    assert abs(cost.ranks_per_token(config, 6) - np.mean(draws)) < 0.05
    assert cost.ranks_per_token(config, 1) == 1
    assert cost.ranks_per_token(MoEConfig(32, 32, 8, 8), 8) == pytest.approx(8)  # every expert, every rank


def test_rows_that_leave_a_rank_follow_from_the_way_they_move():
    by_name = {a.backend: a.rows_away for a in explained().alternatives}
    each = 512 * cost.ranks_per_token(DEEPSEEK, 8) * 7 / 8
    assert by_name["nvlink_one_sided"] == by_name["deepep_high_throughput"] == pytest.approx(each)
    assert by_name["allgather_reducescatter"] == by_name["nvlink_two_sided"] == 7 * 512  # padding travels
    assert by_name["low_latency"] == pytest.approx(512 * 8 * 7 / 8)
    limited = {a.backend: a.rows_away for a in explained(capacity_factor=0.5).alternatives}
    assert limited["nvlink_two_sided"] == 7 * 256


def test_predicted_times_follow_the_measurements_and_only_where_they_apply():
    def seconds(backend, nbytes, caps=HOPPER, quant=None, back=False):
        config = dataclasses.replace(DEEPSEEK, quant=QuantConfig(**(quant or {})))
        d = decide(config, backend=backend, num_ranks=8, tokens=1, caps=caps, options=BackendOptions())
        return cost.exchange_seconds(d, nbytes, caps, back=back)

    for kind, backend in (("remote_writes", "nvlink_one_sided"), ("collectives", "nvlink_two_sided")):
        for nbytes, measured in CURVES[kind]:
            assert seconds(backend, nbytes) == pytest.approx(measured)
        points = [seconds(backend, x) for x in np.geomspace(1e3, 1e10, 50)]
        assert points == sorted(points) and points[0] == CURVES[kind][0][1]
    for curve in CURVES.values():  # more bytes take longer
        assert list(curve) == sorted(curve) == sorted(curve, key=lambda point: point[1])
    most, longest = CURVES["remote_writes"][-1]
    assert seconds("nvlink_one_sided", 2 * most) == pytest.approx(2 * longest)
    kinds = {"remote_writes, quantised": ({"activations": "mxfp8"}, False)}
    kinds |= {"remote_writes, back": ({}, True), "remote_writes, back, quantised": ({"combine_wire": "mxfp8"}, True)}
    for kind, (quant, back) in kinds.items():
        for nbytes, measured in CURVES[kind]:
            assert seconds("nvlink_one_sided", nbytes, quant=quant, back=back) == pytest.approx(measured), kind
    assert seconds("low_latency", 1e6, quant={"combine_wire": "mxfp8"}, back=True) is None  # XLA's, not measured so
    no_jax = dataclasses.replace(HOPPER, kernels=False)
    assert seconds("ragged", CURVES["ragged"][-1][0], no_jax) == pytest.approx(CURVES["ragged"][-1][1])
    assert seconds("nvlink_one_sided", 1e6, CPU) is None
    assert seconds("nvlink_one_sided", 1e6, dataclasses.replace(HOPPER, compute_capability=(10, 0))) is None


def test_every_backend_is_listed_with_its_decision_or_its_refusal():
    e = explained({"activations": "mxfp4"})
    assert [a.backend for a in e.alternatives] == [n for n in BACKENDS if n != "local"]
    refused = {a.backend: a.refusal for a in e.alternatives if a.decision is None}
    assert set(refused) == {"nvlink_one_sided"} and "nvlink_two_sided" in refused["nvlink_one_sided"]
    assert [a.backend for a in explained(ranks=1).alternatives] == ["local"]


def test_a_refused_layer_is_not_explained():
    with pytest.raises(ValueError, match=r"one_sided.*int8.*two_sided"):
        explained({"activations": "int8"}, backend="nvlink_one_sided")


def test_the_text_says_what_who_why_and_what_blackwell_would_do():
    text = str(explained({"activations": "mxfp8"}))
    for part in (
        "D 7168, F 2048, 256 experts, top 8",
        "8, 32 experts and 512 tokens on each",
        "8 x NVIDIA H200, Hopper, one NVLink domain",
        "nvlink_one_sided, standard form",
        "remote writes from Pallas kernels",
        "7456 = 7168 data + 224 block scales + 32 expert ids + 32 weights",
        "the sender, before the rows leave",
        "backend='auto' chose nvlink_one_sided",
        "Hopper has no matrix units for mxfp8",
        "On Blackwell",
        "Blackwell multiplies mxfp8 as it is",
        "> nvlink_one_sided",
        "predicted from measurements on 2 x H200",
        "333 against 428 us at 8192",
    ):
        assert part in " ".join(text.split()), part
    assert max(len(line) for line in text.splitlines()) <= 100


def test_the_text_says_why_others_refuse_and_what_they_would_gain():
    text = " ".join(str(explained({"activations": "nvfp4_online"}, tokens=8192)).split())
    assert "Why the others refuse" in text and "no slot for a token's scale" in text
    assert "each token's own" in text
    plain = " ".join(str(explained(tokens=8192)).split())
    assert "its block-scaled matrix units would idle" in plain
    assert "QuantConfig(wire='mxfp8') would make the rows 1.93 x smaller" in plain and "It pays here" in plain
    small = " ".join(str(explained(tokens=32)).split())
    assert "It does not pay here: break-even is about 4 MB" in small and "combine_wire" not in small
    unlinked = " ".join(str(explained(tokens=8192, caps=dataclasses.replace(HOPPER, link="host"))).split())
    assert "Whether it pays here was not measured: break-even is about 4 MB for each rank on NVLink" in unlinked
    hosts = " ".join(str(explained(tokens=64, caps=dataclasses.replace(HOPPER, link="network"))).split())
    assert "It pays here: break-even is about 64 tokens" in hosts
    hosts = " ".join(str(explained(tokens=512, caps=dataclasses.replace(HOPPER, link="network"))).split())
    assert "combine_wire='mxfp8'" in hosts and "combine_wire" not in plain


def test_several_hosts_show_what_leaves_them():
    two_hosts = dataclasses.replace(HOPPER, link="network", num_devices=16, num_hosts=2)
    e = explained(shape=get_shape("deepseek-v3"), ranks=16, tokens=4096, caps=two_hosts)
    text = to_text(e, width=80)
    assert "between 2 hosts, once for each (token, host)" in " ".join(text.split())
    assert "to hosts" in text and "between hosts, both ways" in text and "…" not in text
    sent = {a.backend: a.host_bytes / a.row.total for a in e.alternatives}
    assert sent["nvlink_one_sided"] == 4096  # one row for each (token, other host)
    assert sent["nvlink_two_sided"] == sent["allgather_reducescatter"] == 8 * 4096
    assert 3.2 < sent["deepep_high_throughput"] / 4096 < 3.3  # ranks of the other host that hold an expert of a token
    away = {a.backend: a.rows_away for a in e.alternatives}
    assert away["nvlink_one_sided"] == 4096 + 7 * 2 * 4096 == away["nvlink_two_sided"]
    kernel = explained(
        shape=get_shape("deepseek-v3"), ranks=16, tokens=4096, caps=dataclasses.replace(two_hosts, local_kernels=True)
    ).chosen
    assert kernel.rows_away < 3 * 4096 + 4096 * 4 and kernel.memory["dispatch_send"] == 0
    assert "between 2 hosts" in e.blackwell.decision.transport_reason


def test_one_rank_sends_nothing():
    text = str(explained({"activations": "mxfp8"}, ranks=1, caps=DeviceCaps()))
    assert "one rank: nothing travels" in text and "this rank, once, before its experts sort the rows" in text
    assert "bytes per row" not in text and "All backends" not in text


def test_a_narrow_terminal_cuts_no_word():
    text = to_text(explained({"activations": "mxfp8"}), width=80)
    assert "…" not in text and "allgather_reducescatter" in text and max(map(len, text.splitlines())) <= 80


def test_an_explanation_is_json():
    data = json.loads(json.dumps(explained({"activations": "nvfp4"}).to_json()))
    assert data["chosen"]["decision"]["wire"] == "nvfp4" and data["chosen"]["row"]["total"] == 4096
    assert len(data["alternatives"]) == len(BACKENDS) - 1 and data["blackwell"]["decision"]["native"]


def test_sizes_and_durations_have_units():
    assert [size(n) for n in (12, 1500, 2.5e6, 3e9)] == ["12 B", "1.5 kB", "2.5 MB", "3 GB"]
    assert [duration(s) for s in (None, 0.0, 25e-6, 2.5e-3)] == ["?", "-", "25 us", "2.50 ms"]


@pytest.mark.parametrize("name", SHAPES)
def test_named_shapes_are_explained_at_any_number_of_ranks(name):
    for ranks in (1, 2, 8):
        assert explained(shape=get_shape(name), ranks=ranks, caps=HOPPER).chosen.decision is not None


def test_an_unknown_shape_is_refused_with_the_names():
    with pytest.raises(ValueError, match=r"no shape 'gpt-5'; choose one of qwen3-30b-a3b, "):
        get_shape("gpt-5")
