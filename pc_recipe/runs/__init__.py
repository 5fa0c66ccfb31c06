"""Check a run and its cost, start it on this machine or under SLURM, and start many."""
