"""TorchTitan's trainer with PC for any of its models: `torchrun ... -m pc.integrations.torchtitan_train` with the
arguments and the TOML of `torchtitan.train` (`pc.integrations.torchtitan`). The recipe for Llama 2 is
`pc_recipe.train.trainer`."""

from pathlib import Path

import torchtitan.train
from torch import Tensor
from torchtitan.components.checkpoint import MODEL, ModelWrapper

from pc.api import precondition
from pc.command import exit_on_user_error
from pc.errors import UserError
from pc.integrations import give_plain
from pc.preconditioner import Preconditioner
from pc.weight import named_weights


class Trainer(torchtitan.train.Trainer):
    """Makes the preconditioner, and calls it where TorchTitan's trainer has no hook: after the last micro-batch."""

    def __init__(self, job_config) -> None:
        assets = job_config.model.hf_assets_path
        if assets and not Path(assets).is_dir():  # TorchTitan's own error names another key
            raise UserError(f"model.hf_assets_path: no folder {assets}; it should have the model's tokenizer.json")
        super().__init__(job_config)
        self.preconditioner = self._make_preconditioner()

    def _make_preconditioner(self) -> Preconditioner | None:
        """None if no weight here has PC, as in some pipeline stages, or while plain weights, which become W, are still to
        be loaded."""
        settings = self.job_config.checkpoint
        is_plain = settings.enable and settings.initial_load_model_only and not Path(self.checkpointer.folder).exists()
        if self.step == 0 and is_plain:
            return None
        if not any(True for part in self.model_parts for _ in named_weights(part)):
            return None
        preconditioner = precondition(self.model_parts)
        preconditioner.follow(self.optimizers.optimizers)
        self.checkpointer.states[MODEL] = ModelWrapper(self.model_parts)  # the first one listed the state without W
        if settings.enable:
            give_plain(self.checkpointer.sd_adapter, self.model_parts)
        return preconditioner

    def train_step(self, data_iterator) -> None:
        self.preconditioner = self.preconditioner or self._make_preconditioner()
        self._micro_batches_left = self.gradient_accumulation_steps
        super().train_step(data_iterator)

    def forward_backward_step(self, **batch) -> Tensor:
        loss = super().forward_backward_step(**batch)
        self._micro_batches_left -= 1
        if not self._micro_batches_left and self.preconditioner is not None:
            self.preconditioner.pull_back()  # before clipping
        return loss


@exit_on_user_error
def main() -> None:
    torchtitan.train.main(Trainer)


if __name__ == "__main__":
    main()
