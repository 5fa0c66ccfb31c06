"""The README.md of an export: what the model is, how it was trained, what came out, and the commands."""

import json
from pathlib import Path
from typing import Any

import tomli_w
import yaml
from transformers import LlamaForCausalLM

from pc.common import markdown
from pc.common.plots import short_tokens
from pc.common.run_folder import METRICS, read_log
from pc.data import Manifest
from pc.data.sources import HUB_DATASET
from pc.errors import UserError
from pc.evaluate.plain_weights import RunCheckpoint
from pc.evaluate.tables import scores_of

_USE = """
```python
from transformers import AutoModelForCausalLM, AutoTokenizer

tokenizer = AutoTokenizer.from_pretrained("path/to/this/folder")
model = AutoModelForCausalLM.from_pretrained("path/to/this/folder")
```

```bash
lm_eval run --model hf --model_args pretrained=path/to/this/folder --tasks hellaswag,arc_easy
```

It is a base model for research: neither tuned to follow instructions nor filtered for safety.
"""


def model_card(run: RunCheckpoint, model: LlamaForCausalLM, dtype: str, scores: str | Path | None = None) -> str:
    """The card of `model`, made from `run`; scores: its results of scripts/score.py, if there are any."""
    data = Manifest.read(run.data) if run.data.exists() else None
    header: dict[str, Any] = {
        "library_name": "transformers",
        "pipeline_tag": "text-generation",
        "tags": ["llama", "pc-layer"],
    }
    source = data.source.get("input", "") if data else ""
    if HUB_DATASET.fullmatch(source) and not Path(source).exists():
        header["datasets"] = [source]
    name = f"{run.path.parent.parent.name}, step {run.step}"
    rows = [
        ("base", _base(run)),
        ("size", _size(model, dtype)),
        ("method", _method(run)),
        ("data", _data(run, data)),
        *_results(run),
        ("trained with", _command(run)),
        ("exported with", f"`python scripts/export_hf.py {run.path} FOLDER`"),
    ]
    parts = [
        f"---\n{yaml.safe_dump(header, sort_keys=False)}---\n\n# {name}\n\n{markdown.table(('', ''), rows)}{_USE}",
        _scores(Path(scores)) if scores else "",
        f"\n## Training configuration\n\n```toml\n{tomli_w.dumps(run.config)}```\n",
    ]
    return "".join(parts)


def _base(run: RunCheckpoint) -> str:
    start = run.config.get("checkpoint", {})
    if start.get("initial_load_path"):
        return f"trained on from `{start['initial_load_path']}`"
    return "none: pre-trained from scratch"


def _size(model: LlamaForCausalLM, dtype: str) -> str:
    config = model.config
    parameters = sum(parameter.numel() for parameter in model.parameters())
    embeddings = model.get_input_embeddings().weight.numel() + model.get_output_embeddings().weight.numel()
    return (
        f"{parameters:,} parameters ({dtype}), {parameters - embeddings:,} without embedding and head; "
        f"{config.num_hidden_layers} layers, width {config.hidden_size}, FFN {config.intermediate_size}, "
        f"{config.num_attention_heads} heads, {config.vocab_size:,} tokens, context {config.max_position_embeddings}"
    )


def _method(run: RunCheckpoint) -> str:
    optimizer = run.config.get("optimizer", {}).get("name", "AdamW")
    if not run.method.get("enable"):
        return f"{optimizer}, without preconditioning"
    settings = ", ".join(f"{key} = {json.dumps(value)}" for key, value in run.method.items() if key != "enable")
    return (
        f"{optimizer} with PC layers (polynomial weight preconditioning: {settings}); the weights here are the "
        "preconditioned ones, PC(W), so this is an ordinary Llama"
    )


def _data(run: RunCheckpoint, data: Manifest | None) -> str:
    if data is None:
        return f"`{run.data}`"
    subset = f", {data.source['subset']}" if data.source.get("subset") else ""
    tokens = short_tokens(data.tokens("train"))
    return f"{data.source.get('input')}{subset}: {tokens} training tokens of the tokenizer {data.tokenizer.name}"


def _results(run: RunCheckpoint) -> list[tuple[str, str]]:
    """Tokens, final losses and the newest scores that the run had logged at this step; none without a log."""
    folder = run.path.parent.parent
    if not (folder / METRICS).is_file():
        return []
    log = read_log(folder)
    last = {}
    for key in log.keys():
        series = log.series(key)
        logged = [i for i, step in enumerate(series.steps) if step <= run.step]
        if logged:
            last[key] = series.steps[logged[-1]], series.tokens[logged[-1]], series.values[logged[-1]]
    rows = []
    if "loss" in last:
        rows.append(("trained on", f"{short_tokens(last['loss'][1])} tokens"))
    for key, title in (("loss", "training loss"), ("validation_loss", "validation loss")):
        if key in last:
            rows.append((title, f"{last[key][2]:.4f} (step {last[key][0]})"))
    for key in sorted(last):
        if key.startswith("evaluation/"):
            rows.append((f"{key.removeprefix('evaluation/')}, while training", f"{last[key][2]:.4f}"))
    return rows


def _command(run: RunCheckpoint) -> str:
    path = run.path.parent.parent / "environment.json"
    if not path.is_file():
        return "the configuration below"
    environment = json.loads(path.read_text())
    return f"`./run_llama_train.sh config.toml` with the configuration below (world size {environment['world_size']}, commit {environment['commit']})"


def _scores(path: Path) -> str:
    try:
        results = json.loads(path.read_text())
        scores = scores_of(results, list(results["tasks"]))
        partial = f", first {results['limit']} items of each" if results["limit"] else ""
        rows = [
            (task, f"{value:.4f}", "" if error is None else f"{error:.4f}") for task, (value, error) in scores.items()
        ]
        variants = {name: task.get("variant") for name, task in results["tasks"].items() if task.get("variant")}
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UserError(f"{path}: not a model's results of scripts/score.py ({error!r})") from None
    notes = "".join(f"\n{name}: {variant}.\n" for name, variant in variants.items())
    return f"\n## Zero-shot scores{partial}\n\n{markdown.table(('task', 'score', 'standard error'), rows)}{notes}"
