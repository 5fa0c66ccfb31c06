"""Optimizers for sharded matrices."""
