#!/usr/bin/env bash
# transformers 5.23.0: with pad_token_id = eos_token_id in a Llama's configuration, the end of text has no embedding.
#
# One would guess: the padding token matters where something is padded; packed sequences are not.
# What happens: Llama, Qwen, OLMo and others make their embedding with padding_idx=pad_token_id. torch then starts that row at zero
# and never gives it a gradient: to the model every end of text is a zero vector, for the whole of the training. GPT-2 and
# GPT-NeoX do not do this.
# Where it matters: pre-training from a configuration, where "use the end of text for padding" is common advice; what stands
# between documents then says nothing, and an export of the weights keeps it so.
#
# Exit status: 0 as written here, 1 changed, 2 could not install. PACKAGES="..." tries other versions.
set -u
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder" || exit 2
export PIP_DISABLE_PIP_VERSION_CHECK=1 PYTHONWARNINGS=ignore
python3 -m venv . && bin/pip install -q --no-compile ${PACKAGES:-torch==2.13.0 transformers==5.23.0} >pip.log 2>&1 ||
    { tail -n 1 pip.log >&2; exit 2; }
cat >observe.py <<'EOF'
import logging
import sys

import torch
import transformers
from transformers import GPT2Config, LlamaConfig

logging.disable(logging.WARNING)
transformers.logging.set_verbosity_error()
sizes = {"vocab_size": 16, "bos_token_id": 1, "eos_token_id": 2}
small = {"hidden_size": 8, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}


def row_of_eos(config) -> tuple[float, float]:
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config)
    optimizer, ids = torch.optim.AdamW(model.parameters(), lr=1e-2), torch.tensor([[1, 5, 6, 2, 7, 8, 2, 9]])
    row = model.get_input_embeddings().weight[2]
    first = row.norm().item()
    for _ in range(20):
        model(ids, labels=ids).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return first, model.get_input_embeddings().weight[2].norm().item()


print("torch", torch.__version__, "transformers", transformers.__version__)
found = {
    "Llama with pad_token_id = 2, its eos_token_id": row_of_eos(LlamaConfig(**sizes, **small, pad_token_id=2)),
    "Llama without pad_token_id": row_of_eos(LlamaConfig(**sizes, **small)),
    "GPT-2 with pad_token_id = 2": row_of_eos(GPT2Config(**sizes, n_embd=8, n_layer=1, n_head=2, pad_token_id=2)),
}
for name, (first, last) in found.items():
    print(f"{name}: norm of the row of id 2 at first {first:.3f}, after 20 steps {last:.3f}")
padded, *others = found.values()
sys.exit(not (padded == (0, 0) and all(first > 0 and first != last for first, last in others)))
EOF
bin/python observe.py || exit 1
