"""Validation on a fixed set: the same sequences each time, and the mean loss over all tokens of all ranks."""

import math
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torchtitan.components.loss import IGNORE_INDEX

from pc.errors import UserError
from pc.preconditioner import reshard
from pc_recipe.config import Config
from pc_recipe.data.loader import GlobalOrderLoader
from pc_recipe.data.manifest import Manifest, require_same_tokenizer
from pc_recipe.files.run_log import BITS_PER_BYTE, unique_names
from pc_recipe.train.progress import is_due


class FixedValidator:
    """TorchTitan's validator continues through its data, so each validation uses other batches; this one restarts."""

    def __init__(self, config: Config, dp_rank: int, dp_world_size: int) -> None:
        self._freq, self._last = config.validation.freq, config.training.steps
        section, batch = config.data, config.validation.local_batch_size
        folders = section.validation_folders
        self._names = unique_names([Path(folder) for folder in folders])
        self._weights = torch.tensor(list(folders.values()), dtype=torch.float64)
        self._dataloaders = [
            GlobalOrderLoader(
                folder,
                "validation",
                seq_len=config.training.seq_len,
                local_batch_size=config.training.local_batch_size if batch == -1 else batch,
                dp_rank=dp_rank,
                dp_world_size=dp_world_size,
                vocab_size=config.model.vocab_size,
                limit_sequences=section.validation_sequences,
            )
            for folder in folders
        ]
        self.manifests = [manifest for loader in self._dataloaders for manifest in loader.manifests]
        require_same_tokenizer(Manifest.read(next(iter(section.folders))), self.manifests[0])
        self._text_bytes = _text_bytes(self.manifests[0])

    def is_due(self, step: int) -> bool:
        """Whether to validate after this step."""
        return is_due(step, self._freq, self._last)

    def should_validate(self, step: int) -> bool:
        """Never, for TorchTitan's loop, which validates after it saves; `Trainer.train_step` validates before."""
        return False

    @torch.no_grad()
    def validate(self, trainer: Any) -> None:
        """Log the loss, in nats per token and in bits per byte of text; with several folders, their weighted mean and each
        one's loss. All ranks call it.

        Args:
            trainer: the `pc_recipe.train.trainer.Trainer`.
        """
        begin = time.perf_counter()
        for model in trainer.model_parts:
            model.eval()
        text_bytes = self._text_bytes.to(trainer.device)
        totals = torch.stack([_sum_over_batches(trainer, loader, text_bytes) for loader in self._dataloaders])
        for name in ("pp", "loss"):
            mesh = trainer.parallel_dims.get_optional_mesh(name)
            if mesh is not None:
                torch.distributed.all_reduce(totals, group=mesh.get_group())
        losses, bytes_per_token = (totals[:, ::2] / totals[:, 1:2]).cpu().T
        loss, size = ((one @ self._weights / self._weights.sum()).item() for one in (losses, bytes_per_token))
        more = {"validation_seconds": time.perf_counter() - begin}
        if size > 0:
            more[BITS_PER_BYTE] = loss / size / math.log(2)
        if len(losses) > 1:
            more |= {f"validation_loss/{name}": one for name, one in zip(self._names, losses.tolist(), strict=True)}
        trainer.metrics_processor.log_validation(loss, trainer.step, more)
        for model in trainer.model_parts:
            model.train()
        reshard(trainer.model_parts)  # a pass without gradients leaves the weights gathered


def _text_bytes(manifest: Manifest) -> Tensor:
    """`Tokenizer.text_bytes` of the data; zeros if they are not known: training needs no tokenizer that can be loaded."""
    sizes = None
    with suppress(UserError):
        sizes = manifest.load_tokenizer().text_bytes
    return torch.zeros(manifest.tokenizer.vocab_size) if sizes is None else torch.from_numpy(sizes)


def _sum_over_batches(trainer: Any, dataloader: GlobalOrderLoader, text_bytes: Tensor) -> Tensor:
    """Sum of losses, number of tokens and bytes of their text on this rank [3]; zero on ranks without the last pipeline
    stage."""
    totals = torch.zeros(3, dtype=torch.float64, device=trainer.device)
    for input_dict, labels in dataloader:
        input_dict = {key: value.to(trainer.device) for key, value in input_dict.items()}
        inputs, labels, _, more = trainer.post_dataloading_process(input_dict, labels.to(trainer.device))
        loss = _sum_losses(trainer, inputs, labels, more)
        if loss is not None:
            counted = labels != IGNORE_INDEX
            sizes = torch.where(counted, text_bytes[labels.clamp(min=0)], 0)
            totals += torch.stack([loss.double(), counted.sum().double(), sizes.sum().double()])
    return totals


def _sum_losses(trainer: Any, inputs: Tensor, labels: Tensor, more: dict) -> Tensor | None:
    """Sum of a batch's losses; None on a rank without the last pipeline stage."""
    if not trainer.parallel_dims.pp_enabled:
        with trainer.train_context(), trainer.maybe_enable_amp:
            return _to_full_tensor(trainer.loss_fn(trainer.model_parts[0](inputs, **more), labels))
    losses: list[Tensor] | None = [] if trainer.pp_has_last_stage else None
    target = labels if trainer.pp_has_last_stage else None
    arguments = (inputs,) if trainer.pp_has_first_stage else ()
    with trainer.train_context():
        trainer.pp_schedule.eval(*arguments, **more, target=target, losses=losses)
    return _to_full_tensor(torch.stack(losses).sum()).to(trainer.device) if losses is not None else None


def _to_full_tensor(loss: Tensor) -> Tensor:
    return loss.full_tensor() if isinstance(loss, DTensor) else loss
