"""Which bytes travel, who quantises them, and why: decided in Python, from data, before anything is traced."""

from .decide import BackendOptions as BackendOptions
from .decide import Decision as Decision
from .decide import candidates as candidates
from .decide import decide as decide
from .decide import process_options as process_options
from .explain import Explanation as Explanation
from .explain import explain as explain
from .names import Contract as Contract
from .names import activation_format as activation_format
from .names import draft_scheme as draft_scheme
from .names import resolve_contract as resolve_contract
from .table import BACKENDS as BACKENDS
from .table import family as family
