"""Start one run, on this machine or under SLURM."""

from pc.common.errors import require_extra

require_extra("train", "torchtitan", "tomli_w")
