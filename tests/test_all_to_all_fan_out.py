"""The batched dispatch whose data crosses the link once for each rank: who stores and copies what, run on the host."""

import numpy as np
import pytest

from jmoe import compat
from jmoe.caps import DeviceCaps
from jmoe.config import MoEConfig
from jmoe.policy import explain

pytestmark = pytest.mark.skipif(not compat.KERNELS_SUPPORTED, reason=compat.KERNELS_REASON)


def plan_of(ids, num_experts, capacity):
    """(target, slot) [T, K] of one rank: a slot for each (token, expert), -1 where none is left or the id is none."""
    target, slot, used = np.maximum(ids, -1), np.full(ids.shape, -1, np.int32), np.zeros(num_experts, int)
    for token, k in np.ndindex(*ids.shape):
        expert = ids[token, k]
        if expert >= 0 and expert not in ids[token, :k] and used[expert] < capacity:
            slot[token, k] = used[expert]
            used[expert] += 1
    return target.astype(np.int32), slot


@pytest.mark.parametrize(
    "ranks, tokens, blocks, capacity", [(2, 6, 6, 6), (3, 7, 3, 2), (4, 9, 5, 9), (2, 1, 1, 1), (2, 3, 5, 3)]
)
def test_every_place_gets_its_tokens_data_which_crosses_a_link_once(monkeypatch, rng, ranks, tokens, blocks, capacity):
    from pallas_kernels.all_to_all import mosaic_common as common
    from pallas_kernels.all_to_all.mosaic_fan_out import FanOut

    num_local, top_k = 3, 4
    form = common.Form("ep", ranks, capacity, num_local)
    fan = FanOut(form, tokens, top_k, blocks)
    ids = rng.integers(-1, ranks * num_local, (ranks, tokens, top_k))
    ids[0, 0] = 0  # one expert again and again
    plans = [plan_of(i, ranks * num_local, capacity) for i in ids]
    rows = num_local * ranks * capacity
    data, want, tails = (np.full((ranks, rows), -1) for _ in range(3))
    crossed = 0
    this_is = lambda me: monkeypatch.setattr(common.lax, "axis_index", lambda name: np.int32(me))  # noqa: E731
    for me in range(ranks):
        this_is(me)
        for token in range(tokens):
            sent = set()
            for peer, place, by_link in fan.by_link(form.places(np.int32(token), *plans[me])):
                peer, place, by_link = int(peer), int(place), int(by_link)
                if place >= 0:
                    tails[peer, place] = want[peer, place] = me * tokens + token
                assert by_link in (place, -1)
                if by_link >= 0:
                    data[peer, by_link] = me * tokens + token
                    assert peer == me or peer not in sent
                    sent.add(peer)
            crossed += len(sent - {me})
    copied = 0
    for me in range(ranks):
        this_is(me)
        for source in set(range(ranks)) - {me}:
            seen = []
            for block in range(blocks):
                first_token, start = (int(v) for v in fan.first_token(np.int32(block)))
                assert 0 <= start and start + fan.of_block <= tokens
                for token in range(first_token, min(first_token + fan.of_block, tokens)):
                    assert start <= token < start + fan.of_block
                    seen.append(token)
                    target, slot = (table[token] for table in plans[source])
                    first, others = fan.places(np.int32(source), list(zip(target, slot, strict=True)))
                    for row in others:
                        if int(row) >= 0:
                            assert data[me, int(first)] == source * tokens + token
                            data[me, int(row)] = data[me, int(first)]
                            copied += 1
            assert sorted(seen) == list(range(tokens))
    np.testing.assert_array_equal(data, want)
    np.testing.assert_array_equal(tails, want)
    assert crossed > 0 and (copied > 0 or tokens == 1)


def test_what_cannot_be_fetched_is_named():
    from pallas_kernels.all_to_all.mosaic_common import Form
    from pallas_kernels.all_to_all.mosaic_fan_out import FanOut

    batched = Form("ep", 2, 128, 64)
    assert FanOut(batched, 128, 8, 128).obstacle is None
    assert FanOut(batched, 256, 8, 132).of_block == 2
    assert "22 words" in FanOut(batched, 128, 22, 128).obstacle
    assert "do not fit" in FanOut(batched, 1 << 20, 8, 132).obstacle
    assert "batched" in FanOut(Form("ep", 2, 128), 128, 8, 128).obstacle


def test_the_engine_copies_at_the_receiver_where_that_saves_the_link_enough():
    from jmoe.backends import exchange_for, get_backend
    from jmoe.backends.engine import fans_out

    def chosen(tokens, *, ranks=2, top_k=8, name="low_latency"):
        backend = get_backend(name)
        sizes = dict(tokens=tokens, num_ranks=ranks, num_local=32, top_k=top_k, axis_name="ep")
        return fans_out(exchange_for(backend, **sizes), backend.form, tokens, top_k, 14336)

    assert chosen(128) and chosen(32) and not chosen(8)
    assert not chosen(128, ranks=8)  # of 8 experts on 8 ranks few are neighbours
    assert not chosen(128, top_k=6) and not chosen(128, name="nvlink_one_sided")


def test_explain_counts_rows_that_cross_once():
    config, caps = MoEConfig(7168, 2048, 256, 8), DeviceCaps("gpu", (9, 0), 2, "nvlink", name="NVIDIA H200")
    few, many = (explain(config, backend="low_latency", num_ranks=2, tokens=t, caps=caps).chosen for t in (8, 128))
    assert few.rows_away == 8 * 8 / 2 and few.combine_bytes == few.rows_away * 14336
    assert 127 < many.rows_away < 128 and many.combine_bytes == 128 * 4 * 14336
    assert 0.75 < many.dispatch_seconds / 23.6e-6 < 1.25  # measured on two H200s
