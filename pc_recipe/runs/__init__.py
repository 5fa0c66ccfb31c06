"""Start a run on this machine or under SLURM, and start many.

A start on this machine goes through these modules in this order:

local      the command: checks the config, then calls the next
launch     starts the processes of the run, and passes signals on to them
nodes      where processes of several machines meet
worker     one process of the run: makes the trainer and trains
outcome    what the command says at the end

`slurm` starts a run inside a SLURM job. `sweep/` starts many runs, each described by a `run.Run`.
"""
