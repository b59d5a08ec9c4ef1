"""The Triton grouped matmul without a GPU: when it is chosen, its numerics in Triton's interpreter, its machine code.

What needs Triton runs where triton and jax_triton are installed (the extra `triton`), and is skipped elsewhere.
"""

import json
import os
import pathlib
import subprocess
import sys

import jax.numpy as jnp
import pytest

from pallas_kernels.grouped_matmul import Problem, api, grouped_matmul, mosaic_entry, triton_entry

HERE = pathlib.Path(__file__)
needs_triton = pytest.mark.skipif(triton_entry.missing() is not None, reason=str(triton_entry.missing()))
# Bytes of shared memory that a block may have.
SHARED = {80: 163 * 1024, 86: 99 * 1024, 89: 99 * 1024, 90: 227 * 1024, 100: 227 * 1024}


def run(script, *arguments):
    """The JSON object that a script beside this file prints last."""
    done = subprocess.run(
        [sys.executable, str(HERE.with_name(script)), *arguments],
        capture_output=True,
        text=True,
        timeout=900,
        cwd=HERE.parent.parent,
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(HERE.parent.parent), os.environ.get("PYTHONPATH", "")])},
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.strip().splitlines()[-1])


def problem(x="bfloat16", w="bfloat16", op="forward", capability="8.0", platform="gpu", out="bfloat16", n=100, k=72):
    return Problem(op, 256, n, k, 8, x, w, out, platform, capability)


@pytest.fixture
def installed(monkeypatch):
    """Triton is there."""
    monkeypatch.setattr(triton_entry, "missing", lambda: None)


@pytest.mark.parametrize("capability", ["8.0", "8.6", "8.9"])
@pytest.mark.parametrize("w", ["bfloat16", "float16", "mxfp8", "mxfp4", "nvfp4", "fp8_128x128"])
def test_it_is_the_choice_on_ampere_and_ada(installed, capability, w):
    assert api.choose(problem(w=w, capability=capability)).name == "triton"
    assert api.choose(problem(w=w, capability=capability, op="dlhs")).name == "triton"
    if "float" in w:
        assert api.choose(problem(w=w, capability=capability, op="drhs")).name == "triton"


def test_where_a_mosaic_kernel_can_run_it_stays_behind(installed, monkeypatch):
    monkeypatch.setattr(mosaic_entry.compat, "KERNELS_SUPPORTED", True)
    assert api.choose(problem(capability="9.0", n=128, k=128)).name == "mosaic_sm90"
    assert api.choose(problem(capability="9.0", n=128, k=128), "triton").name == "triton"


def test_it_is_the_choice_on_other_gpus_where_the_mosaic_kernels_refuse(installed, monkeypatch):
    assert api.choose(problem(capability="9.0")).name == "triton"  # N = 100 is no multiple of 64
    monkeypatch.setattr(mosaic_entry.compat, "KERNELS_SUPPORTED", False)
    assert api.choose(problem(capability="9.0", n=128, k=128)).name == "triton"
    assert api.choose(problem(capability="10.0", n=128, k=128)).name == "triton"


def test_it_says_why_it_cannot(installed):
    for why, asked in {
        "this is cpu": problem(platform="cpu", capability=None),
        "compute capability 8.0, this is 7.5": problem(capability="7.5"),
        "x is float32": problem(x="float32"),
        "w is float32": problem(w="float32"),
        "bfloat16 with quantised weights": problem(x="float16", w="mxfp8"),
        "fp8_128x128 weights": problem(w="fp8_128"),
        "out_dtype=float8_e4m3fn": problem(out="float8_e4m3fn"),
    }.items():
        assert why in triton_entry.why_not(asked), why
        assert api.choose(asked).name == "portable"


def test_where_it_is_not_installed_the_message_says_what_to_install(monkeypatch):
    reason = "jax_triton cannot be imported: pip install 'jmoe[triton]'"
    monkeypatch.setattr(triton_entry, "missing", lambda: reason)
    assert api.choose(problem()).name == "portable"
    with pytest.raises(ValueError, match=r"jax_triton cannot be imported: pip install 'jmoe\[triton\]'"):
        api.choose(problem(), "triton")


def test_on_a_cpu_it_refuses_before_anything_of_triton_is_imported():
    with pytest.raises(ValueError, match="the Triton kernels are for NVIDIA GPUs, this is cpu"):
        grouped_matmul(jnp.ones((8, 4)), jnp.ones((2, 3, 4)), jnp.asarray([4, 4]), implementation="triton")


@needs_triton
@pytest.mark.slow
def test_the_interpreter_agrees_with_float32_for_ragged_sizes():
    errors = run("triton_interpreter.py", "matmul")
    assert len(errors) == 21
    for name, error in errors.items():
        assert error < 4e-3, name


@needs_triton
def test_the_inline_assembly_turns_every_code_into_its_value():
    assert run("triton_interpreter.py", "assembly") == {"e4m3": [0, 1016], "e2m1": [0, 2048]}


@needs_triton
@pytest.mark.slow
@pytest.mark.parametrize("capability", SHARED)
def test_it_compiles_to_machine_code_without_spills_and_fits_the_shared_memory(capability):
    report = run("aot_triton.py", "matmul", str(capability))
    assert len(report) == 68
    for name, (registers, spilled, shared) in report.items():
        assert 16 <= registers <= 255 and spilled == 0 and shared <= SHARED[capability], (
            name,
            registers,
            spilled,
            shared,
        )
