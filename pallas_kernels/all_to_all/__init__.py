"""Exchanges of rows between devices."""

from .api import ragged_all_to_all as ragged_all_to_all
from .reference import ragged_all_to_all_reference as ragged_all_to_all_reference
