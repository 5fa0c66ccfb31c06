"""A rank of TorchTitan 0.3.0's trainer with PC on a CPU, in a process of its own, because an environment holds one
TorchTitan: `python -m helpers.torchtitan_03 FOLDER SETTINGS`, with the folder of its packages on PYTHONPATH.

Settings are a JSON object: model, flavor, and changes to the config by dotted keys. `FOLDER/RANK.pt` gets what `main` returns.
"""

import importlib
import json
import math
import os
import random
import sys
from pathlib import Path

import torch
import torch.nn.functional as F
from tokenizers import Tokenizer, models, pre_tokenizers

import pc
from helpers.definition import require_gradients, require_pc, whole

ON_A_CPU = {
    "training.seq_len": 32, "training.local_batch_size": 2, "training.steps": 6, "training.disable_cuda_graphs": True,
    "training.mixed_precision_param": "float32", "checkpoint.interval": 3, "checkpoint.last_save_model_only": False,
    "validator.enable": False, "metrics.log_freq": 1, "debug.seed": 0,
    "activation_checkpoint": None,
}  # fmt: skip


def stub_what_a_cpu_lacks() -> dict[int, float]:
    """Replace what torch 2.13 or a CPU does not have; returns the losses by step, which the trainer fills."""
    import torchtitan.tools.utils as utils

    from pc_recipe.train.cpu import CPU_MODULE

    utils.device_type, utils.device_module, utils.get_peak_flops = "cpu", CPU_MODULE, lambda _: math.nan
    utils.get_local_device = lambda: torch.device("cpu")
    if not hasattr(torch.distributed, "set_timeout"):
        torch.distributed.set_timeout = lambda *args, **kwargs: None
    import torchtitan.models.common.attention as attention
    import torchtitan.trainer
    from torchtitan.components.metrics import MetricsProcessor

    def causal(q, k, v, *, scale=None, enable_gqa=False, **_):  # FlexAttention has no backward pass on CPUs
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale, enable_gqa=enable_gqa), None

    attention.FlexAttention.compiled_flex_attn = staticmethod(causal)
    histc = torch.histc  # on CPUs it takes no integers, such as TorchTitan's expert indices
    torch.histc = lambda x, *args, **kwargs: histc(x.float(), *args, **kwargs).to(x.dtype)
    torchtitan.trainer.time.sleep = lambda _: None
    losses: dict[int, float] = {}
    MetricsProcessor.log = lambda self, step, loss, *args, **kwargs: losses.update({step: float(loss)})
    return losses


def make_assets(folder: Path) -> None:
    """A tokenizer of whole words, and a text that repeats twenty of them."""
    draw = random.Random(0)
    words = ["".join(draw.choices("abcdefgh", k=6)) for _ in range(200)]
    tokenizer = Tokenizer(models.WordLevel({word: index for index, word in enumerate(words)}, unk_token=words[0]))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    (folder / "text").mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    special = {"bos_token": words[0], "eos_token": words[1], "add_bos_token": False}
    (folder / "tokenizer_config.json").write_text(json.dumps(special))
    (folder / "text" / "text.json").write_text(f"{json.dumps({'text': ' '.join(words[20:40] * 5)})}\n" * 200)


def make_config(folder: Path, model: str, flavor: str = "debugmodel", **changes):
    module = importlib.import_module(f"torchtitan.models.{model}.config_registry")
    config = getattr(module, f"{model}_{flavor}")()
    config.model_spec = importlib.import_module(f"torchtitan.models.{model}").model_registry(
        flavor, attn_backend="flex"
    )
    assets = folder / "assets"
    config.hf_assets_path, config.dump_folder = str(assets), str(folder)
    config.dataloader.dataset_path = str(assets / "text")
    for key, value in (ON_A_CPU | changes).items():
        *path, last = key.split(".")
        section = config
        for name in path:
            section = getattr(section, name)
        setattr(section, last, value)
    return config


def fill_gradients(trainer) -> torch.Tensor:
    """In place of forward and backward passes, for a model whose attention does not run on CPUs."""
    for part in trainer.model_parts:
        for name, parameter in part.named_parameters():
            if not name.endswith(("_orig", "_gamma")):
                parameter.grad = torch.randn_like(parameter)
    return torch.zeros(())


def main(folder: Path, settings: dict) -> dict:
    """Train. Compares the last gradients of W and gamma, and the last PC(W), with their definitions.

    Returns:
        losses by step; the model's state dict in float64; the number of weights with PC.
    """
    from torch.distributed.fsdp import FSDPModule

    losses = stub_what_a_cpu_lacks()
    blocks, runs = settings.pop("blocks", ["o", "ffn"]), settings.pop("runs", True)
    config = make_config(folder, **settings)
    if blocks:
        from pc.integrations.torchtitan_03 import with_pc

        config = with_pc(config, pc.PCConfig(level=4, blocks=tuple(blocks)))
    trainer = config.build()
    for part in trainer.model_parts:
        for module in part.modules():
            if isinstance(module, FSDPModule):
                module.set_force_sum_reduction_for_comms(True)  # gloo lacks the scaled sum that TorchTitan asks for
    if not runs:
        trainer.fwd_bwd_fn = lambda *_: fill_gradients(trainer)
    preconditioner = getattr(trainer, "preconditioner", None)
    if preconditioner is not None:
        pull_back = preconditioner.pull_back

        def checked(**kwargs) -> None:
            with_check = trainer.step == config.training.steps
            require_gradients(preconditioner, lambda: pull_back(**kwargs)) if with_check else pull_back(**kwargs)

        preconditioner.pull_back = checked
    trainer.train()
    weights = preconditioner.weights.values() if preconditioner is not None else []
    for weight in weights:
        require_pc(weight)
    state = {key: whole(value) for part in trainer.model_parts for key, value in part.state_dict().items()}
    trainer.close()
    return {"losses": losses, "weights": len(weights), "state": state}


if __name__ == "__main__":
    made = main(Path(sys.argv[1]), json.loads(sys.argv[2]))
    torch.save(made, Path(sys.argv[1]) / f"{os.environ['RANK']}.pt")
