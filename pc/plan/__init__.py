"""Checks a config and counts its FLOPs and memory, without running it."""

from pc.common.errors import require_extra

require_extra("train", "torchtitan")
