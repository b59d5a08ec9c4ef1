"""The simulated links: every row arrives once, no order beats the busiest link, and rotating the peers helps."""

import itertools

import numpy as np
import pytest

from jmoe.bench import links
from jmoe.payload import row_layout

SMALL = dict(blocks=4, in_flight=2)  # few blocks, so that orders differ with few tokens


def wanted(member):
    rows = member.sum(axis=1)
    np.fill_diagonal(rows, 0)
    return rows


@pytest.mark.parametrize("router", links.ROUTERS)
@pytest.mark.parametrize("num_ranks", [1, 2, 5, 8])
def test_every_row_crosses_once_and_no_order_beats_the_busiest_link(router, num_ranks):
    member = links.route(router, num_ranks, 40)
    row = row_layout(7168, "mxfp8", 8).row_bytes
    for order, window in itertools.product(links.ORDERS, (None, 1, 4)):
        load = links.simulate(member, order, window=window, **SMALL)
        np.testing.assert_array_equal(load.delivered * row, wanted(member) * row)  # bytes, link by link
        np.testing.assert_array_equal(load.busy.sum(0), load.delivered.sum(0))  # one row in a turn
        assert load.turns == len(load.busy) and load.turns >= load.busiest and load.stretch >= 1
        assert not load.turns or load.busy[-1].any()
    assert (load.turns == 0) == (num_ranks == 1)


@pytest.mark.parametrize("router", links.ROUTERS)
@pytest.mark.parametrize("num_ranks", [2, 4, 8, 16])
def test_rotated_orders_take_no_longer_than_the_naive_one(router, num_ranks):
    member = links.route(router, num_ranks, 96)
    turns = {order: links.simulate(member, order, **SMALL).turns for order in links.ORDERS}
    naive = turns["peer ascending"]
    assert turns["token rotated"] <= naive
    if router != "zipf":  # there rank 0 is hot, and it is as well to begin with it
        assert turns["peer rotated"] <= naive
    assert turns["token rotated"] <= 1.03 * turns["token ascending"]  # a token's rows leave together in either
    if router == "uniform" and num_ranks >= 8:
        assert naive > 1.5 * turns["token rotated"]
    if router == "one rank" or num_ranks == 2:  # one link decides, whatever the order
        assert len(set(turns.values())) == 1


def test_a_full_exchange_peer_by_peer_aims_all_ranks_at_one():
    """Every token to every rank, one block, one row at a time: R - 1 senders wait for one receiver, or none does."""
    num_ranks, tokens = 6, 10
    member = np.ones((num_ranks, tokens, num_ranks), bool)
    one = dict(blocks=1, in_flight=1)
    rotated = links.simulate(member, "peer rotated", **one)
    assert rotated.turns == rotated.busiest == 5 * tokens and rotated.busy.all()
    naive = links.simulate(member, "peer ascending", **one)
    assert naive.turns >= 1.7 * rotated.turns
    begin = naive.busy[:tokens]  # ranks 1 to 5 aim at rank 0, and rank 0 at rank 1
    assert begin[:, :2].all() and not begin[:, 2:].any()


def test_links_that_keep_the_order_of_stores_cost_more():
    member = links.route("uniform", 8, 128)
    turns = [links.simulate(member, "token rotated", window=w).turns for w in (1, 8, None)]
    assert turns[0] > 1.2 * turns[1] > turns[1] >= turns[2]


def test_the_order_of_the_kernel_is_the_simulated_one():
    """`units` against the kernel's own function of places: peers from the next rank on, tokens block by block."""
    from jmoe.backends.base import Exchange
    from pallas_kernels.all_to_all.mosaic_common import peer_of

    member = links.route("uniform", 4, 9)
    assert Exchange("ep", 4, 64, 9).num_ranks == member.shape[0]
    for rank in range(4):
        visits = [int(peer_of(np.int32(rank), step + 1, 4)) for step in range(3)]
        blocks = links.units(member, rank, "token rotated", blocks=2)
        for block, tokens in enumerate((range(0, 9, 2), range(1, 9, 2))):
            assert blocks[block] == [u for t in tokens if (u := tuple(p for p in visits if member[rank, t, p]))]


@pytest.mark.parametrize("wire", links.WIRES)
def test_two_ranks_take_what_two_gpus_took(wire):
    row = row_layout(links.LAYER.hidden_size, wire, links.LAYER.num_experts_per_tok).row_bytes
    rows = int(links.route("uniform", 2, links.MEASURED_TOKENS)[0, :, 1].sum())
    assert links.seconds(rows, wire) == pytest.approx(rows * row / links.MEASURED[wire], rel=1e-3)
    assert links.seconds(0, wire) == links.FIXED_SECONDS
    assert links.MEASURED[wire] < row / links.row_seconds(wire) < 450e9


def test_unknown_routers_are_refused():
    with pytest.raises(ValueError, match="router='round robin' is not known; choose one of uniform, zipf"):
        links.route("round robin", 2, 4)


def test_the_bench_has_no_lost_row_and_draws_its_picture(tmp_path):
    records = links.run(smoke=True)
    assert len(records) == 2 * (len(links.ORDERS) + 2) and all(r.error == 0 for r in records)
    assert all(r.value >= r.ceiling > 0 and not r.meaningful for r in records)
    links.plot(records, tmp_path / "links.png")
    assert (tmp_path / "links.png").stat().st_size > 20_000
