"""The paper's figures, and costs, from runs, checkpoints and configs."""

from pc.common.errors import require_extra

require_extra("plots", "matplotlib")
