"""Checks a config and estimates its FLOPs, memory and time, without running it."""

from pc.errors import require_extra

require_extra("train", "torchtitan")
