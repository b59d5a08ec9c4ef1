"""The support matrix says what the layer does: refusals are refusals, and "compiled" has been compiled."""

from pathlib import Path

import pytest
from aot_report import aot_report

from jmoe import MoEConfig, QuantConfig, build_moe, compat, support
from jmoe.policy.table import FAMILIES, family

ROOT = Path(__file__).parent.parent
CELLS = [(b, f) for b in support.backends() for f in support.ACTIVATIONS]


@pytest.mark.parametrize("backend, fmt", CELLS)
def test_a_cell_says_what_building_the_layer_does(backend, fmt):
    config = MoEConfig(1024, 512, 16, 4, quant=QuantConfig(activations=fmt))
    for name, caps in support.ARCHITECTURES.items():
        cell = support.exchange(backend, fmt, name)
        if cell.status == "refused":
            with pytest.raises(ValueError, match="Choose one of those"):
                support.decide(config, backend=backend, num_ranks=2, tokens=64, caps=caps)
            assert "Choose one of those" in cell.why
        else:
            assert cell.status == ("run" if name in ("CPU", "Hopper") else "compiled")
            assert cell.why in ("sender", "kernel", "receiver", "experts", "nobody")
    if backend == "local":
        layer = build_moe(config, backend="local")
        assert layer.decision(8).where == cell.why


def test_columns_stand_for_every_family_and_kernels_for_gpus_only():
    assert [family(f) for f in support.ACTIVATIONS if f] == list(FAMILIES)
    for backend, fmt in CELLS:
        assert support.exchange(backend, fmt, "CPU").how in ("", "XLA")
    assert support.exchange("nvlink_one_sided", None, "Ada").how == "XLA"  # no access to each other's memory
    assert support.exchange("nvlink_one_sided", None, "Hopper").how == "kernel"


@pytest.mark.skipif(not compat.KERNELS_SUPPORTED, reason="the kernels' own reasons ask for JAX >= 0.11")
def test_what_multiplies_is_what_the_kernels_choose_for_themselves():
    assert {support.matmul(None, w, "CPU").how for w in support.WEIGHTS} == {"XLA"}
    assert {support.matmul(None, w, "Hopper").how for w in support.WEIGHTS} == {"mosaic_sm90"}
    for name in ("Ampere", "Ada"):
        assert "triton" in support.matmul(None, None, name).how
        assert support.quantising(name).how == "triton"
    assert "mosaic_sm100 by name" in support.matmul(None, None, "Blackwell").how
    assert support.quantising("CPU").how == "XLA" and support.quantising("Blackwell").how == "mosaic_sm90"


@pytest.mark.aot
@pytest.mark.slow
@pytest.mark.skipif(not compat.KERNELS_SUPPORTED, reason="ahead-of-time compilation is tested with JAX >= 0.11")
@pytest.mark.parametrize("arch, ranks", [("sm_80", 1), ("sm_89", 2), ("sm_100", 2)])
def test_what_is_called_compiled_compiles(arch, ranks):
    report = aot_report("aot_layer.py", arch, ranks)
    assert len(report) == 5
    kernels = arch in ("sm_90", "sm_100")
    for layer, (transport, *calls) in report.items():
        assert ("mosaic_gpu_v2" in calls) == kernels, layer
        assert transport == ("none" if ranks == 1 else "kernel" if kernels else "xla")
