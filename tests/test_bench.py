"""What benchmarks share: records, timing, files, comparison, pictures."""

import io
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from rich.console import Console

from jmoe.bench import common, compare, plot
from jmoe.bench.common import Record


def test_shares_and_gains_read_the_same_way_for_speeds_and_times():
    speed = Record("a", "c", 50.0, "GB/s", ceiling=100.0, peer=25.0)
    time = Record("a", "c", 50.0, "us", ceiling=25.0, peer=100.0, lower_is_better=True)
    assert speed.share == time.share == 0.5 and speed.against_peer == time.against_peer == 2.0
    bare = Record("a", "c", None, "us")
    assert (
        bare.share is None and bare.against_peer is None and Record("a", "c", 0.0, "us", peer=1.0).against_peer is None
    )


def test_records_survive_a_file(tmp_path):
    records = [Record("a", "c", 1.5, "us", error=float("nan"), parameters={"T": 4}, environment={"jax": "x"})]
    common.write_json(tmp_path / "r.json", "layer", records)
    json.loads((tmp_path / "r.json").read_text(), parse_constant=lambda _: pytest.fail("NaN is not JSON"))
    name, (back,) = common.read_json(tmp_path / "r.json")
    assert name == "layer" and back.error is None and back.parameters == {"T": 4} and back.environment == {"jax": "x"}
    for text in ("", "[]", '{"bench": 1}'):
        (tmp_path / "bad.json").write_text(text)
        with pytest.raises(ValueError, match=r"bad.json is not a benchmark file.*--json FILE"):
            common.read_json(tmp_path / "bad.json")
    with pytest.raises(ValueError, match="lacks case, unit; it holds name, value"):
        Record.from_json({"name": "a", "value": 1})


def run(build, step, sets, calls):
    f = jax.jit(build(step, calls=calls))
    return f(tuple(s[0] for s in sets), sets)


@pytest.mark.parametrize("calls, expected", [(1, [0, 1, 2]), (7, [0, 1, 2] * 3)])
def test_a_chain_calls_at_least_as_often_as_it_says_and_in_order(calls, expected):
    seen = []

    def step(x, i):
        jax.debug.callback(lambda v: seen.append(int(v)), i, ordered=True)
        return x + i

    sets = [(jnp.ones(4), jnp.float32(i)) for i in range(3)]
    firsts, results = run(common.chain, step, sets, calls)
    jax.effects_barrier()
    assert seen == expected
    assert [f.tolist() for f in firsts] == [[1.0] * 4] * 3  # the dependence changes nothing
    assert [r.tolist() for r in results] == [[1.0 + i] * 4 for i in range(3)]


def test_what_is_fed_back_accumulates():
    sets = [(jnp.ones(4), jnp.float32(i)) for i in range(3)]
    (total, *_), _ = run(common.feed_back, lambda x, i: x + i, sets, 7)
    assert total.tolist() == [1.0 + 3 * (0 + 1 + 2)] * 4


def test_equal_calls_of_a_chain_are_all_made():
    # A pure callback may be merged with an equal one, or moved out of a loop that does not change its argument.
    made = []

    def step(x):
        def host(v):
            made.append(1)
            return v

        return jax.pure_callback(host, jax.ShapeDtypeStruct(x.shape, x.dtype), x)

    x = jnp.ones(4)
    run(common.chain, step, [(x,), (x,)], 20)
    assert len(made) == 20


def test_timing_gives_seconds_of_one_call():
    timing = common.time_chain(lambda x: x * 2, [(jnp.ones(64),), (jnp.zeros(64),), (jnp.ones(64),)], repeats=3)
    assert 0 < timing.best <= timing.median < 1 and (timing.calls, timing.repeats) == (21, 3)
    with pytest.raises(ValueError, match="at least one input set"):
        common.time_chain(lambda x: x, [])


def test_copy_bandwidth_and_sets_and_errors():
    assert common.copy_bandwidth(1 << 16) > 0
    assert common.num_sets(10**9) == 2 and common.num_sets(64 * 2**20) == 2 and common.num_sets(1) == 16
    reference = np.arange(1, 5, dtype=np.float32)
    assert common.relative_error(reference, reference) == 0
    assert common.relative_error(jnp.asarray(reference * 1.01), reference) == pytest.approx(0.01, rel=1e-4)
    assert common.relative_error(np.ones(3), np.zeros(3)) == pytest.approx(3**0.5)
    assert {"jax", "device_kind", "num_devices", "time"} <= set(common.environment())


def test_comparing_runs():
    def records(**values):
        return [Record(n, "c", v, "us", lower_is_better=True, meaningful=n != "smoke") for n, v in values.items()]

    changes = compare.compare(
        records(fast=10.0, slow=10.0, same=10.0, smoke=10.0, gone=1.0),
        records(fast=5.0, slow=20.0, same=10.2, smoke=90.0, new=1.0),
    )
    verdicts = {c.name: c.verdict for c in changes}
    assert verdicts == {
        "fast": "better", "slow": "worse", "same": "same",
        "smoke": "not meaningful", "gone": "only before", "new": "only after",
    }  # fmt: skip
    assert {c.name: c.gain for c in changes}["fast"] == 2.0
    speeds = compare.compare([Record("a", "c", 10.0, "GB/s")], [Record("a", "c", 20.0, "GB/s")])
    assert speeds[0].gain == 2.0 and speeds[0].verdict == "better"
    a = [Record("a", "c", 1.0, "us", environment={"jax": "1", "time": "x"})]
    b = [Record("a", "c", 1.0, "us", environment={"jax": "2", "time": "y"})]
    assert compare.differing_environment(a, b) == {"jax": ("1", "2")}


def shown(records):
    console = Console(file=io.StringIO(), width=160)
    console.print(compare.table(records, title="t"))
    return " ".join(console.file.getvalue().split())


def test_the_table_shows_every_figure_with_its_unit_and_marks_what_means_nothing():
    rows = [
        Record("mxfp8", "T 64", 3000.0, "GB/s", 2.5e-5, 4000.0, "copy", 1500.0, "XLA", 1e-3, "relative"),
        Record("smoke", "T 1", 1.0, "GB/s", ceiling=4000.0, ceiling_name="copy", meaningful=False),
    ]
    text = shown(rows)
    for part in ("what case GB/s time", "mxfp8 T 64 3000 25 us 4000 75 % 1500 2.00 x 0.001", "1 (*) - 4000 0.03 %"):
        assert part in text, text
    for part in ("ceiling: copy", "peer: XLA", "error: relative", "says nothing about speed"):
        assert part in text, text


def test_the_table_tells_units_and_peers_apart_where_they_differ():
    rows = [Record("a", "c", 2.0, "us", peer=4.0, peer_name="NCCL", lower_is_better=True)]
    text = shown([*rows, Record("b", "c", 3.0, "GB/s", peer=1.0, peer_name="torch")])
    for part in ("2 us", "3 GB/s", "4 (a) 2.00 x", "1 (b) 3.00 x", "peer: (a) NCCL; (b) torch"):
        assert part in text, text
    assert "says nothing" not in text


def test_pictures_are_written_and_refuse_to_show_nothing(tmp_path):
    rows = [
        Record(name, f"T {t}", t * scale, "GB/s", ceiling=450.0, ceiling_name="NVLink", peer=t / 2, peer_name="NCCL",
               parameters={"T": t}, environment=common.environment())
        for name, scale in (("bf16", 1.0), ("mxfp8", 1.7))
        for t in (1, 16, 256)
    ]  # fmt: skip
    plot.bars(rows, tmp_path / "bars.png")
    plot.lines(rows, tmp_path / "lines.png", x="T", x_label="tokens on each rank")
    for name in ("bars.png", "lines.png"):
        assert (tmp_path / name).stat().st_size > 10_000
    empty = [Record("a", "c", None, "us")]
    with pytest.raises(ValueError, match="nothing to plot"):
        plot.bars(empty, tmp_path / "x.png")
    with pytest.raises(ValueError, match="no record has a value and the parameter 'T'"):
        plot.lines(empty, tmp_path / "x.png", x="T", x_label="T")


def test_a_run_that_is_cut_short_leaves_the_figures_that_it_has(tmp_path, monkeypatch):
    from types import SimpleNamespace

    from jmoe import cli

    def run(smoke, progress):
        progress.record(Record("a", "c", 1.5, "us"))
        raise KeyboardInterrupt

    monkeypatch.setattr(cli, "_bench_module", lambda name: SimpleNamespace(run=run))
    with pytest.raises(KeyboardInterrupt):
        cli.main(["bench", "layer", "--json", str(tmp_path / "r.json")])
    name, (record,) = common.read_json(tmp_path / "r.json")
    assert name == "layer" and record.value == 1.5 and record.environment["num_devices"] == len(jax.devices())
