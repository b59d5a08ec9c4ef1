"""The benchmark of the grouped matmul: what it measures, its error, and the tuning file that it writes."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jmoe.bench import grouped_matmul as bench
from jmoe.bench.grouped_matmul import Shape
from pallas_kernels.grouped_matmul import tuning

SMALL = Shape(96, 128, 64, 4)


def test_every_format_is_measured_where_few_rows_make_it_count_and_each_program_once():
    cases = bench.cases(smoke=False)
    assert len(cases) == len(set(cases))
    assert {f for s, f in cases if s.decode} == set(bench.FORMATS) - {"fp8"}
    assert {s for s, f in cases if f == "bf16"} == set(bench.SHAPES)
    assert len({bench._key(s, f) for s, f in cases}) < 32  # each is traced in about 2 s


def test_draws_differ_and_keep_their_sum():
    for shape in bench.SHAPES:
        draws = shape.draws(16)
        assert (draws.sum(1) == shape.rows).all() and ((draws > 0).sum(1) <= (shape.active or shape.groups)).all()
        assert shape.even or not np.array_equal(draws[0], draws[1])
        if shape.active == 8:  # of 128: each in its turn
            assert ((draws > 0).sum(0) == 1).all()


def test_a_chain_passes_through_the_draws_and_ends_with_the_last():
    x, w = bench.operands(jax.random.key(0), SMALL, "bf16")
    draws = jnp.asarray([[96, 0, 0, 0], [0, 96, 0, 0], [0, 0, 0, 96]], jnp.int32)
    y = jax.jit(bench._chain(bench._product, 3, 2))(draws, x, w)
    np.testing.assert_array_equal(y, bench._product(x, w, draws[6 % 3]))
    y = jax.jit(bench._chain(bench._product, 2, 2))(draws, x, w)
    np.testing.assert_array_equal(y, bench._product(x, w, draws[4 % 3]))


def test_a_series_is_a_call_for_each_draw_in_every_turn():
    x, w = bench.operands(jax.random.key(0), SMALL, "bf16")
    draws = [jnp.asarray(s) for s in ([96, 0, 0, 0], [0, 96, 0, 0])]
    seen = []

    def product(x, w, sizes):
        jax.debug.callback(lambda s: seen.append(int(s.argmax())), sizes)
        return bench._product(x, w, sizes)

    y = jax.block_until_ready(jax.jit(bench._series(product, 3))(draws, x, w))
    jax.effects_barrier()
    assert sorted(seen) == [0, 0, 0, 1, 1, 1]
    np.testing.assert_array_equal(y, bench._product(x, w, draws[-1]))


@pytest.mark.parametrize("fmt", ["bf16", "fp8", "nvfp4"])
def test_the_error_is_that_of_rounding_and_sees_a_wrong_row(fmt):
    x, w = bench.operands(jax.random.key(0), SMALL, fmt)
    sizes = jnp.asarray([0, 5, 70, 21], jnp.int32)
    y = bench._product(x, w, sizes)
    assert 1e-4 < bench._error(x, w, sizes, y) < 4e-3
    assert bench._error(x, w, sizes, (y.at[5 + 3].multiply(2),)) > 0.05


def test_what_is_there_once_for_a_chain_is_in_no_figure(monkeypatch):
    monkeypatch.setattr(bench, "PAUSE", 0.0)
    monkeypatch.setattr(bench, "LOAD", 0.01)
    sides = [lambda chains: 0.5 + 2.0 * chains, lambda chains: 3.0 * chains]
    assert bench._bursts(*sides) == bench._under_load(*sides) == [2.0, 3.0]


def test_only_the_figures_that_are_asked_for_are_measured_and_told():
    told = []

    class Told(bench.NoProgress):
        def record(self, record):
            told.append(record)

    records = bench.run(True, Told(), re.compile(r"^bf16 T=8 "))
    assert [(r.name, r.case) for r in records] == [("bf16", "T=8 K=128 N=128 E=4 (2 active)")] and told == records
    assert not records[0].meaningful and records[0].error < 4e-3


def test_tuning_writes_the_rules_of_the_fastest_candidates_before_those_of_other_shapes(monkeypatch, tmp_path):
    monkeypatch.setattr(tuning, "USER_FILE", tmp_path / "user.json")
    monkeypatch.setattr(bench, "LOAD", 0.01)
    candidates = {"prefill": [{"lead": 0}, {"lead": 1}], "decode": [{"block_t": 8}], "4 bits": []}
    monkeypatch.setattr(bench, "CANDIDATES", candidates)
    few, formats = Shape(8, 128, 64, 4), ["bf16", "fp8", "nvfp4"]
    records = bench.tune(shapes=[Shape(512, 128, 64, 4), few], formats=formats)
    assert len(records) == 3 and all(r.error < 4e-3 for r in records)

    def kept():
        return [(r["kernel"], r["weights"]) for r in tuning.read_rules(tuning.USER_FILE)]

    assert kept() == [("decode", "nvfp4"), ("decode", "bfloat16"), ("prefill", "bfloat16")]
    assert tuning.lookup("decode", weights="nvfp4", rows=2, n=64, k=128) in ({"block_t": 8}, shipped("nvfp4", few))
    (record,) = bench.tune(only=re.compile("^bf16 T=8 "), shapes=[few], formats=formats)
    assert record.name.startswith("bf16") and kept() == [
        ("decode", "bfloat16"),
        ("decode", "nvfp4"),
        ("prefill", "bfloat16"),
    ]
    tuning._rules.cache_clear()


def shipped(weights, shape):
    rules = tuning.read_rules(tuning._SHIPPED)
    return next(r["config"] for r in rules if r["kernel"] == "decode" and r["weights"] == weights)


def test_tuning_starts_from_what_a_shape_has_now_and_leaves_out_tiles_that_are_too_low_or_high(monkeypatch):
    monkeypatch.setitem(bench.CANDIDATES, "decode", [{"block_t": t} for t in (8, 16, 32, 32, 64)])
    shape = Shape(96, 128, 64, 4)
    configs = [c for c, _ in bench._candidates("decode", shape, "bf16")]
    now = tuning.lookup("decode", weights="bfloat16", rows=24, n=64, k=128, weight_rows=256)
    assert configs == [now, {"block_t": 32}, {"block_t": 64}]
