"""Validation on a fixed set: the same sequences each time, and the mean loss over all tokens of all ranks."""

import torch
from torch import nn
from torchtitan.components.loss import IGNORE_INDEX
from torchtitan.components.validate import BaseValidator, Validator
from torchtitan.tools import utils

from pc.data import Manifest, build_dataloader, require_same_tokenizer
from pc.titan.fsdp_sync import reshard


class FixedValidator(Validator):
    """TorchTitan's validator continues through its data, so each validation uses other batches; this one restarts."""

    def __init__(
        self,
        job_config,
        dp_world_size,
        dp_rank,
        tokenizer,
        parallel_dims,
        loss_fn,
        validation_context,
        maybe_enable_amp,
        metrics_processor,
        pp_schedule=None,
        pp_has_first_stage=None,
        pp_has_last_stage=None,
    ) -> None:
        BaseValidator.__init__(self, job_config)
        self.tokenizer = tokenizer
        self.parallel_dims = parallel_dims
        self.loss_fn = loss_fn
        self.validation_context = validation_context
        self.maybe_enable_amp = maybe_enable_amp
        self.metrics_processor = metrics_processor
        self.pp_schedule = pp_schedule
        self.pp_has_first_stage = pp_has_first_stage
        self.pp_has_last_stage = pp_has_last_stage
        section = job_config.data
        folder = section.validation_path or section.path
        require_same_tokenizer(Manifest.read(section.path), Manifest.read(folder))
        self.validation_dataloader = build_dataloader(
            folder,
            "validation",
            seq_len=job_config.training.seq_len,
            local_batch_size=job_config.validation.local_batch_size,
            dp_rank=dp_rank,
            dp_world_size=dp_world_size,
            vocab_size=job_config.model.vocab_size,
            limit_sequences=section.validation_sequences,
        )

    def is_due(self, step: int) -> bool:
        """Whether to validate after this step."""
        return super().should_validate(step) or step == self.job_config.training.steps

    def should_validate(self, step: int) -> bool:
        """Never, for upstream's loop, which validates after it saves; `PCTrainer.train_step` validates before."""
        return False

    @torch.no_grad()
    def validate(self, model_parts: list[nn.Module], step: int) -> None:
        for model in model_parts:
            model.eval()
        device = utils.device_type
        # Sum of losses and number of tokens on this rank; zero on ranks without the last pipeline stage.
        totals = torch.zeros(2, dtype=torch.float64, device=device)
        for input_dict, labels in self.validation_dataloader:
            input_dict = {key: value.to(device) for key, value in input_dict.items()}
            labels = labels.to(device)
            self.metrics_processor.ntokens_since_last_log += labels.numel()
            inputs, labels, extra_inputs, extra_kwargs = self.post_dataloading_process(input_dict, labels, model_parts)
            loss = self._loss_sum(model_parts, inputs, labels, extra_inputs, extra_kwargs)
            if loss is not None:
                totals += torch.stack([loss.double(), (labels != IGNORE_INDEX).sum().double()])
        for name in ("pp", "loss"):
            mesh = self.parallel_dims.get_optional_mesh(name)
            if mesh is not None:
                torch.distributed.all_reduce(totals, group=mesh.get_group())
        loss_sum, tokens = totals.tolist()
        self.metrics_processor.log_validation(loss=loss_sum / tokens, step=step)
        for model in model_parts:
            model.train()
        reshard(model_parts)

    def _loss_sum(self, model_parts, inputs, labels, extra_inputs, extra_kwargs) -> torch.Tensor | None:
        """Sum of a batch's losses; None on a rank without the last pipeline stage."""
        if not self.parallel_dims.pp_enabled:
            with self.validation_context(), self.maybe_enable_amp:
                return _full(self.loss_fn(model_parts[0](inputs, **extra_inputs, **extra_kwargs), labels))
        losses: list[torch.Tensor] | None = [] if self.pp_has_last_stage else None
        target = labels if self.pp_has_last_stage else None
        arguments = (inputs,) if self.pp_has_first_stage else ()
        extra = {**extra_inputs, **extra_kwargs} if self.pp_has_first_stage else extra_kwargs
        with self.validation_context():
            self.pp_schedule.eval(*arguments, **extra, target=target, losses=losses)
        return _full(torch.stack(losses).sum()).to(utils.device_type) if losses is not None else None


def _full(loss: torch.Tensor) -> torch.Tensor:
    return loss.full_tensor() if isinstance(loss, torch.distributed.tensor.DTensor) else loss
