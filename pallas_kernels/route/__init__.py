"""Choosing K experts for each token from the router's logits."""

from .api import choose_experts as choose_experts
from .reference import Rule as Rule
