"""The input of a matmul, quantised exactly once or not at all.

Letters: N rows, M places in expert order, D columns, E experts held here.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.quantize import QTensor, dequantize, get_format, quantize

from ..config import MoEConfig
from .table import ExpertsSpec
from .weights import decodes_alike


def check_input(x: jax.Array | QTensor, config: MoEConfig, spec: ExpertsSpec, *, quantize_input: bool) -> None:
    """Raise ValueError unless x ends up quantised once (config.quant.activations) or never (None)."""
    wanted = config.quant.activations
    arrived = x.format.name if isinstance(x, QTensor) else None
    if x.shape[-1] != config.hidden_size:
        raise ValueError(
            f"The rows have {x.shape[-1]} columns, but hidden_size={config.hidden_size}; pad or slice them to that."
        )
    if wanted is None:
        if quantize_input:
            raise ValueError(
                "quantize_input=True, but config.quant.activations is None; name the format there, or pass False."
            )
        return  # a quantised wire for a layer that does not quantise: the rows are dequantised as they are read
    get_format(wanted)
    if arrived is not None and spec.expects_unquantized_inputs:
        raise ValueError(
            f"experts={spec.name!r} expect unquantised input and quantise it to {wanted!r} themselves, but {arrived!r} "
            "arrived; defer the quantisation, or use experts='grouped'."
        )
    if arrived is None and not quantize_input:
        raise ValueError(
            f"config.quant.activations={wanted!r}, but the rows arrived unquantised with quantize_input=False: nobody "
            "would quantise them; pass quantize_input=True, or set config.quant.activations=None."
        )
    if arrived is None:
        return
    alike = decodes_alike(arrived, wanted)
    if alike and quantize_input:
        raise ValueError(
            f"The rows arrived as {arrived!r} and quantize_input=True would quantise them to {wanted!r} a second time; "
            "pass quantize_input=False."
        )
    if not alike and not quantize_input:
        raise ValueError(
            f"The rows arrived as {arrived!r}, but these experts take {wanted!r}, which is another contract "
            f"(global scale: {_scope(arrived)} against {_scope(wanted)}); send {wanted!r}, or pass quantize_input=True "
            "to dequantise and quantise again."
        )


def _scope(fmt) -> str:
    scope = get_format(fmt).global_scale
    return {None: "none", "tensor": "one per tensor", "token": "one per token"}[scope]


def quantize_rows(
    x: jax.Array | QTensor,
    fmt: str,
    *,
    valid: jax.Array | None = None,
    num_valid_rows: jax.Array | None = None,
    scale: jax.Array | None = None,
    alignment: int = 0,
    dtype=jnp.bfloat16,
) -> QTensor:
    """x [N, D] quantised row by row. A QTensor is dequantised to `dtype` first.

    valid: bool [N]; other rows (garbage, perhaps NaN) do not count in the maximum of a per-tensor format.
    num_valid_rows: int32; rows from there on need not be quantised. scale: static decode scale, [] or [N].
    """
    spec = get_format(fmt)
    if isinstance(x, QTensor):
        x = dequantize(x, dtype)
    if valid is not None and spec.global_scale == "tensor" and scale is None:
        x = jnp.where(valid[:, None], x, jnp.zeros((), x.dtype))
    return quantize(
        lax.stop_gradient(x),
        spec,
        global_scale=None if scale is None or spec.global_scale != "tensor" else scale,
        alignment=alignment if spec.scale == "e8m0" else 0,
        num_valid_rows=num_valid_rows,
    )
