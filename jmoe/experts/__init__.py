"""Ways of computing experts on the rows that a rank received."""

from .activation import gated_activation as gated_activation
from .grouped import apply_batched_experts as apply_batched_experts
from .grouped import apply_experts as apply_experts
from .grouped import apply_experts_unsummed as apply_experts_unsummed
from .grouped import takes_few_rows as takes_few_rows
from .shared import shared_expert as shared_expert
from .table import EXPERTS as EXPERTS
from .table import ExpertsSpec as ExpertsSpec
from .table import get_experts as get_experts
from .weights import ExpertWeights as ExpertWeights
from .weights import decodes_alike as decodes_alike
