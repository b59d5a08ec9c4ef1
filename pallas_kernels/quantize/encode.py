"""What one thread does with its values ("unit"): the scale of their block and their codes, in any format.

The functions take an operations object `o` and lists of registers, as `lane` says.
"""

from __future__ import annotations

from . import four_over_six, lane
from .formats import BlockFormat


def encode_unit(o, words, dtype: str, values, lanes: int, nv: lane.NvScale | None, fmt: BlockFormat):
    """(words of codes, scale) of one thread's values; `lanes` neighbouring threads share a block (for 4-over-6: one).

    words, dtype: as they were loaded. values: float32, used where there is no global scale. nv: of formats that have
    one.
    """
    if nv is not None and fmt.four_over_six is not None:
        return four_over_six.encode_block(o, words, dtype, nv, fmt.four_over_six)
    amax = lane.group_max(o, lane.amax_bits(o, words, dtype), lanes)
    if nv is not None:
        return lane.nvfp4_block(o, words, dtype, amax, nv)
    scale, factor = (lane.mx_scale if fmt.scale == "e8m0" else lane.fp8_scale)(o, amax, fmt)
    scaled = [v * factor for v in values]
    if fmt.element == "e4m3":
        return lane.e4m3_words(o, scaled), scale
    codes = lane.e2m1_words(o, [lane.round_saturated(o, y) for y in scaled])
    nan = scale.same(o.U(255))
    return [o.where(nan, o.U(0), w) for w in lane.signed(o, codes, words, dtype)], scale
