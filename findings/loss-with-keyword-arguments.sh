#!/usr/bin/env bash
# transformers 5.23.0: a model of one's own whose forward takes **kwargs trains on a gradient that is as many times too large as
# the Trainer accumulates micro-batches.
#
# One would guess: **kwargs in a forward method, there to ignore what it does not know, changes nothing.
# What happens: the Trainer takes them as a promise that the model divides its loss by num_items_in_batch, which it passes, and
# no longer divides by gradient_accumulation_steps. A model that returns a mean as before gets the sum of the micro-batches'
# gradients. The logged loss is as many times too large.
# Where it matters: models written for another loop and trained by the Trainer, with accumulation: logged losses and perplexities
# are wrong, clipping acts at another threshold, and an optimizer that does not rescale its gradient takes larger steps.
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
from transformers import Trainer, TrainerCallback, TrainingArguments

logging.disable(logging.WARNING)
transformers.logging.set_verbosity_error()


class Plain(nn.Module):
    def __init__(self):
        super().__init__()
        self.w = nn.Parameter(torch.ones(1))

    def forward(self, x, labels):
        return {"loss": (self.w * x).mean()}


class WithKeywords(Plain):
    def forward(self, x, labels, **kwargs):
        return super().forward(x, labels)


class Note(TrainerCallback):
    def on_pre_optimizer_step(self, *_, model, **__):
        self.gradient = model.w.grad.item()

    def on_log(self, *_, logs, **__):
        self.loss = float(logs.get("loss", self.loss if hasattr(self, "loss") else 0))


def train(model: nn.Module, accumulate: int) -> tuple[float, float]:
    data = [{"x": torch.ones(1), "labels": torch.ones(1, dtype=torch.long)}] * 32
    arguments = TrainingArguments(
        "out", per_device_train_batch_size=2, gradient_accumulation_steps=accumulate, max_steps=1, learning_rate=0.0,
        logging_steps=1, report_to=[], use_cpu=True, save_strategy="no", remove_unused_columns=False, disable_tqdm=True,
        max_grad_norm=0,
    )
    note = Note()
    trainer = Trainer(model, arguments, train_dataset=data, callbacks=[note])
    trainer.remove_callback(transformers.PrinterCallback)
    trainer.train()
    return note.gradient, note.loss


print("torch", torch.__version__, "transformers", transformers.__version__, "- the right gradient and loss are 1")
found = {}
for model in (Plain, WithKeywords):
    for accumulate in (1, 4):
        found[model, accumulate] = train(model(), accumulate)
        gradient, loss = found[model, accumulate]
        print(f"{model.__name__}, {accumulate} micro-batches: gradient {gradient}, logged loss {loss}")
wrong = found.pop((WithKeywords, 4))
sys.exit(not (wrong == (4, 4) and set(found.values()) == {(1, 1)}))
EOF
bin/python observe.py || exit 1
