"""Helpers that several subpackages share: atomic writes, a run's folder, Markdown tables, the style of plots."""
