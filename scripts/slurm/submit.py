"""Check a config on the login node, then queue its training and, if asked, its scoring.

python scripts/slurm/submit.py CONFIG.toml [--gpus-per-node 8] [--nodes 1] [--score="--data DIR"]
                               [--sbatch "--partition=main --time=8:00:00"] [--section.key value ...]
"""

from pc.launch.slurm import submit

if __name__ == "__main__":
    submit()
