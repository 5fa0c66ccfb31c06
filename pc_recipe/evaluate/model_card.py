"""The README.md of an export: what the model is, how it was trained, what came out, and the commands."""

import json
import re
from contextlib import suppress
from pathlib import Path
from typing import Any

import tomli_w
import yaml
from transformers import LlamaForCausalLM

from pc.errors import UserError
from pc_recipe.checkpoints.run_tokenizer import data_folders, data_of
from pc_recipe.config.headline import describe
from pc_recipe.data.tokenizers import Tokenizer
from pc_recipe.evaluate.plain_weights import RunCheckpoint
from pc_recipe.files import record
from pc_recipe.files.run_folder import list_configs, read_environment, read_first_config
from pc_recipe.files.run_log import VALIDATION, read_log
from pc_recipe.pages import markdown
from pc_recipe.pages.plots import short_tokens

_USE = """
```python
from transformers import AutoModelForCausalLM, AutoTokenizer

tokenizer = AutoTokenizer.from_pretrained("path/to/this/folder")
model = AutoModelForCausalLM.from_pretrained("path/to/this/folder")
```

```bash
lm_eval run --model hf --model_args pretrained=path/to/this/folder,softmax_dtype=float32 --tasks hellaswag,arc_easy
```

It is a base model for research: neither tuned to follow instructions nor filtered for safety.
"""

_NOTICE = ", copyright 2024 Mistral AI, under the [Apache License 2.0](http://www.apache.org/licenses/LICENSE-2.0)"


_ON_HUB = re.compile(r"hf://datasets/([^/@\s]+/[^/@\s]+)@")
_FOLDERS = re.compile(r"(?<![\w./-])(?!(?<=:)//)(?:~\w*|\.{1,2})?/(?:[^/\s]+/)*(?=[^/\s])")
# a text that is a path as a whole may have spaces in it
_ONE_PATH = re.compile(r"^(?:file://)?(?:~\w*)?/(?:.*/)?(?=[^/])")


def without_folders(value: Any) -> Any:
    """A string, or the strings in a list or table, with each local path shortened to its last part.

    Folders name people, machines and other work. Paths like a/b stay, because names on the Hub look the same.
    """
    if isinstance(value, dict):
        shortened: dict[Any, Any] = {}
        for key, item in value.items():
            name = short = without_folders(key)
            number = 1
            while name in shortened:  # another folder of that name
                name = f"{short} ({(number := number + 1)})"
            shortened[name] = without_folders(item)
        return shortened
    if isinstance(value, list):
        return [without_folders(item) for item in value]
    return _FOLDERS.sub("", _ONE_PATH.sub("", value)) if isinstance(value, str) else value


def model_card(
    run: RunCheckpoint, model: LlamaForCausalLM, tokenizer: Tokenizer, dtype: str, scores: str | Path | None = None
) -> str:
    """The card of `model`, made from `run`; scores: the table.md that scripts/score.py wrote, if there is one.

    Text from run and data folder may be other people's, so it is escaped for Markdown.
    """
    sources, of_hub = _sources(run.run)
    header: dict[str, Any] = {
        "license": "unknown",  # the publisher's choice; the Hub asks for one
        "library_name": "transformers",
        "pipeline_tag": "text-generation",
        "tags": ["llama", "pc-layer"],
    }
    if of_hub:
        header["datasets"] = of_hub
    # the first config, because only the run's start counts
    initial_path = read_first_config(run.run).get("checkpoint", {}).get("initial_load_path")
    environment, configs = _describe_environment(run), _configurations(run)
    parts = "s below, one after another, the last perhaps after this step" if len(configs) > 1 else " below"
    shape, parameters = model.config, f"{model.num_parameters():,} parameters ({dtype})"
    rows = [
        ("base", f"continued from {_shown(initial_path)}" if initial_path else "none: pre-trained from scratch"),
        ("size", f"{parameters}, {shape.num_hidden_layers} layers, width {shape.hidden_size}"),
        ("method", _shown(_describe_method(run))),
        ("data", ", ".join(map(_shown, sources))),
        ("tokenizer", f"{_shown(tokenizer.name)}, sha256 {tokenizer.sha256}{_NOTICE * tokenizer.is_default}"),
        ("for llama.cpp", _for_llama_cpp(tokenizer)),
        *_read_logged(run),
        ("trained with", f"`./run_llama_train.sh config.toml` with the configuration{parts}{environment}"),
        ("exported with", f"`python scripts/export_hf.py RUN/checkpoint/{run.path.name} FOLDER`"),
    ]
    table = f"\n## Scores\n\n{Path(scores).read_text()}" if scores else ""
    return (
        f"---\n{yaml.safe_dump(header, sort_keys=False)}---\n\n"
        f"# {_shown(run.run.name)}, step {run.step}\n\n{markdown.table(('', ''), rows)}{_USE}{table}"
        "\n## Training configuration\n\n" + "\n".join(configs)
    )


def _configurations(run: RunCheckpoint) -> list[str]:
    """The run's configuration in Markdown; of a run that went on with others, each under a title. A checkpoint does not
    say of which part it is."""
    newest, *earlier = list_configs(run.run)
    if not earlier:
        return [_in_toml(run.config)]
    blocks = {file.name: _read_in_toml(file) for file in earlier} | {newest.name: _in_toml(run.config)}
    places = {earlier[0].name: ", the first part", newest.name: ", the last part"}
    return [f"### {name}{places.get(name, '')}\n\n{block}" for name, block in blocks.items()]


def _in_toml(config: dict[str, Any]) -> str:
    return f"```toml\n{tomli_w.dumps(without_folders(config))}```\n"


def _read_in_toml(file: Path) -> str:
    try:
        return _in_toml(record.read(file, record.Tables) or {})
    except record.Malformed:
        return "It cannot be read.\n"


def _for_llama_cpp(tokenizer: Tokenizer) -> str:
    """What its converter makes of the tokenizer."""
    if tokenizer.sentencepiece is not None:
        bos = ", but llama.cpp then puts a BOS in front of a text, which this tokenizer does not have"
        return f"`convert_hf_to_gguf.py` takes `tokenizer.model`{bos * (tokenizer.bos_id is None)}"
    if tokenizer.has_byte_fallback:
        return (
            "`convert_hf_to_gguf.py` cannot take the merges of this `tokenizer.json`, and gives other ids, as to two spaces. "
            "Export with `--tokenizer FILE`, the SentencePiece model that it was made from (or `mistral-common`)"
        )
    return (
        '`convert_hf_to_gguf.py` refuses a tokenizer that it does not know ("BPE pre-tokenizer was not recognized"); '
        "let its `get_vocab_base_pre` return the name of the same splitting, for one of `train_tokenizer.py` `gpt-2`"
    )


def _sources(folder: Path) -> tuple[list[str], list[str]]:
    """What each folder of a run's data was made of, and the Hub's data sets among that."""
    sources, of_hub = [], []
    with suppress(UserError):
        for number, data in enumerate(data_folders(folder)):
            sources.append(f"unknown, since {data.name} was not there at the export")
            with suppress(UserError):
                source = data_of(folder, number).source
                sources[-1] = source["input"]
                of_hub += [found[1] for file in source["files"] if (found := _ON_HUB.match(file["name"]))]
    return sources or ["unknown, since the run's data are gone"], list(dict.fromkeys(of_hub))


def _shown(text: object) -> str:
    return markdown.literal(without_folders(str(text)))


def _describe_method(run: RunCheckpoint) -> str:
    optimizer = str(run.config.get("optimizer", {}).get("name", "AdamW"))
    in_short = describe(run.settings.model, optimizer, run.method)
    if not run.method.enable:
        return in_short
    settings = ", ".join(
        f"{key} = {json.dumps(value)}" for key, value in run.method.model_dump(exclude={"enable"}).items()
    )
    return (
        f"{in_short}. Polynomial weight preconditioning with {settings}; the weights here are the preconditioned ones, "
        "PC(W), so this is an ordinary Llama"
    )


def _read_logged(run: RunCheckpoint) -> list[tuple[str, str]]:
    """The last tokens and losses that the run logged up to this step; none without a log."""
    lines = read_log(run.run).lines
    until = [line for line in lines if line["step"] <= run.step]
    last = {key: value for line in until for key, value in line.items()}
    keys = [key for key in ("loss", VALIDATION) if isinstance(last.get(key), float)]
    steps = {key: max(line["step"] for line in until if key in line) for key in keys}
    at = {key: f" (step {step})" if step < run.step else "" for key, step in steps.items()}
    rows = [(key.replace("_", " "), f"{last[key]:.4f}{at[key]}") for key in keys]
    return [("trained on", f"{short_tokens(last['tokens'])} tokens"), *rows] if rows else []


def _describe_environment(run: RunCheckpoint) -> str:
    environment = read_environment(run.run)
    if not environment:
        return ""
    return f" (world size {_shown(environment.get('world_size'))}, commit {_shown(environment.get('commit'))})"
