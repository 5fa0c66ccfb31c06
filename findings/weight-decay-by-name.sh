#!/usr/bin/env bash
# transformers 5.23.0: the Trainer decides by class and by name what is decayed: torch's own RMSNorm is, a matrix called
# debias is not.
#
# One would guess: gains of norms and biases have no weight decay, matrices have it; or dimensions decide, as in most
# pre-training code.
# What happens: left out are modules of the class LayerNorm, and names with "bias", "layernorm", "rmsnorm" or a part "norm".
# The gain of an nn.RMSNorm called ln_1, and any other vector, is decayed towards zero; a matrix whose name has "bias" in
# it is not decayed. Another name for the same module trains another model.
# Where it matters: architectures of one's own in the Trainer. With the decay of pre-training, 0.1, gains shrink over a long
# run, and a comparison of two implementations of one model differs in this.
#
# Exit status: 0 as written here, 1 changed, 2 could not install. PACKAGES="..." tries other versions.
set -u
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder" || exit 2
export PIP_DISABLE_PIP_VERSION_CHECK=1 PYTHONWARNINGS=ignore
python3 -m venv . && bin/pip install -q --no-compile ${PACKAGES:-torch==2.13.0 transformers==5.23.0 accelerate==1.15.0} >pip.log 2>&1 ||
    { tail -n 1 pip.log >&2; exit 2; }
cat >observe.py <<'EOF'
import logging
import sys

import torch
import transformers
from torch import nn
from transformers import Trainer, TrainingArguments

logging.disable(logging.WARNING)
transformers.logging.set_verbosity_error()


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.ln_1, self.ln_2 = nn.LayerNorm(4), nn.RMSNorm(4)
        self.norm = nn.RMSNorm(4)
        self.scale = nn.Parameter(torch.ones(4))
        self.up, self.debias = nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False)


print("torch", torch.__version__, "transformers", transformers.__version__)
model = Block()
decayed = set(Trainer(model, TrainingArguments("out", report_to=[], use_cpu=True)).get_decay_parameter_names(model))
for name, parameter in model.named_parameters():
    kind = type(model.get_submodule(name.rpartition(".")[0])).__name__
    print(f"{name} of {kind}, {parameter.ndim} dimensions: {'decayed' if name in decayed else 'not decayed'}")
sys.exit(decayed != {"ln_2.weight", "scale", "up.weight"})
EOF
bin/python observe.py || exit 1
