"""A run before it starts: its mistakes, what it needs and how long it takes. Nothing here starts or writes anything.

In this order: `memory` counts a model and estimates its memory, `micro_batch` chooses the micro-batch that fits, `needs`
puts memory and disk space into words, `cost` counts FLOPs and hours, `installed` and `check` find mistakes, and `allocation`
is what a SLURM job asks for.
"""
