"""The benchmarks of the layer and of generation: what they count, and that their smoke runs check correctness."""

import dataclasses
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jmoe.bench import layer, layer_case, layer_peers, lowering, model
from jmoe.bench.common import NoProgress
from jmoe.bench.profile import _scopes, profile
from jmoe.config import MoEConfig, QuantConfig

LIMITS = layer_case.Ceilings(4e12, {"bfloat16": 800e12, "fp8": 1500e12})


def test_the_roofline_counts_operations_of_many_rows_and_touched_weights_of_few():
    qwen = layer.SHAPES["qwen3-30b-a3b"]
    many = layer_case.roofline_seconds(qwen, 32768, LIMITS)
    assert many == pytest.approx(32768 * 8 * 6 * 2048 * 768 / 800e12, rel=1e-6)
    one = layer_case.roofline_seconds(qwen, 1, LIMITS)
    assert one == pytest.approx(8 * 3 * 2048 * 768 * 2 / 4e12, rel=0.01)
    nvfp4 = MoEConfig(2048, 768, 128, 8, quant=QuantConfig(weights="nvfp4"))
    assert layer_case.roofline_seconds(nvfp4, 1, LIMITS) == pytest.approx(one * 4.5 / 16, rel=0.02)


def test_the_smoke_run_of_the_layer_compares_every_format_with_float32(monkeypatch):
    monkeypatch.setattr(layer, "VARIANTS", (layer.VARIANTS[0], layer.VARIANTS[2]))
    monkeypatch.setattr(layer, "WIRES", (layer.WIRES[0], layer.WIRES[3]))
    records = layer.run(True, NoProgress())
    errors = {(r.name, r.parameters["T"]): r.error for r in records if r.error is not None}
    for tokens in layer.SMOKE_STAGES[0][1]:
        assert 1e-4 < errors["BF16", tokens] < 0.01
        assert 0.05 < errors["NVFP4 weights", tokens] < 0.25
        assert 0.01 < errors["EP, FP8-128 wire", tokens] < 0.06
    assert not any(r.meaningful for r in records)
    assert next(r for r in records if r.name.endswith("faster from")).unit == "tokens"
    first = records[0]
    assert first.peer_name == "stock JAX" and first.peer == next(r.value for r in records if r.name == "stock JAX")


def test_stock_jax_computes_the_same_layer():
    config = MoEConfig(64, 32, 8, 2)
    params = layer_case.random_params(jax.random.key(0), config)
    x = layer_case.inputs(config, 5, 1)[0]
    y = layer_peers.stock_layer(x, *layer_peers.stock_weights(params), top_k=2)
    np.testing.assert_allclose(np.asarray(y, np.float32), layer_case.reference(config, params, x), atol=0.03)


def test_only_some_layers_and_peers_can_be_asked_for():
    records = layer.run(True, NoProgress(), only=re.compile(r"^(BF16|stock JAX) .*T=24$"))
    assert [(r.name, r.parameters["T"]) for r in records] == [("BF16", 24), ("stock JAX", 24)]


def test_formats_are_compared_with_bf16_and_a_wire_says_from_which_number_of_tokens_it_is_faster():
    def figure(name, tokens, seconds):
        return layer_case.record("tiny", layer.SMOKE_SHAPES["tiny"], tokens, name, seconds, 2, 0.0)

    plain, mxfp8, nvfp4 = (w.name for w in layer.WIRES[:3])
    records = [figure(plain, t, 1.0) for t in (1, 2, 3)]
    records += [figure(mxfp8, 1, 0.9), figure(mxfp8, 2, 1.1), figure(mxfp8, 3, 0.8), figure(nvfp4, 3, 1.5)]
    one = layer_case.record("tiny", layer.SMOKE_SHAPES["tiny"], 3, "BF16", 1.0, 1, 0.0)
    records += [one, dataclasses.replace(one, name="FP8-128", seconds=0.8)]
    table = {(r.name, r.case): r.value for r in layer.compared(records)}
    assert table[f"{mxfp8} faster from", "tiny R=2"] == 3 and table[f"{nvfp4} faster from", "tiny R=2"] is None
    assert table[f"{mxfp8} against BF16", "tiny T=1 R=2"] == pytest.approx(1 / 0.9)
    assert table[f"{nvfp4} against BF16", "tiny T=3 R=2"] == pytest.approx(1 / 1.5) and len(table) == 7
    assert table["FP8-128 against BF16", "tiny T=3"] == pytest.approx(1.25)


def test_touched_experts_are_those_of_random_routing(rng):
    counts = [len(np.unique([rng.choice(32, 4, replace=False) for _ in range(10)])) for _ in range(400)]
    assert layer_case.touched_experts(32, 4, 10) == pytest.approx(np.mean(counts), rel=0.02)


def test_generation_reads_what_it_must_and_its_cache_changes_nothing(monkeypatch):
    monkeypatch.setattr(model, "WEIGHTS", model.WEIGHTS[:1])
    with jax.numpy_dtype_promotion("standard"):  # Flax's norms rely on promotion
        records = model.run(True, NoProgress(), devices=jax.devices()[:1])
    assert [r.parameters["what"] for r in records] == ["decode", "decode", "prefill"]
    assert all(r.error < 0.02 and not r.meaningful for r in records[:2]) and records[2].error is None
    c = model.TINY
    d, h, kv, f = c["hidden_size"], 4 * 32, 2 * 32, c["moe_intermediate_size"]
    attention = d * (h + 2 * kv) + h * d + 2 * 32 + 2 * d
    layers = c["num_hidden_layers"] * (attention + d * 8 + 2 * 3 * d * f)  # one token goes to 2 of 8 experts
    cache = 2 * c["num_hidden_layers"] * 8 * kv
    assert records[0].parameters["bytes"] == 2 * (layers + d + d * c["vocab_size"] + cache)


def test_generation_over_two_devices_reads_half_of_the_experts_on_each(monkeypatch):
    monkeypatch.setattr(model, "WEIGHTS", model.WEIGHTS[2:])
    with jax.numpy_dtype_promotion("standard"):
        records = model.run(True, NoProgress(), devices=jax.devices()[:2])
    names = [r.name for r in records]
    assert names[2:] == ["prefill, FP8-128 weights and activations"]
    assert all(r.case.endswith(", R=2") and r.parameters["R"] == 2 and r.value for r in records)
    one, four = (r.parameters["bytes"] for r in records[:2])
    c = model.TINY
    expert = 3 * c["hidden_size"] * c["moe_intermediate_size"]  # bytes; and a few scales
    more = layer_case.touched_experts(8, 2, 4) - layer_case.touched_experts(8, 2, 1)
    assert 1 < (four - one) / (c["num_hidden_layers"] * more / 2 * expert) < 1.2  # the caches make the difference


def test_a_layer_that_fails_costs_no_other_figure(monkeypatch):
    class Watch(NoProgress):
        seen = []

        def record(self, record):
            self.seen.append(record.name)

    def measure(case, *args, **options):
        if case.variant.name == "BF16":
            raise RuntimeError("too hot")
        return layer_case.record("tiny", case.config, case.tokens, case.variant.name, 1.0, 1, 0.0)

    monkeypatch.setattr(layer.Case, "measure", measure)
    with pytest.raises(RuntimeError, match="BF16 tiny T=1: RuntimeError: too hot"):
        layer.run(True, Watch(), only=re.compile("^(BF16|MXFP8 weights) .*T=1$"))
    assert Watch.seen == ["MXFP8 weights"]


def test_only_some_steps_of_a_model_can_be_asked_for():
    with jax.numpy_dtype_promotion("standard"):
        records = model.run(True, NoProgress(), devices=jax.devices()[:1], only=re.compile("NVFP4.*batch 4"))
    assert [(r.parameters["what"], r.parameters["weights"], r.parameters["B"]) for r in records] == [
        ("decode", "NVFP4", 4)
    ]
    assert records[0].error < 0.02


def test_kernels_are_matched_with_the_scopes_of_their_operations():
    hlo = '  %loop_fusion.3 = f32[2]{0} fusion(%p), kind=kLoop, metadata={op_name="jit(f)/router/add"}'
    assert _scopes(hlo) == {"loop_fusion_3": "jit(f)/router/add"}
    assert profile(lambda x: x + 1, jnp.ones(3)) is None  # there is no GPU here


def negated(x):
    return {"y": -x}, x + 1


def test_what_another_process_lowers_is_the_same_function():
    with lowering.processes() as pool:
        data = pool.submit(lowering.exported, negated, jax.ShapeDtypeStruct((3,), jnp.float32)).result()
    x = jnp.arange(3, dtype=jnp.float32)
    y, more = jax.jit(lowering.imported(data))(x)
    np.testing.assert_array_equal(y, -x)
    np.testing.assert_array_equal(more, x + 1)


def test_a_lowered_layer_of_two_ranks_gives_the_same_bytes():
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:2]), (layer_case.AXIS,))
    config, wire = layer.SMOKE_SHAPES["tiny"], layer.WIRES[1]
    here, there = (layer_case.Case.make("tiny", config, 8, wire, mesh=mesh, smoke=True) for _ in range(2))
    here.lower().compile()
    there.lower(there.exported()).compile()
    params = here.placed(layer_case.random_params(jax.random.key(0), config))
    (_, a), (_, b) = (c.compiled(tuple(c.inputs()), ((None, params),) * layer_case.SETS) for c in (here, there))
    np.testing.assert_array_equal(a[-1].view(jnp.uint16), b[-1].view(jnp.uint16))
