"""What a decode step of one token needs besides its experts: a normed row times a matrix, and attention to a cache."""

from .api import Partial as Partial
from .api import Weighted as Weighted
from .api import attend as attend
from .api import experts as experts
from .api import experts_obstacle as experts_obstacle
from .api import merged_linear as merged_linear
from .api import normed_linear as normed_linear
from .api import obstacle as obstacle
from .api import route as route
from .api import routed_experts as routed_experts
from .api import routed_obstacle as routed_obstacle
