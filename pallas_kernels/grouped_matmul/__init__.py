"""Grouped matmul: rows sorted by group, each multiplied with its group's weight."""

from .api import IMPLEMENTATIONS as IMPLEMENTATIONS
from .api import Implementation as Implementation
from .api import Problem as Problem
from .api import grouped_matmul as grouped_matmul
from .api import input_dtype as input_dtype
from .gate import Gate as Gate
from .gate import gated_product as gated_product
from .gated import gated_matmul as gated_matmul
from .gated import gated_matmul_quantize as gated_matmul_quantize
from .gated import gated_obstacle as gated_obstacle
from .gated import gated_quantize_obstacle as gated_quantize_obstacle
from .reference import grouped_matmul_reference as grouped_matmul_reference
from .reference import row_groups as row_groups
