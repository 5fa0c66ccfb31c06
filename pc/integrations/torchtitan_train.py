"""TorchTitan's trainer with PC for any of its models: `torchrun ... -m pc.integrations.torchtitan_train` with the
arguments and the TOML of `torchtitan.train` (`pc.integrations.torchtitan`). The recipe for Llama 2 is
`pc_recipe.train.trainer`."""

from pathlib import Path

import torchtitan.train
from torch import Tensor

from pc.errors import UserError, exit_on_user_error
from pc.factory import precondition
from pc.weight import named_weights


class Trainer(torchtitan.train.Trainer):
    """Calls the preconditioner where TorchTitan's trainer has no hook: after the last micro-batch, and in
    checkpoints."""

    def __init__(self, job_config) -> None:
        assets = Path(job_config.model.hf_assets_path)
        if not assets.is_dir():  # TorchTitan names another key
            raise UserError(f"model.hf_assets_path: no folder {assets}; it should have the model's tokenizer.json")
        super().__init__(job_config)
        self.preconditioner = None  # without PC, or in a pipeline stage without weights of PC
        if any(True for part in self.model_parts for _ in named_weights(part)):
            self.preconditioner = precondition(self.model_parts)
            self.preconditioner.follow(self.optimizers.optimizers)
            for weight in self.preconditioner.weights.values():
                if weight.gamma is not None:
                    weight.gamma.requires_grad_()  # TorchTitan saves optimizer states of such parameters alone
            self.checkpointer.states["pc"] = self.preconditioner

    def train_step(self, data_iterator) -> None:
        if self.preconditioner and not self.preconditioner.holds_pc:
            self.preconditioner.write_pc()  # the first step of a new run; any checkpoint is loaded by now
        self._micro_batches = 0
        super().train_step(data_iterator)

    def forward_backward_step(self, **batch) -> Tensor:
        loss = super().forward_backward_step(**batch)
        self._micro_batches += 1
        if self.preconditioner and self._micro_batches == self.gradient_accumulation_steps:
            self.preconditioner.pull_back()
        return loss


@exit_on_user_error
def main() -> None:
    torchtitan.train.main(Trainer)


if __name__ == "__main__":
    main()
