"""The paper's figures, and costs, from runs, checkpoints and configs."""

from pc.errors import require_extra

require_extra("plots", "matplotlib")
