"""The paper's figures, and costs, from runs, checkpoints and configs."""
