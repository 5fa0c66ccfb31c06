#!/usr/bin/env bash
# lightning 2.6.6: with two optimizers stepped by hand, max_steps ends the training after half of the batches.
#
# One would guess: global_step, max_steps and every_n_train_steps count updates of the model.
# What happens: each call of an optimizer's step counts. Muon for the matrices and AdamW for the rest, both stepped once per
# batch, make two steps of a batch: max_steps=10 ends after 5 batches. A schedule over max_steps that is stepped once per
# batch then ends at half of its cosine, where the rate is still high.
# Where it matters: Muon, whose torch version takes matrices only, needs a second optimizer: token budget and schedule are half
# of what the configuration says.
#
# Exit status: 0 as written here, 1 changed, 2 could not install. PACKAGES="..." tries other versions.
set -u
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder" || exit 2
export PIP_DISABLE_PIP_VERSION_CHECK=1 PYTHONWARNINGS=ignore
python3 -m venv . && bin/pip install -q --no-compile ${PACKAGES:-torch==2.13.0 lightning==2.6.6} >pip.log 2>&1 ||
    { tail -n 1 pip.log >&2; exit 2; }
cat >observe.py <<'EOF'
import logging
import sys
import warnings

warnings.simplefilter("ignore")
import lightning
import torch
from torch import nn

logging.disable(logging.WARNING)


class Model(lightning.LightningModule):
    def __init__(self, kinds):
        super().__init__()
        self.layer, self.kinds, self.batches = nn.Linear(4, 4), kinds, 0
        self.automatic_optimization = False

    def configure_optimizers(self):
        return [torch.optim.Muon([self.layer.weight]), torch.optim.AdamW([self.layer.bias])][: self.kinds]

    def training_step(self, batch, index):
        self.batches += 1
        self.manual_backward(self.layer(batch).square().mean())
        for optimizer in self.optimizers() if self.kinds > 1 else [self.optimizers()]:
            optimizer.step()
            optimizer.zero_grad()


def batches(kinds: int) -> int:
    model = Model(kinds)
    trainer = lightning.Trainer(
        max_steps=10, accelerator="cpu", logger=False, enable_checkpointing=False, enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(model, torch.utils.data.DataLoader(torch.randn(100, 4), batch_size=2))
    return model.batches


print("torch", torch.__version__, "lightning", lightning.__version__)
found = {kinds: batches(kinds) for kinds in (1, 2)}
for kinds, number in found.items():
    print(f"max_steps=10 with {kinds} optimizers: {number} batches")
sys.exit(found != {1: 10, 2: 5})
EOF
bin/python observe.py || exit 1
