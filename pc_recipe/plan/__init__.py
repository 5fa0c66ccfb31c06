"""A run before it starts: what is wrong with it, what it needs and what it takes. Nothing here starts or writes anything.

In this order: `memory` counts a model and estimates its memory, `micro_batch` chooses the micro-batch that fits, `needs`
says both in words beside the disk, `cost` counts FLOPs and hours, `installed` and `check` find mistakes, and `allocation`
is what a SLURM job asks for.
"""
