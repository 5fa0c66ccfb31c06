"""Start a run on this machine or under SLURM, and start many.

In this order: `local` is the command, `launch` starts a run's processes and hands signals on, `nodes` says where they
meet, `worker` is one of them, `outcome` is what is said at the end; `slurm` does the same inside a job. `run` is what
sweeps hand on, `sweep/` trains many.
"""
