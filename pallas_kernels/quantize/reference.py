"""Quantising and dequantising in plain jax.numpy: the definition that every kernel equals bit for bit.

Letters: K values of a row, B block size, C = ceil(K/B) block scales of a row. Rules (sources in formats.py):

* MX: scale byte from the integer bits of the block maximum, data = round(x * 2^(127-byte)). A block with a NaN has byte
  255; infinity gives byte 254 and saturates (rule "ceil") or byte 255 (rule "floor"); a zero block has byte 0.
* FP8 128: s = clip(amax, 1e-10, FLT_MAX)/448, data = round(x * (1/s)); a block with a NaN has scale NaN.
* NVFP4: S = 6*M/amax (M = 448, 4-over-6: `e4m3_max`), at most 2^116 so that no product is subnormal; 1 for an amax of
  0. s = e4m3(amax_b * (S * fl(1/6))); data = round(x * 1/(s * (1/S))); g = 1/S. These orders are TransformerEngine's
  and FlashInfer's exact modes. A block with NaN or infinity has scale NaN and counts as zero in the global maximum, so
  that it costs only itself. A zero row has scales and data 0, and with a scale per token g = 0.
  A block that is too small for any E4M3 scale has s = 0 and decodes to zeros.
* Data in a block whose scale is NaN: 0x7F (E4M3) or 0 (E2M1).
"""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
from jax import lax

from . import exact
from .formats import BlockFormat, FourOverSix, get_format
from .qtensor import QTensor
from .swizzle import swizzle_scales, unswizzle_scales

FP8_EPS = 1e-10  # smallest block maximum of the FP8 128 formats, as in vLLM and SGLang
MAX_ENCODE = 2.0**116  # largest NVFP4 encode scale S
SATURATE_EXPONENT = 127  # 2^127 stands for 1/0 where an NVFP4 block scale is 0: every ordinary value becomes 6
_FLT_MAX_BITS = 0x7F7FFFFF


def e8m0_scale(amax_bits: jax.Array, fmt: BlockFormat) -> jax.Array:
    """int32 E8M0 byte of a block whose largest magnitude has these float32 bits."""
    top_exponent, top_fraction = (
        (8, 0x600000) if fmt.element == "e4m3" else (2, 0x400000)
    )  # 448 = 1.75*2^8, 6 = 1.5*2^2
    exponent = (amax_bits >> 23).astype(jnp.int32)
    if fmt.rule == "ceil":
        exponent += ((amax_bits & jnp.uint32(0x7FFFFF)) > top_fraction).astype(jnp.int32)
    byte = jnp.clip(exponent - top_exponent, 0, 254)
    special = jnp.where(amax_bits == exact.INF, 254 if fmt.rule == "ceil" else 255, 255)
    return jnp.where(amax_bits >= exact.INF, special, byte).astype(jnp.int32)


def _codes(y: jax.Array, fmt: BlockFormat, nan_block: jax.Array) -> jax.Array:
    """uint8 codes [..., C, B] of scaled values; nan_block [..., C]."""
    code = exact.e4m3_code(y) if fmt.element == "e4m3" else exact.e2m1_code(y)
    return jnp.where(nan_block[..., None], jnp.uint8(0x7F if fmt.element == "e4m3" else 0), code)


def _quantize_mx(bits, amax, fmt):
    byte = e8m0_scale(amax, fmt)
    y = exact.scale_pow2(bits, (127 - byte)[..., None])
    return _codes(y, fmt, byte == 255), byte.astype(jnp.uint8)


def fp8_scale(amax: jax.Array, fmt: BlockFormat) -> tuple[jax.Array, jax.Array]:
    """(scales, reciprocals) of FP8 128 blocks whose largest magnitudes have these float32 bits; NaN for NaN."""
    low = exact.f32_bits(jnp.float32(FP8_EPS))
    s = exact.exact_div(
        exact.from_bits(jnp.clip(amax, low, jnp.uint32(_FLT_MAX_BITS))), jnp.full_like(amax, 448, "float32")
    )
    if fmt.pow2:
        s = exact.from_bits((exact.f32_bits(s) + jnp.uint32(0x7FFFFF)) & jnp.uint32(exact.INF))
    inverse, nan = exact.exact_div(jnp.ones_like(s), s), amax > exact.INF
    return jnp.where(nan, jnp.float32(jnp.nan), s), jnp.where(nan, jnp.float32(jnp.nan), inverse)


def _quantize_fp8(bits, amax, fmt):
    s, inverse = fp8_scale(amax, fmt)
    y = exact.from_bits(bits) * inverse[..., None]
    return _codes(y, fmt, amax > exact.INF), s


def encode_scale(amax_bits: jax.Array, e4m3_max: int) -> jax.Array:
    """NVFP4's global encode scale S of a row or tensor with this (finite) maximum."""
    top = 6 * e4m3_max
    smallest = exact.f32_bits(jnp.float32(top / MAX_ENCODE))
    amax = exact.from_bits(jnp.maximum(amax_bits, smallest))
    s = jnp.minimum(exact.exact_div(jnp.full_like(amax, top), amax), jnp.float32(MAX_ENCODE))
    return jnp.where(amax_bits == 0, jnp.float32(1), s)


def _nv_candidate(x, saturated, s_code, decode):
    """Codes of blocks x [..., C, B] with block scales s_code [..., C] (where 0: of `saturated`), decode [..., 1]."""
    s = exact.e4m3_value(s_code)
    zero = s_code == 0
    encode = exact.exact_div(jnp.ones_like(s), jnp.where(zero, jnp.float32(1), s * decode))
    return exact.e2m1_code(jnp.where(zero[..., None], saturated, x * encode[..., None]))


def _nv_error(x, code, s_code, amax, rule: FourOverSix):
    """Sum over each block, in element order, of |q*s*amax/(6M) - x| or its square; amax [..., 1]."""
    top = jnp.full(s_code.shape, 6 * rule.e4m3_max, jnp.float32)
    s = exact.e4m3_value(s_code)
    # q is 1 or 1.5 times a power of two, so two quotients stand for all values of q. The barrier keeps XLA from moving
    # the constant to the end of the product.
    one, three_halves = exact.exact_div(
        jnp.stack([s, lax.optimization_barrier(jnp.float32(1.5) * s)]) * amax[None], jnp.stack([top, top])
    )
    kind = (code & 7).astype(jnp.int32)
    odd = (kind >= 3) & (kind % 2 == 1)
    factor = jnp.where(kind == 0, jnp.float32(0), exact.pow2(jnp.where(odd, kind - 3, kind - 2) // 2))
    factor = jnp.where(kind == 1, jnp.float32(0.5), factor)
    value = jnp.where(odd, three_halves[..., None], one[..., None]) * factor
    d = jnp.where(code >= 8, -value, value) - x
    if rule.error == "mae":
        terms = jnp.abs(d)
    else:  # the select keeps the square from being contracted with the sum
        terms = jnp.where(exact.magnitude(exact.f32_bits(d)) < exact.INF, d * d, jnp.float32(jnp.inf))
    total = terms[..., 0]
    for i in range(1, terms.shape[-1]):
        total = total + terms[..., i]
    return total


def _quantize_nv(bits, amax, fmt, global_scale, amax_axes):
    """bits [..., C, B], amax [..., C]; global_scale None or [..., 1]. Returns codes, scales, decode scale [..., 1]."""
    nan = amax >= exact.INF
    if global_scale is None:
        amax_g = jnp.max(jnp.where(nan, jnp.uint32(0), amax), axis=amax_axes, keepdims=True, initial=0)
        s_g = encode_scale(amax_g, fmt.e4m3_max)
        g = exact.exact_div(jnp.ones_like(s_g), s_g)
        stored = jnp.where(amax_g == 0, jnp.float32(0), g) if fmt.global_scale == "token" else g
    else:
        stored = global_scale
        g = jnp.maximum(global_scale, jnp.float32(1 / MAX_ENCODE))
        g = jnp.where(global_scale == 0, jnp.float32(1), g)
        s_g = exact.exact_div(jnp.ones_like(g), g)
        amax_g = exact.f32_bits(jnp.float32(6 * fmt.e4m3_max) * g)
    # Move S to [2^8, 2^9) and x with it: the arithmetic is the same and stays far from subnormals and overflow.
    shift = (exact.f32_bits(s_g) >> 23).astype(jnp.int32) - (127 + 8)
    s_g, g = exact.scale_pow2(exact.f32_bits(s_g), -shift), exact.scale_pow2(exact.f32_bits(g), shift)
    x = exact.scale_pow2(bits, shift[..., None])
    saturated = exact.scale_pow2(bits, jnp.full_like(shift[..., None], SATURATE_EXPONENT))
    amax_x = exact.scale_pow2(jnp.where(nan, jnp.uint32(0), amax), shift)
    top = jnp.float32(448)
    if fmt.four_over_six is None:
        s_code = exact.e4m3_code(jnp.minimum(amax_x * lax.optimization_barrier(s_g * jnp.float32(1 / 6)), top))
        code = _nv_candidate(x, saturated, s_code, g)
    else:
        amax_g = jnp.maximum(amax_g, exact.f32_bits(jnp.float32(6 * fmt.e4m3_max / MAX_ENCODE)))  # what S stands for
        amax_g = exact.scale_pow2(amax_g, shift)
        amax_g = jnp.where(amax_g < 2.0**-60, jnp.float32(0), amax_g)
        amax_x = jnp.where(amax_x < 2.0**-60, jnp.float32(0), jnp.minimum(amax_x, jnp.float32(2.0**60)))
        base = exact.exact_div(amax_x, jnp.full_like(amax_x, 6)) * s_g
        s_both = exact.e4m3_code(jnp.minimum(jnp.stack([base, base * jnp.float32(1.5)]), top))  # map to 6, map to 4
        c_both = _nv_candidate(x[None], saturated[None], s_both, g[None])
        error = _nv_error(x[None], c_both, s_both, amax_g[None], fmt.four_over_six)
        four = error[1] < error[0]
        s_code = jnp.where(four, s_both[1], s_both[0])
        code = jnp.where(four[..., None], c_both[1], c_both[0])
    return jnp.where(nan[..., None], jnp.uint8(0), code), jnp.where(nan, jnp.uint8(0x7F), s_code), stored


def padded_size(k: int, fmt: BlockFormat, alignment: int) -> int:
    """k rounded up to `alignment`, which must be 0 (k as it is) or a multiple of the block. ValueError otherwise."""
    if alignment < 0 or alignment % fmt.block:
        raise ValueError(
            f"alignment={alignment} for {fmt.name!r}: it pads the last axis and must be 0 or a multiple of the block "
            f"size {fmt.block}."
        )
    k_padded = -(-k // alignment) * alignment if alignment else k
    if fmt.element == "e2m1" and k_padded % 2:
        raise ValueError(
            f"{fmt.name!r} packs two values in a byte and cannot hold an odd number of columns ({k_padded}); "
            f"pass alignment={fmt.block}."
        )
    return k_padded


def check_quantize(x, fmt: BlockFormat, global_scale, layout) -> None:
    """Raise ValueError for arguments that `quantize` does not take."""
    if not hasattr(x, "dtype"):
        raise ValueError(f"quantize takes an array, got a {type(x).__name__}; jnp.asarray makes one of it.")
    if x.dtype not in (jnp.bfloat16, jnp.float16, jnp.float32):
        raise ValueError(f"quantize takes bfloat16, float16 or float32, got {x.dtype}; cast it first.")
    if x.ndim < 1 + (fmt.block_rows > 1):
        raise ValueError(
            f"{fmt.name!r} needs an array of at least {1 + (fmt.block_rows > 1)} dimensions, got {x.shape}."
        )
    if layout not in ("row_major", "swizzled"):
        raise ValueError(f"layout={layout!r} is not known; choose 'row_major' or 'swizzled'.")
    if layout == "swizzled" and fmt.scale == "f32":
        raise ValueError(f"{fmt.name!r} has float32 scales, which have no swizzled order; use layout='row_major'.")
    if global_scale is None:
        return
    if fmt.global_scale is None:
        raise ValueError(f"{fmt.name!r} has no global scale; leave global_scale out or choose an 'nvfp4' format.")
    shape = jnp.shape(global_scale)
    wanted = x.shape[:-1] if fmt.global_scale == "token" else x.shape[: len(shape)]
    if shape != wanted or len(shape) > x.ndim - 1:
        raise ValueError(
            f"global_scale of shape {shape} does not fit {fmt.name!r} data of shape {x.shape}: give "
            + (
                f"one scale per row, {x.shape[:-1]}."
                if fmt.global_scale == "token"
                else "() or a leading part of that."
            )
        )


def quantize(
    x: jax.Array,
    fmt: str | BlockFormat,
    *,
    global_scale: jax.Array | None = None,
    alignment: int = 0,
    layout: str = "row_major",
    num_valid_rows: jax.Array | None = None,
) -> QTensor:
    """Quantise x [..., K] over its last axis. See `api.quantize` for the arguments."""
    fmt = get_format(fmt)
    check_quantize(x, fmt, global_scale, layout)
    return _quantize(
        x,
        fmt,
        None if global_scale is None else jnp.asarray(global_scale, jnp.float32),
        alignment=alignment,
        layout=layout,
        num_valid_rows=num_valid_rows,
        keep_axes=0,
        joint_axes=(),
    )


def _quantize(x, fmt, global_scale, *, alignment, layout, num_valid_rows, keep_axes, joint_axes) -> QTensor:
    """keep_axes leading axes have tensor scales of their own, except that those in joint_axes share one."""
    *lead, k = x.shape
    k_padded = padded_size(k, fmt, alignment)
    columns = fmt.num_scales(k_padded)
    rows = math.prod(lead)
    bits = exact.f32_bits(x)
    if num_valid_rows is not None:
        valid = (lax.iota(jnp.int32, rows) < num_valid_rows).reshape(*lead, 1)
        bits = jnp.where(valid, bits, jnp.uint32(0))
    bits = jnp.pad(bits, [(0, 0)] * len(lead) + [(0, columns * fmt.block - k)])
    blocks = bits.reshape(*lead, columns, fmt.block)
    amax = jnp.max(exact.magnitude(blocks), axis=-1)  # [..., C]
    if fmt.block_rows > 1:
        amax = _tile_max(amax, fmt.block_rows)
    g = None
    if fmt.scale == "e8m0":
        code, scale = _quantize_mx(blocks, amax, fmt)
    elif fmt.scale == "f32":
        code, scale = _quantize_fp8(blocks, amax, fmt)
    else:
        axes = (-1,) if fmt.global_scale == "token" else tuple(range(keep_axes, amax.ndim)) + tuple(joint_axes)
        given = None if global_scale is None else global_scale.reshape(_prefix(global_scale.shape, amax.ndim))
        code, scale, g = _quantize_nv(blocks, amax, fmt, given, axes)
        if global_scale is not None:
            g = global_scale
        elif fmt.global_scale == "token":
            g = g[..., 0]
        else:
            g = jnp.broadcast_to(g, (*lead[:keep_axes], *(1,) * (amax.ndim - keep_axes))).reshape(lead[:keep_axes])
    code = code.reshape(*lead, columns * fmt.block)[..., :k_padded]
    if fmt.block_rows > 1:
        scale = scale[..., :: fmt.block_rows, :]
    if layout == "swizzled":
        scale = swizzle_scales(scale if scale.ndim > 1 else scale[None])
    elif fmt.scale == "e4m3":
        scale = lax.bitcast_convert_type(scale, jnp.float8_e4m3fn)
    if fmt.element == "e4m3":
        data = lax.bitcast_convert_type(code, jnp.float8_e4m3fn)
    else:
        data = code[..., 0::2] | (code[..., 1::2] << 4)
    return QTensor(data, scale, g, fmt, k, layout)


def _prefix(shape, ndim):
    return (*shape, *(1,) * (ndim - len(shape)))


def _tile_max(amax, block_rows):
    """[..., N, C] -> the maximum of each group of block_rows rows, repeated for its rows."""
    *lead, n, c = amax.shape
    tiles = -(-n // block_rows)
    padded = jnp.pad(amax, [(0, 0)] * len(lead) + [(0, tiles * block_rows - n), (0, 0)])
    top = jnp.max(padded.reshape(*lead, tiles, block_rows, c), axis=-2, initial=0)
    return jnp.repeat(top, block_rows, axis=-2)[..., :n, :]


def quantize_weights(
    w: jax.Array, fmt: str | BlockFormat, *, scale_axes: tuple[int, ...] = (), alignment: int = 0
) -> QTensor:
    """Quantise a stack of matrices w [..., N, K] with a tensor scale for each matrix (formats that have one).

    scale_axes: leading axes that share a scale, e.g. (1,) for gate and up in [E, 2, F, D]. global_scale has shape
    w.shape[:-2] in any case.
    Raises ValueError for scale_axes that are not leading axes of w, and as `quantize` does.
    """
    fmt = get_format(fmt)
    check_quantize(w, fmt, None, "row_major")
    lead = w.ndim - 2
    axes = tuple(a + w.ndim if a < 0 else a for a in scale_axes)
    if any(not 0 <= a < lead for a in axes):
        raise ValueError(f"scale_axes={scale_axes} must name leading axes of {w.shape}, 0..{lead - 1}.")
    return _quantize(
        w, fmt, None, alignment=alignment, layout="row_major", num_valid_rows=None, keep_axes=lead, joint_axes=axes
    )


def row_major_scales(q: QTensor) -> jax.Array:
    """Block scales of q in row-major order [..., ceil(N/block_rows), C], whatever its layout; E4M3 as uint8."""
    scale = q.block_scale
    if q.layout == "swizzled":
        *lead, last = q.data.shape
        columns = q.format.num_scales(last * 8 // q.format.bits)
        scale = unswizzle_scales(scale, (lead[-1] if lead else 1, columns))
        return scale.reshape(*lead, columns)
    return lax.bitcast_convert_type(scale, jnp.uint8) if q.format.scale == "e4m3" else scale


def dequantize(q: QTensor, dtype: jax.typing.DTypeLike = jnp.bfloat16) -> jax.Array:
    """[..., k] of `dtype`: data * block_scale, then * global_scale, in float32, rounded to `dtype` at the end."""
    fmt = q.format
    *lead, last = q.data.shape
    k_padded = last * 8 // fmt.bits
    columns = fmt.num_scales(k_padded)
    if fmt.element == "e4m3":
        value = exact.e4m3_value(lax.bitcast_convert_type(q.data, jnp.uint8))
    else:
        value = exact.e2m1_value(jnp.stack([q.data & 15, q.data >> 4], axis=-1).reshape(*lead, k_padded))
    value = jnp.pad(value, [(0, 0)] * len(lead) + [(0, columns * fmt.block - k_padded)])
    value = value.reshape(*lead, columns, fmt.block)
    scale = row_major_scales(q)
    if fmt.block_rows > 1:
        scale = jnp.repeat(scale, fmt.block_rows, axis=-2)[..., : lead[-1], :]
    scale = scale[..., None]
    if fmt.scale == "e8m0":
        byte = scale.astype(jnp.int32)
        value = exact.scale_pow2(exact.f32_bits(value), byte - 127)
        value = jnp.where(byte == 255, jnp.float32(jnp.nan), value)
    elif fmt.scale == "f32":
        value = value * scale
    else:
        value = value * exact.e4m3_value(scale)
        assert q.global_scale is not None
        value = value * q.global_scale.reshape(_prefix(q.global_scale.shape, value.ndim))
    value = value.reshape(*lead, columns * fmt.block)[..., : q.k]
    return exact.to_dtype(value, dtype)
