#!/usr/bin/env bash
# transformers 5.23.0: a model that is saved in shards over an earlier save in one file loads as the earlier one.
#
# One would guess: save_pretrained replaces the model that the folder held, as it removes the shards of an earlier save.
# What happens: it removes earlier shards alone. model.safetensors of before stays beside the new shards and their index, and
# from_pretrained prefers it, without a word. The other way round, shards before and one file now, the index of before stays and
# names files that are gone.
# Where it matters: a model that is loaded from a folder, trained on and saved into it with a smaller max_shard_size, or whose
# size has passed the default: evaluation and serving see the weights from before the training. Readers that look for the index
# first see the new ones; after the other order they find no file.
#
# Exit status: 0 as written here, 1 changed, 2 could not install. PACKAGES="..." tries other versions.
set -u
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder" || exit 2
export PIP_DISABLE_PIP_VERSION_CHECK=1 PYTHONWARNINGS=ignore HF_HUB_OFFLINE=1
python3 -m venv . && bin/pip install -q --no-compile ${PACKAGES:-torch==2.13.0 transformers==5.23.0} >pip.log 2>&1 ||
    { tail -n 1 pip.log >&2; exit 2; }
cat >observe.py <<'EOF'
import json
import sys
from pathlib import Path

import torch
import transformers
from transformers import LlamaConfig, LlamaForCausalLM

transformers.logging.set_verbosity_error()
transformers.logging.disable_progress_bar()
SIZES = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
SHARDS = {"max_shard_size": "30KB"}


def saved_twice(folder: str, first: dict, then: dict) -> tuple[bool, list[str]]:
    """Whether the folder loads as the model that was saved last, and which files of its index are not there."""
    model = LlamaForCausalLM(LlamaConfig(**SIZES))
    model.save_pretrained(folder, **first)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(0.5)  # "trained"
    model.save_pretrained(folder, **then)
    loaded = LlamaForCausalLM.from_pretrained(folder)
    index = json.loads(Path(folder, "model.safetensors.index.json").read_text())["weight_map"]
    print(f"{folder}: {', '.join(sorted(file.name for file in Path(folder).glob('model*')))}")
    is_new = all((parameter == 0.5).all() for parameter in loaded.parameters())
    return is_new, sorted({name for name in index.values() if not Path(folder, name).exists()})


print("torch", torch.__version__, "transformers", transformers.__version__)
shards_last, _ = saved_twice("one file, then shards", {}, SHARDS)
whole_last, gone = saved_twice("shards, then one file", SHARDS, {})
print("one file, then shards: from_pretrained gives the", "new" if shards_last else "OLD", "model")
print("shards, then one file: from_pretrained gives the", "new" if whole_last else "OLD", "model")
print("... and the index names files that are not there:", *gone)
sys.exit(not (not shards_last and whole_last and gone))
EOF
bin/python observe.py || exit 1
