"""Run the training runs that a sweep's TOML describes, and choose the best.

python scripts/sweep.py plan   SWEEP.toml... [--tflops 400 | --tokens-per-second 50000]
python scripts/sweep.py run    SWEEP.toml...
python scripts/sweep.py submit SWEEP.toml... [--gpus-per-node 8] [--nodes 1] [--at-a-time 2] [--sbatch "--time=8:00:00"]
python scripts/sweep.py status SWEEP.toml...
python scripts/sweep.py select SWEEP.toml...
"""

from pc.launch.sweep_command import main

if __name__ == "__main__":
    main()
