"""Plans, workspaces and schedules at more ranks than any machine here has: 4 to 72."""

import functools
import json
import os
import pathlib
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from exchange_helpers import expected_rows, routing

from jmoe import backends
from jmoe.payload import Workspace, row_layout
from jmoe.placement import even_placement, to_physical
from jmoe.plan import host_capacity, make_plan, plan_between_hosts, plan_inside_host
from pallas_kernels.all_to_all.mosaic_common import peer_of, share

ROOT = pathlib.Path(__file__).parent.parent
E, K, T = 256, 8, 6


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [4, 8, 16, 64])
def test_every_backend_delivers_on_as_many_devices_as_there_are_ranks(ranks):
    environment = {**os.environ, "PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'tests'}"}
    done = subprocess.run(
        [sys.executable, str(ROOT / "tests" / "many_ranks_worker.py"), str(ranks)],
        env=environment,
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    report = json.loads(done.stdout.splitlines()[-1])
    assert len(report) == 5
    for name, (arrived, wrong, received, foretold) in report.items():
        assert arrived > 100 and wrong == 0, (name, arrived, wrong)
        assert received == foretold, name


def plans(ranks, name, capacity=T):
    """Physical ids [R, T, K] and the flat plans of all ranks, each array with a leading axis of ranks."""
    placement = even_placement(E, ranks)
    ids = routing(name, np.random.default_rng(ranks), ranks, tokens=T, num_experts=E, top_k=K)
    physical = np.asarray(to_physical(jnp.asarray(ids), placement)).reshape(ranks, T, K)
    make = functools.partial(make_plan, num_ranks=ranks, num_local=placement.num_local, capacity=capacity)
    return physical, placement, jax.jit(jax.vmap(make))(physical)


@pytest.mark.parametrize("ranks", [64, 72])
def test_experts_that_do_not_divide_are_spread_evenly_and_each_has_one_home(ranks):
    placement = even_placement(E, ranks)
    held = (placement.slots >= 0).sum(1)
    assert placement.num_local == 4 and held.max() - held.min() <= 1 and held.sum() == E
    np.testing.assert_array_equal(np.sort(placement.slots[placement.slots >= 0]), np.arange(E))
    everywhere = to_physical(jnp.arange(E, dtype=jnp.int32)[:, None], placement)[:, 0]
    np.testing.assert_array_equal(placement.slots.reshape(-1)[np.asarray(everywhere)], np.arange(E))


@pytest.mark.parametrize("name", ["uniform", "zipf", "one_hot_rank", "out_of_range"])
@pytest.mark.parametrize("ranks, hosts", [(64, 8), (72, 9), (72, 2)])
def test_two_steps_put_every_row_where_one_step_does(ranks, hosts, name):
    """All ranks' plans at once, their messages carried by hand."""
    capacity = T if name != "one_hot_rank" else 4  # which then drops rows
    physical, placement, plan = plans(ranks, name, capacity)
    per_host, across = ranks // hosts, host_capacity(T, targets=ranks // hosts, capacity=capacity)
    between = functools.partial(plan_between_hosts, num_hosts=hosts, capacity=across)
    first, message = jax.jit(jax.vmap(between))(plan)
    message = np.asarray(message).reshape(hosts, per_host, hosts, -1).transpose(2, 1, 0, 3)  # to [host, number, source]
    inside = functools.partial(
        plan_inside_host, num_ranks=per_host, num_targets=per_host, capacity=capacity, rows=across
    )
    second = jax.jit(jax.vmap(inside))(message.reshape(ranks, hosts, -1))
    token_of = np.asarray(first.src_token)  # [R, H, C_h]
    target, slot = np.asarray(second.target), np.asarray(second.slot)  # [R, H * C_h, L]
    rows = [{} for _ in range(ranks)]
    for relay in range(ranks):
        host, number = divmod(relay, per_host)
        for row, column in zip(*np.nonzero(slot[relay] >= 0), strict=True):
            source_host, place = divmod(int(row), across)
            source = source_host * per_host + number
            receiver, tag = divmod(int(target[relay, row, column]), hosts)  # (rank of this host, source host)
            assert tag == source_host
            at = (tag * per_host + number) * capacity + int(slot[relay, row, column])
            assert at not in rows[host * per_host + receiver]
            rows[host * per_host + receiver][at] = (source, int(token_of[source, host, place]), None)
    want = expected_rows(physical, backends.get_backend("nvlink_two_sided"), ranks, placement.num_local, capacity)
    assert rows == want and sum(map(len, rows)) > 0
    assert (name == "one_hot_rank") == bool(np.asarray(plan.dropped).any())
    hosts_of = np.where(physical >= 0, physical // (per_host * placement.num_local), -1)
    crossing = sum(len(set(row) - {-1}) for row in hosts_of.reshape(-1, K))
    assert np.asarray(first.counts).sum() == crossing or name == "one_hot_rank"


@pytest.mark.parametrize("ranks", [4, 8, 16, 64, 72])
def test_workspaces_are_ranks_times_capacity_times_row(ranks):
    layout = row_layout(7168, "nvfp4_token", K)
    for factor, tokens in ((None, 128), (1.25, 4096)):
        for name in ("nvlink_one_sided", "low_latency"):
            backend = backends.get_backend(name)
            local = -(-E // ranks)
            ex = backends.exchange_for(
                backend,
                tokens=tokens,
                num_ranks=ranks,
                num_local=local,
                top_k=K,
                axis_name="ep",
                capacity_factor=factor,
            )
            slots = ranks * ex.capacity * (local if backend.form == "batched" else 1)
            assert backend.memory(layout, ex)["dispatch_receive"] == slots * layout.row_bytes
            assert factor is not None or ex.capacity == tokens
            if backend.form == "standard":
                shared = Workspace.of(layout, num_ranks=ranks, capacity=ex.capacity)
                assert shared.dispatch_bytes == slots * layout.row_bytes


@pytest.mark.parametrize("ranks", [2, 4, 8, 16, 64, 72])
def test_at_each_step_of_the_schedule_every_rank_has_another_peer(ranks):
    me = np.arange(ranks, dtype=np.int32)
    visits = np.stack([np.asarray(peer_of(me, step + 1, ranks)) for step in range(ranks)])
    np.testing.assert_array_equal(np.sort(visits, axis=1), np.tile(me, (ranks, 1)))  # nobody shares a peer
    np.testing.assert_array_equal(np.sort(visits, axis=0), np.tile(me[:, None], (1, ranks)))  # and all are visited
    np.testing.assert_array_equal(visits[-1], me)  # the own rank last


@pytest.mark.parametrize("blocks", [1, 7, 132])
def test_blocks_share_the_tokens(blocks):
    for tokens in (0, 1, 131, 132, 133, 4096):
        counts = [int(share(jnp.int32(tokens), jnp.int32(b), jnp.int32(blocks))) for b in range(blocks)]
        assert sum(counts) == tokens and max(counts) - min(counts) <= 1
