"""Run folders in the trainer's format, created in a second: a checkpoint and metrics.jsonl."""

import json
import math
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp
from torch import nn

import pc
from helpers.health_model import transformer
from pc.config import BLOCK_SUFFIXES


class _Fixed:
    """A Stateful with a given state."""

    def __init__(self, state: dict) -> None:
        self._state = state

    def state_dict(self) -> dict:
        return self._state

    def load_state_dict(self, state: dict) -> None:
        raise NotImplementedError


def save_checkpoint(run: Path, schedule: str | None, step: int = 7, level=4) -> nn.Module:
    """Write run/checkpoint/step-N; returns the plain model with the effective weights."""
    model = transformer()
    fingerprint, state = {"enable": False}, None
    if schedule:
        config = pc.PCConfig(schedule=schedule, level=level)
        model = pc.attach(model, config)
        fingerprint = {
            "enable": True, "level": level, "blocks": ["o", "ffn"], "schedule": schedule,
            "norm_recovery": True, "learnable_gamma": True,
        }  # fmt: skip
        made = pc.schedule(model)
        with torch.no_grad():
            for i, weight in enumerate(made.weights.values()):
                weight.gamma.fill_(1 + 0.1 * i)
        made.materialise()
        state = made.state_dict()
    weights = {key: value for key, value in model.state_dict().items() if key.rpartition(".")[2] == "weight"}
    states = {**weights, "method": _Fixed({"fingerprint": json.dumps(fingerprint)})}
    if state:
        states["pc"] = _Fixed(state)
    dcp.save(states, checkpoint_id=run / "checkpoint" / f"step-{step}", no_dist=True)
    return pc.merge(model)


def write_metrics(
    run: Path, *, gain: float = 0.0, health: bool = True, estimates: bool = False, steps: int = 100
) -> None:
    """Write losses that fall logarithmically, `gain` times as fast, and health metrics every ten steps."""
    lines = []
    for step in range(1, steps + 1):
        about = {"step": step, "tokens": 1000 * step, "time": float(step)}
        loss = 8 - (1 + gain) * math.log(step + 1)
        lines.append({**about, "loss": loss})
        if step % 20 == 0:
            lines.append({**about, "validation_loss": loss + 0.1})
        if health and step % 10 == 0:
            parts = [("attention", layer) for layer in range(2)] + [("ffn", layer) for layer in range(2)]
            values = {f"signal/{part}/rms/{layer}": 0.1 * (layer + 1) + 0.001 * step for part, layer in parts}
            values |= {f"spectra/gmcn/{group}": 20 - gain * step for group in ("pc", "qkv", "all")}
            if estimates:
                for block in BLOCK_SUFFIXES:
                    if block in ("o", "gate", "up", "down"):
                        values[f"spectra/estimate_error/{block}/median"] = 0.01 / step
                        values[f"spectra/estimate_error/{block}/max"] = 0.1 / step
            lines.append({**about, **values})
    run.mkdir(parents=True, exist_ok=True)
    (run / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
