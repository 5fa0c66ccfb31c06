"""Lightning's Trainer with PC: accumulation, clipping, validation before training, checkpoints and resume.

    python examples/lightning_trainer.py --epochs 5 --folder outputs/lightning
    torchrun --nproc-per-node 2 examples/lightning_trainer.py --epochs 5 --folder outputs/lightning

Repeat the command to continue from the last checkpoint. Needs the extra "integrations".
"""

import argparse
import os
from pathlib import Path

import lightning.pytorch as lightning
import torch
from torch import nn

import pc
from pc.integrations.lightning import PCCallback


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(width)
        self.up = nn.Linear(width, 4 * width, bias=False)
        self.down = nn.Linear(4 * width, width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:  # [batch, tokens, width]
        return x + self.down(nn.functional.silu(self.up(self.norm(x))))


class Model(lightning.LightningModule):
    """Learns the next token of sequences that count up by one."""

    def __init__(self, vocabulary: int = 64, width: int = 64) -> None:
        super().__init__()
        self.net = nn.Sequential(
            nn.Embedding(vocabulary, width), Block(width), Block(width), nn.Linear(width, vocabulary, bias=False)
        )
        pc.attach(self.net, pc.PCConfig(level=4, blocks=("*.up", "*.down")))

    def training_step(self, tokens: torch.Tensor, _) -> torch.Tensor:
        logits = self.net(tokens[:, :-1])
        return nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())

    def validation_step(self, tokens: torch.Tensor, index: int) -> None:
        self.log("loss", self.training_step(tokens, index), sync_dist=True)

    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters(), lr=3e-3)
        return [optimizer], [torch.optim.lr_scheduler.LambdaLR(optimizer, lambda epoch: 0.9**epoch)]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--folder", type=Path, default=Path("outputs/lightning"))
    arguments = parser.parse_args()
    torch.manual_seed(0)
    tokens = (torch.randint(64, (128, 1), generator=torch.Generator().manual_seed(0)) + torch.arange(32)) % 64
    loader = torch.utils.data.DataLoader(tokens, batch_size=8)
    model = Model()
    trainer = lightning.Trainer(
        max_epochs=arguments.epochs,
        accumulate_grad_batches=4,
        gradient_clip_val=1.0,
        callbacks=[PCCallback()],
        strategy="ddp" if int(os.environ.get("WORLD_SIZE", "1")) > 1 else "auto",
        devices=int(os.environ.get("LOCAL_WORLD_SIZE", "1")),
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    checkpoint = arguments.folder / "last.ckpt"
    (before,) = trainer.validate(model, loader, verbose=False)
    trainer.fit(model, loader, ckpt_path=checkpoint if checkpoint.exists() else None)
    trainer.save_checkpoint(checkpoint)
    (after,) = trainer.validate(model, loader, verbose=False)
    pc.merge(model.net)
    if trainer.is_global_zero:
        print(f"loss {before['loss']:.4f} before, loss {after['loss']:.4f} after")
        torch.save(model.net.state_dict(), arguments.folder / "plain.pt")


if __name__ == "__main__":
    main()
