"""What a config would need and cost, before it is run."""

from pc.errors import require_extra

require_extra("train", "torchtitan")
