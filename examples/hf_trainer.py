"""Hugging Face's Trainer with PC: accumulation, clipping, evaluation, checkpoints and resume.

    python examples/hf_trainer.py --steps 20 --folder outputs/hf_trainer
    torchrun --nproc-per-node 2 examples/hf_trainer.py --steps 20 --folder outputs/hf_trainer

Repeat the command to continue from the newest checkpoint. Needs the extra "integrations".
"""

import argparse
from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments
from transformers.trainer_utils import get_last_checkpoint

import pc
from pc.integrations.hugging_face import PCTrainerMixin


class PCTrainer(PCTrainerMixin, Trainer):
    """Trainer for a model with PC."""


def counting(items: int, vocabulary: int) -> list[dict[str, torch.Tensor]]:
    """Sequences of 32 tokens that count up by one from random starts."""
    starts = torch.randint(vocabulary, (items, 1), generator=torch.Generator().manual_seed(0))
    tokens = (starts + torch.arange(32)) % vocabulary
    return [{"input_ids": row, "labels": row} for row in tokens]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--folder", type=Path, default=Path("outputs/hf_trainer"))
    arguments = parser.parse_args()
    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=64, **sizes))
    pc.attach(model, pc.PCConfig(level=4))
    settings = TrainingArguments(
        output_dir=str(arguments.folder),
        use_cpu=not torch.accelerator.is_available(),  # lets several processes on CPUs find each other
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
    data = counting(512, 64)
    trainer = PCTrainer(model=model, args=settings, train_dataset=data, eval_dataset=data[:32])
    newest = get_last_checkpoint(str(arguments.folder)) if arguments.folder.exists() else None
    trainer.train(resume_from_checkpoint=newest)
    print(f"after: loss {trainer.evaluate()['eval_loss']:.4f}")
    pc.merge(model)
    if trainer.is_world_process_zero():
        model.save_pretrained(arguments.folder / "plain")  # an ordinary Llama


if __name__ == "__main__":
    main()
