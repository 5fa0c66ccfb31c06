"""Small run folders in the trainer's format, without training: random weights in the checkpoint's layout."""

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tomli_w
import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor

from helpers.tiny import model_args
from pc import PCConfig, attach, effective_weight, named_weights
from pc.blocks import BLOCK_SUFFIXES
from pc.method import power_iteration
from pc_recipe.checkpoints.writer import ChecksummedWriter
from pc_recipe.config import Config, write_config
from pc_recipe.files.run_folder import write_state
from pc_recipe.train.llama2 import Llama2

# Long enough for the prompts of the tests; RoPE angles stay as large as in short training runs.
SEQ_LEN = 256


@dataclass
class MadeRun:
    """checkpoint: folder RUN/checkpoint/step-N. model: what the trainer computes with, PC evaluated."""

    checkpoint: Path
    model: Llama2


def make_run(
    folder: Path,
    data: Path | None,
    pc_config: PCConfig | None,
    flavor: str = "debug",
    seed: int = 0,
    vocab_size: int = 32_000,
) -> MadeRun:
    """Draw weights, evaluate PC where configured, and save them in the layout of a resumable checkpoint."""
    torch.manual_seed(seed)
    args = model_args(flavor, max_seq_len=SEQ_LEN, init_seed=seed, vocab_size=vocab_size)
    raw = Llama2(args)
    raw.init_weights()
    for parameter in raw.parameters():  # mistakes would not show with norms of ones and a small head
        parameter.data.add_(torch.randn_like(parameter), alpha=0.02)
    entries: dict[str, Tensor] = {key: tensor.clone() for key, tensor in raw.state_dict().items()}
    effective = dict(entries)
    method = {"enable": pc_config is not None}
    if pc_config is not None:
        names = ("blocks", "norm_recovery", "learnable_gamma")
        method |= {"level": pc_config.only_level.name} | {name: getattr(pc_config, name) for name in names}
        with torch.device("meta"):
            layers = attach(Llama2(args), pc_config)
        for name, layer in named_weights(layers):
            weight = entries[f"{name}.weight"]
            u, v = (torch.nn.functional.normalize(torch.randn(size), dim=0) for size in weight.shape)
            u, v = power_iteration(weight, u, v, 3)
            gamma = 1 + 0.1 * torch.randn(1) if pc_config.learnable_gamma else None
            effective[f"{name}.weight"] = effective_weight(weight, gamma, u, v, layer.config)
            entries |= {f"{name}.weight_{key}": tensor for key, tensor in (("orig", weight), ("u", u), ("v", v))}
            if gamma is not None:
                entries[f"{name}.weight_gamma"] = gamma
            entries[f"{name}.weight"] = effective[f"{name}.weight"]
    states = entries | {
        "optimizer": {"state.norm.weight.exp_avg": torch.zeros(3)},
        "lr_scheduler": {"adamw": {"last_epoch": 7}},
        "dataloader": {"position": 12},
        "train_state": {"step": 7, "ntokens_seen": 99},
        "method": {"fingerprint": json.dumps(method)},
    }
    config = {
        "model": {"name": "pc_llama2", "flavor": flavor, "vocab_size": vocab_size},
        "training": {"seq_len": SEQ_LEN},
        "data": {"path": str(data)},
        "pc": {"enable": pc_config is not None},
    }
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.toml").write_text(tomli_w.dumps(config))
    checkpoint = folder / "checkpoint" / "step-7"
    dcp.save(states, storage_writer=ChecksummedWriter(checkpoint), no_dist=True)
    raw.load_state_dict(effective, strict=True)
    return MadeRun(checkpoint, raw.eval())


def save_checkpoint(run: Path, with_pc: bool, level=4) -> Llama2:
    """A run of the tiny model; returns the plain model with the effective weights."""
    pc_config = PCConfig(level=level) if with_pc else None
    return make_run(run, None, pc_config, "tiny", vocab_size=64).model


OF_EARLIER = {
    "checkpoint": {"export_dtype": "float32"},
    "comm": {"trace_buf_size": 20_000},
    "optimizer": {"muon_nesterov": True, "muon_steps": 5, "muon_adjust_lr": "match_rms_adamw"},
}
"""The keys that are gone, with the defaults that they had."""


def make_earlier(folder: Path, config: Config, **optimizer: Any) -> Path:
    """The config.toml of a run, as an earlier version wrote it: with all keys that it had, and their defaults."""
    write_config(config, folder / "config.toml")
    comments = [line for line in (folder / "config.toml").read_text().splitlines() if line.startswith("#")]
    tables = config.model_dump(exclude_none=True)
    tables |= {section: tables[section] | keys for section, keys in OF_EARLIER.items()}
    tables["optimizer"] |= optimizer
    (folder / "config.toml").write_text("\n".join([*comments, tomli_w.dumps(tables)]))
    return folder / "config.toml"


def make_begun(folder: Path) -> None:
    """As much of a run of 3 steps as a launcher looks at."""
    (folder / "checkpoint" / "step-3").mkdir(parents=True)
    (folder / "checkpoint" / "step-3" / ".metadata").touch()
    (folder / "config.toml").write_text('[model]\nflavor = "debug"\nvocab_size = 2048\n[pc]\nenable = true\n')


def validations(losses: Sequence[float | None], tokens_per_step: int = 100) -> list[dict]:
    """The log lines of a run that was validated after every step."""
    return [
        {"step": step, "tokens": step * tokens_per_step, "validation_loss": loss}
        for step, loss in enumerate(losses, start=1)
    ]


def write_run(run: Path, lines: Sequence[dict], state: str = "finished", reason: str = "") -> Path:
    """A folder with these lines of metrics.jsonl, and with a status."""
    run.mkdir(parents=True, exist_ok=True)
    (run / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    last = max((line["step"] for line in lines), default=0)
    write_state(run, state, last, last, reason)
    return run


def write_metrics(run: Path, *, gain: float, estimates: bool) -> None:
    """Write a hundred losses that fall logarithmically, `gain` times as fast, and diagnostics every ten steps."""
    lines = []
    for step in range(1, 101):
        about = {"step": step, "tokens": 1000 * step, "time": float(step)}
        loss = 8 - (1 + gain) * math.log(step + 1)
        lines.append({**about, "loss": loss, "step_seconds": 1.0})
        if step % 20 == 0:
            lines.append({**about, "validation_loss": loss + 0.1})
        if step % 10 == 0:
            parts = [("attention", layer) for layer in range(2)] + [("ffn", layer) for layer in range(2)]
            values = {f"signal/{part}/rms/{layer}": 0.1 * (layer + 1) + 0.001 * step for part, layer in parts}
            values |= {f"spectra/gmcn/{group}": 20 - gain * step for group in ("pc", "qkv", "all")}
            if estimates:
                for block in BLOCK_SUFFIXES:
                    if block in ("o", "gate", "up", "down"):
                        values[f"spectra/estimate_error/{block}/median"] = 0.01 / step
                        values[f"spectra/estimate_error/{block}/max"] = 0.1 / step
            lines.append({**about, **values})
    write_run(run, lines)


# Three items of each evaluation set, written for the tests, with the columns of the real sets.
EVALUATION_ITEMS: dict[str, list[dict]] = {
    "lambada_openai": [
        {"text": "He looked for the key in every drawer, and at last beside the lamp he found the key"},
        {"text": "The ship left the harbour at dawn, and by night nobody could see the ship"},
        {"text": "She planted a pear tree. Ten years later we ate from the tree"},
    ],
    "hellaswag": [
        {"ind": index, "activity_label": "Baking bread", "ctx_a": "A man kneads the dough.", "ctx_b": "then he",
         "ctx": "A man kneads the dough. then he", "source_id": "made", "split": "val", "split_type": "indomain", "label": label,
         "endings": ["puts it into the oven.", "[substeps] paints a wall with it.", "reads it aloud.", "swims."]}
        for index, label in enumerate("012")
    ],
    "winogrande": [
        {"sentence": "The cup did not fit the box because the _ was too big.", "option1": "cup", "option2": "box", "answer": "1"},
        {"sentence": "The cup did not fit the box because the _ was too small.", "option1": "cup", "option2": "box", "answer": "2"},
        {"sentence": "Ana thanked Eva since _ had helped.", "option1": "Ana", "option2": "Eva", "answer": "2"},
    ],
    "piqa": [
        {"goal": "Dry a wet shoe", "sol1": "Fill it with newspaper.", "sol2": "Fill it with water.", "label": 0},
        {"goal": "Open a jar", "sol1": "Push the lid down.", "sol2": "Turn the lid.", "label": 1},
        {"goal": "Cool the soup", "sol1": "Wait a while.", "sol2": "Heat the soup.", "label": 0},
    ],
    "boolq": [
        {"idx": index, "passage": "Rivers -- A river carries water to the sea.", "question": question, "label": label}
        for index, (question, label) in enumerate(
            [("does a river carry water", 1), ("does a river carry fire", 0), ("is a river dry", 0)]
        )
    ],
    "arc_easy": [
        {"id": f"easy{index}", "question": "Which of these is a metal?", "answerKey": "A",
         "choices": {"text": ["iron", "wood", "glass"], "label": ["A", "B", "C"]}}
        for index in range(3)
    ],
    "arc_challenge": [
        {"id": f"hard{index}", "question": "What turns water into steam?", "answerKey": "B",
         "choices": {"text": ["light", "heat", "sound", "salt"], "label": ["A", "B", "C", "D"]}}
        for index in range(3)
    ],
    "commonsense_qa": [
        {"id": f"common{index}", "question": "Where does one keep milk?", "question_concept": "milk", "answerKey": "A",
         "choices": {"label": ["A", "B", "C", "D", "E"], "text": ["fridge", "garage", "desk", "lake", "bag"]}}
        for index in range(3)
    ],
    "openbookqa": [
        {"id": f"open{index}", "question_stem": "A plant grows towards", "answerKey": "A",
         "choices": {"text": ["light", "noise", "stone", "cold"], "label": ["A", "B", "C", "D"]}}
        for index in range(3)
    ],
}  # fmt: skip


def make_evaluation_data(folder: Path) -> Path:
    folder.mkdir(parents=True)
    for name, items in EVALUATION_ITEMS.items():
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(item) + "\n" for item in items))
    return folder
