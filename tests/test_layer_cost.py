"""The predicted time of a layer, and what is decided by it."""

import dataclasses
from pathlib import Path

import pytest

from jmoe.backends.engine import GATHERING_CAPACITY
from jmoe.bench.common import read_json
from jmoe.bench.layer import VARIANTS, WIRES
from jmoe.caps import DeviceCaps
from jmoe.cli import main
from jmoe.config import MoEConfig, QuantConfig
from jmoe.policy import cost, decide, explain
from jmoe.policy.layer_cost import layer_seconds
from jmoe.policy.measured import GATHERING

ROOT = Path(__file__).parent.parent
HOPPER = DeviceCaps("gpu", (9, 0), 2, "nvlink", name="NVIDIA H200")
CPU = DeviceCaps("cpu", None, 2, "host")
QWEN = MoEConfig(2048, 768, 128, 8)


def predicted(config=QWEN, tokens=64, ranks=1, caps=HOPPER):
    return layer_seconds(config, tokens=tokens, num_ranks=ranks, caps=caps)


def test_nothing_is_predicted_for_machines_that_were_not_measured():
    assert predicted(caps=CPU) is None and predicted(tokens=0) is None
    assert predicted(caps=dataclasses.replace(HOPPER, kernels=False)) is None
    assert explain(QWEN, num_ranks=2, tokens=64, caps=CPU).chosen.layer is None


def test_more_tokens_take_longer_and_smaller_weights_less_where_they_count():
    times = [predicted(tokens=t).total for t in (1, 16, 256, 4096, 65536)]
    assert times == sorted(times) and times[-1] > 10 * times[-2]
    nvfp4 = dataclasses.replace(QWEN, quant=QuantConfig(weights="nvfp4"))
    assert predicted(nvfp4).total < 0.7 * predicted().total
    assert predicted(nvfp4, tokens=8192).total > predicted(tokens=8192).total  # no FP4 matrix units on Hopper
    assert predicted(tokens=64, ranks=2).matmuls < predicted(tokens=64).matmuls  # half of the experts to read


def test_a_handful_of_tokens_goes_through_kernels_of_its_own():
    def seconds(tokens, **quant):
        return predicted(dataclasses.replace(QWEN, quant=QuantConfig(**quant)), tokens=tokens)

    one = seconds(1, weights="nvfp4")
    assert one.permute == one.sums == 0 and one.total < 0.7 * seconds(1).total
    assert seconds(5).permute > 0  # too many pairs of a token and an expert
    assert seconds(1, weights="fp8_128x128", activations="fp8_128").permute > 0  # the kernels take rows of BF16
    # Qwen3-30B-A3B with four tokens, as it was on an H200 beside the older way
    for weights, measured in ((None, 79.2e-6), ("nvfp4", 40.3e-6), ("mxfp8", 52.7e-6), ("mxfp4", 36.5e-6)):
        assert 0.75 <= seconds(4, weights=weights).total / measured <= 1.25, weights


def test_the_stages_add_up_and_the_exchange_is_that_of_the_backend():
    e = explain(QWEN, num_ranks=2, tokens=8192, caps=HOPPER).chosen
    assert e.layer.exchange == e.dispatch_seconds + e.combine_seconds > 0
    stages = (e.layer.router, e.layer.permute, e.layer.matmuls, e.layer.sums, e.layer.exchange)
    assert e.layer.total == pytest.approx(sum(stages))
    text = str(explain(QWEN, num_ranks=2, tokens=8192, caps=HOPPER))
    assert "should take" in text and "moving rows" in text and "layer" in text


def test_a_combine_that_takes_the_sums_takes_as_long_as_was_measured():
    for hidden, seconds, apart in GATHERING:
        config = dataclasses.replace(QWEN, hidden_size=hidden)
        joined = explain(config, num_ranks=2, tokens=8192, caps=HOPPER).chosen
        assert joined.layer.sums == 0 and "takes the weighted sums" in " ".join(joined.decision.notes)
        assert 0.85 <= joined.combine_seconds / seconds <= 1.15, hidden
        sums = layer_seconds(config, tokens=8192, num_ranks=2, caps=HOPPER).sums
        quantised = dataclasses.replace(config, quant=QuantConfig(combine_wire="mxfp8"))
        assert explain(quantised, num_ranks=2, tokens=8192, caps=HOPPER).chosen.layer.sums == sums > 0
        moving = cost.exchange_seconds(joined.decision, joined.combine_bytes, HOPPER, back=True)
        assert 0.75 <= (moving + sums) / apart <= 1.25, hidden
        assert max(moving, sums) < joined.combine_seconds < moving + sums
    few = explain(QWEN, num_ranks=2, tokens=GATHERING_CAPACITY - 1, caps=HOPPER).chosen.layer
    assert few.sums > 0


def test_advice_names_weights_that_should_be_faster():
    few, many = (explain(QWEN, tokens=t, caps=HOPPER).advice for t in (64, 8192))
    assert any("weights='nvfp4'" in a for a in few) and not any("nvfp4" in a for a in many)
    assert any("activations='fp8_128'" in a for a in many)


def test_the_command_line_explains_what_quant_auto_chose(capsys):
    machine = ["--machine", "h200", "--devices", "2", "--tokens", "8192"]
    assert main(["explain", "qwen3-30b-a3b", "--quant", "auto", *machine]) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert "travels mxfp8" in said and "a dispatch of 8192 tokens should take" in said and "should take" in said


def test_quant_auto_sends_what_should_be_faster_and_says_why():
    config = MoEConfig(7168, 2048, 64, 8, quant="auto")
    assert config.quant == QuantConfig(wire="fastest")
    few, many = (decide(config, num_ranks=2, tokens=t, caps=HOPPER) for t in (1, 8192))
    assert few.wire == "bfloat16" and many.wire == "mxfp8" and many.quant_dtype is None
    assert "8192 tokens should take" in many.notes[-1]
    assert decide(config, num_ranks=2, tokens=8192, caps=CPU).wire == "bfloat16"
    assert decide(config, num_ranks=1, tokens=8192, caps=HOPPER).wire == "bfloat16"
    odd = dataclasses.replace(config, hidden_size=7152)  # no multiple of 32
    assert decide(odd, num_ranks=2, tokens=8192, caps=HOPPER).wire == "bfloat16"
    asked = MoEConfig(7168, 2048, 64, 8, quant=QuantConfig(activations="nvfp4_token", wire="fastest"))
    assert decide(asked, num_ranks=2, tokens=8192, caps=HOPPER).wire == "nvfp4_token"


def measured():
    """(sizes, quantisation, seconds) of the layers in docs/figures."""
    quants = {v.name: v.quant for v in VARIANTS + WIRES}
    for path in sorted((ROOT / "docs" / "figures").glob("layer*.json")):
        for r in read_json(path)[1]:
            if r.name in quants:
                yield r.parameters, quants[r.name], r.seconds


def test_predictions_are_within_a_quarter_of_what_was_measured():
    cases = list(measured())
    assert len(cases) >= 11
    for sizes, quant, seconds in cases:
        config = MoEConfig(sizes["D"], sizes["F"], sizes["E"], sizes["K"], quant=quant)
        layer = explain(config, num_ranks=sizes["R"], tokens=sizes["T"], caps=HOPPER).chosen.layer
        assert 0.75 <= layer.total / seconds <= 1.25, (dict(sizes), quant, layer)
