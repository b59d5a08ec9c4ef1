"""The Triton quantisation kernel without a GPU: when it is chosen, its bytes in the interpreter, its machine code."""

import jax.numpy as jnp
import pytest
from test_grouped_matmul_triton import SHARED, needs_triton, run

from pallas_kernels import quantize as q
from pallas_kernels.quantize import api, get_format


@pytest.fixture
def ampere(monkeypatch):
    monkeypatch.setattr(api, "_gpu_capability", lambda: 8.0)
    monkeypatch.setattr(api, "missing", lambda: None)


@pytest.mark.parametrize("fmt", ["mxfp8", "mxfp4", "fp8_128", "fp8_128_ue8m0", "nvfp4", "nvfp4_token"])
def test_it_serves_whole_blocks_of_every_plain_format_on_ampere(ampere, fmt):
    assert api.triton_obstacle((3, 5, 256), get_format(fmt), 256) is None


def test_it_says_why_it_cannot(ampere, monkeypatch):
    for why, fmt, shape, columns in (
        ("does not quantise to 'fp8_128x128'", "fp8_128x128", (256, 256), 256),
        ("does not quantise to 'nvfp4_4o6'", "nvfp4_4o6", (256, 256), 256),
        ("whole blocks of 32", "mxfp8", (256, 48), 48),
        ("no padding, not (256, 32) padded to 128", "mxfp8", (256, 32), 128),
        ("whole blocks", "mxfp8", (0, 32), 32),
    ):
        assert why in api.triton_obstacle(shape, get_format(fmt), columns), why
    monkeypatch.setattr(api, "_gpu_capability", lambda: 7.5)
    assert "compute capability 8.0" in api.triton_obstacle((256, 32), get_format("mxfp8"), 32)
    with pytest.raises(ValueError, match="'triton' cannot do this: it needs a GPU of compute capability 8.0"):
        q.quantize(jnp.ones((4, 32)), "mxfp8", implementation="triton")
    with pytest.raises(ValueError, match="'triton' cannot do this: it only quantises"):
        q.dequantize(q.quantize(jnp.ones((4, 32)), "mxfp8"), implementation="triton")


@needs_triton
@pytest.mark.slow
def test_the_interpreter_gives_the_bytes_of_the_reference_for_hostile_values():
    report = run("triton_interpreter.py", "quantize")
    assert len(report) == 20
    for name, (differ, seen) in report.items():
        assert differ == 0 and seen >= 16, (name, differ, seen)


@needs_triton
@pytest.mark.slow
def test_it_compiles_to_machine_code_without_spills():
    report = run("aot_triton.py", "quantize", *map(str, SHARED))
    assert len(report) == 16 * len(SHARED)
    for name, (registers, spilled, _) in report.items():
        assert 16 <= registers <= 128 and spilled == 0, (name, registers, spilled)
