"""The paper's figures and figures of cost, from runs, checkpoints and configs."""
