"""Rows into expert order and back."""

from .rows import Unsummed as Unsummed
from .rows import combine_rows as combine_rows
from .rows import gather_dequantized as gather_dequantized
from .rows import gather_rows as gather_rows
from .slots import Slots as Slots
from .slots import member_slots as member_slots
from .slots import rank_slots as rank_slots
from .sort import Sorted as Sorted
from .sort import merge_duplicates as merge_duplicates
from .sort import sort_by_expert as sort_by_expert
