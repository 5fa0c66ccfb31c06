"""Hugging Face's Trainer with PC in schedule "step": accumulation, clipping, checkpoints and resume.

    python examples/hf_trainer.py --steps 20 --folder outputs/hf_trainer

Repeat the command to continue from the newest checkpoint. Needs the extra "evaluate", which has transformers and
accelerate. For schedule "forward", use the plain `Trainer` with a model after `pc.attach`.
"""

import argparse
from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainerCallback, TrainingArguments
from transformers.trainer_utils import get_last_checkpoint

import pc
from pc.schedules import Schedule


class PCState(TrainerCallback):
    """Saves the schedule's state with every checkpoint, and loads it on resume."""

    def __init__(self, schedule: Schedule) -> None:
        self.schedule = schedule

    def _file(self, args, state) -> Path:
        return Path(args.output_dir) / f"checkpoint-{state.global_step}" / "pc.pt"

    def on_save(self, args, state, control, **kwargs) -> None:
        if state.is_world_process_zero:
            torch.save(self.schedule.state_dict(), self._file(args, state))

    def on_train_begin(self, args, state, control, **kwargs) -> None:
        if state.global_step:  # the model's weights are already loaded
            self.schedule.load_state_dict(torch.load(self._file(args, state), map_location="cpu", weights_only=True))
        else:
            self.schedule.materialise()


class PCTrainer(Trainer):
    """Trainer for a model with PC in schedule "step"."""

    def __init__(self, *args, **kwargs) -> None:
        super().__init__(*args, **kwargs)  # which moves the model to its device
        self.pc_schedule = pc.schedule(self.model)
        self.add_callback(PCState(self.pc_schedule))

    def create_optimizer(self, *args, **kwargs) -> torch.optim.Optimizer:
        optimizer = super().create_optimizer(*args, **kwargs)
        self.pc_schedule.follow(optimizer)
        return optimizer

    def training_step(self, *args, **kwargs) -> torch.Tensor:
        loss = super().training_step(*args, **kwargs)
        if self.accelerator.sync_gradients:  # the last micro-batch of a step; clipping comes next
            self.pc_schedule.pull_back()
        return loss


def counting(items: int, vocabulary: int) -> list[dict[str, torch.Tensor]]:
    """Sequences of 32 tokens that count up by one from random starts."""
    starts = torch.randint(vocabulary, (items, 1), generator=torch.Generator().manual_seed(0))
    tokens = (starts + torch.arange(32)) % vocabulary
    return [{"input_ids": row, "labels": row} for row in tokens]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--folder", type=Path, default=Path("outputs/hf_trainer"))
    arguments = parser.parse_args()
    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=64, **sizes))
    pc.attach(model, pc.PCConfig(level=4, schedule="step"))
    settings = TrainingArguments(
        output_dir=str(arguments.folder),
        max_steps=arguments.steps,
        per_device_train_batch_size=8,
        gradient_accumulation_steps=4,
        learning_rate=3e-3,
        lr_scheduler_type="constant",
        max_grad_norm=1.0,
        save_steps=5,
        logging_steps=1,
        report_to="none",
        disable_tqdm=True,
    )
    trainer = PCTrainer(model=model, args=settings, train_dataset=counting(512, 64))
    newest = get_last_checkpoint(str(arguments.folder)) if arguments.folder.exists() else None
    trainer.train(resume_from_checkpoint=newest)
    pc.merge(model).save_pretrained(arguments.folder / "plain")  # an ordinary Llama


if __name__ == "__main__":
    main()
