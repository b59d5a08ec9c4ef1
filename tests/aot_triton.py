"""Compiles the Triton kernels to machine code without a GPU; run as `python aot_triton.py matmul|quantize 80 89 90`.

Prints one JSON line {"CASE": [registers, spilled bytes, bytes of shared memory], ...}.
"""

import json
import os
import pathlib
import re
import subprocess
import sys
import tempfile

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from pallas_kernels.grouped_matmul import triton_sm80
from pallas_kernels.quantize import FORMATS
from pallas_kernels.quantize import triton_sm80 as triton_quantize

# element, scale, block, global scale, bits
WEIGHTS = {
    "bf16": ("half", "none", 1, "none", 16),
    "mxfp8": ("e4m3", "e8m0", 32, "none", 8),
    "mxfp4": ("e2m1", "e8m0", 32, "none", 4),
    "nvfp4": ("e2m1", "e4m3", 16, "group", 4),
    "nvfp4 columns": ("e2m1", "e4m3", 16, "column", 4),
    "fp8_128x128": ("e4m3", "f32", 128, "none", 8),
}
SHAPES = {(768, 2048): (8, 32, 64, 256), (1536, 2880): (8, 256)}  # (N, K): rows of a group


def compiled(kernel, pointers, constants, capability, **options):
    """[registers, spilled bytes, shared memory] of a kernel whose pointer arguments have these types."""
    source = ASTSource(
        fn=kernel,
        signature={name: pointers.get(name, "constexpr") for name in kernel.arg_names},
        constexprs=constants,
        attrs={(i,): [["tt.divisibility", 16]] for i, name in enumerate(kernel.arg_names) if name in pointers},
    )
    result = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)
    ptx = result.asm["ptx"]
    assembler = "ptxas-blackwell" if capability >= 100 else "ptxas"
    assembler = pathlib.Path(triton.__file__).parent / "backends/nvidia/bin" / assembler
    with tempfile.NamedTemporaryFile("w", suffix=".ptx") as file:
        file.write(ptx)
        file.flush()
        arch = re.search(r"\.target (\w+)", ptx).group(1)
        command = [str(assembler), "-v", f"-arch={arch}", file.name, "-o", os.devnull]
        report = subprocess.run(command, capture_output=True, text=True, check=True).stderr
    registers = max(int(n) for n in re.findall(r"Used (\d+) registers", report))
    spilled = sum(int(n) for n in re.findall(r"(\d+) bytes spill", report))
    return [registers, spilled, result.metadata.shared]


def rows_kernel(weights, rows, n, k, transposed, capability):
    element, scale, block, factor, bits = WEIGHTS[weights]
    c = triton_sm80.choose_config(rows, bits, capability)
    pointers = dict.fromkeys(("weight", "first", "end"), "*i32")
    pointers |= dict(x="*bf16", out="*bf16", w="*bf16" if bits == 16 else "*u8")
    pointers |= dict(scales={"none": "*i32", "f32": "*fp32"}.get(scale, "*u8"))
    pointers |= dict(factors="*i32" if factor == "none" else "*fp32")
    scale_row = -(-k // block)
    constants = dict(
        N=n,
        K=k,
        ROW=k // 2 if bits == 4 else k,
        SCALE_ROW=scale_row,
        SCALES=scale_row * (n // 128 if scale == "f32" else n),
        TRANSPOSED=transposed,
        ELEMENT=element,
        SCALE=scale,
        BLOCK=block,
        FACTOR=factor,
        TILES=100,
        BAND=c.band,
        BLOCK_M=c.block_m,
        BLOCK_OUT=c.block_out,
        BLOCK_RED=c.block_red,
    )
    return compiled(
        triton_sm80.rows_kernel, pointers, constants, capability, num_warps=c.num_warps, num_stages=c.num_stages
    )


def drhs_kernel(n, k, capability):
    c = triton_sm80.choose_drhs_config(capability)
    pointers = dict(dy="*bf16", x="*bf16", starts="*i32", ends="*i32", out="*bf16")
    constants = dict(N=n, K=k, BLOCK_M=c.block_m, BLOCK_N=c.block_out, BLOCK_K=c.block_red)
    return compiled(
        triton_sm80.drhs_kernel, pointers, constants, capability, num_warps=c.num_warps, num_stages=c.num_stages
    )


def quantize_kernel(fmt, dtype, capability, columns):
    pointers = dict(x="*bf16" if dtype == "bf16" else "*fp32", encode="*fp32", decode="*fp32", codes="*u8")
    pointers |= dict(shift="*i32" if fmt.scale == "e4m3" else "*fp32", scales="*fp32" if fmt.scale == "f32" else "*u8")
    constants = dict(
        BLOCKS=1024 * 7168 // fmt.block,
        COLUMNS=columns,
        B=fmt.block,
        E2M1=fmt.element == "e2m1",
        SCALE=fmt.scale,
        CEIL=fmt.rule == "ceil",
        POW2=fmt.pow2,
        TILE=triton_quantize.TILE,
    )
    kernel = triton_quantize.quantize_kernel
    return compiled(kernel, pointers, constants, capability, num_warps=4, enable_fp_fusion=False)


def matmul(capability):
    """(label, figures) of every kind of weights, direction and number of rows."""
    for (n, k), sizes in SHAPES.items():
        for weights in WEIGHTS:
            for rows in sizes:
                yield f"{weights} {rows} rows, {n}, {k}", rows_kernel(weights, rows, n, k, False, capability)
                if WEIGHTS[weights][3] != "column":
                    yield f"{weights} dlhs {rows} rows, {n}, {k}", rows_kernel(weights, rows, n, k, True, capability)
        yield f"drhs {n}, {k}", drhs_kernel(n, k, capability)


def quantize(capability):
    for name, fmt in FORMATS.items():
        if fmt.block_rows == 1 and not fmt.four_over_six:
            for dtype in ("bf16", "fp32"):
                columns = 7168 // fmt.block if fmt.global_scale == "token" else 0
                yield f"{name} {dtype}", quantize_kernel(fmt, dtype, capability, columns)


def main(kernels, capabilities):
    with tempfile.TemporaryDirectory() as cache:
        os.environ["TRITON_CACHE_DIR"] = cache  # jax_triton sets it to "", where compile() cannot write
        print(json.dumps({f"sm_{c} {label}": figures for c in capabilities for label, figures in kernels(c)}))


if __name__ == "__main__":
    main({"matmul": matmul, "quantize": quantize}[sys.argv[1]], [int(a) for a in sys.argv[2:]])
