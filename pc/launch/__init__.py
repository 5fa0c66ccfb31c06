"""Runs, sweeps and SLURM jobs from configs."""

from pc.errors import require_extra

require_extra("train", "torchtitan", "tomli_w")
