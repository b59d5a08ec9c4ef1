"""Block quantisation: formats, QTensor, and quantise/dequantise on any backend."""

from .api import IMPLEMENTATIONS as IMPLEMENTATIONS
from .api import dequantize as dequantize
from .api import gather_quantize as gather_quantize
from .api import quantize as quantize
from .api import quantize_rows as quantize_rows
from .api import swiglu_quantize as swiglu_quantize
from .formats import FORMATS as FORMATS
from .formats import BlockFormat as BlockFormat
from .formats import FourOverSix as FourOverSix
from .formats import get_format as get_format
from .qtensor import QTensor as QTensor
from .reference import quantize_weights as quantize_weights
from .swizzle import swizzle_scales as swizzle_scales
from .swizzle import swizzled_size as swizzled_size
from .swizzle import unswizzle_scales as unswizzle_scales
