"""Sweeps: many runs from one TOML, on this machine or a cluster, and selection among them."""

from pc.common.errors import require_extra

require_extra("train", "torchtitan")
