"""Sweeps: many runs from one TOML, on this machine or a cluster, and selection among them."""
