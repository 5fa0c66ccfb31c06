"""A small TorchTitan Llama, and a configuration of its diagnostics."""

from types import SimpleNamespace

import torch
from torchtitan.models.llama3 import Transformer, TransformerModelArgs
from torchtitan.models.llama3.model.args import RoPEScalingArgs

from pc_recipe.config import Config
from pc_recipe.config.schema import Diagnostics
from pc_recipe.train.diagnostics import Diagnostics as Diagnosing
from pc_recipe.train.rank_sums import RankNumbers


def transformer() -> Transformer:
    """Two layers, width 48, vocabulary 64; weights large enough that layers and inputs differ visibly."""
    args = TransformerModelArgs(
        dim=48, n_layers=2, n_heads=4, vocab_size=64, multiple_of=16, max_seq_len=32,
        rope_scaling_args=RoPEScalingArgs(scaling_factor=1.0),
    )  # fmt: skip
    model = Transformer(args)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" not in name:
                parameter.copy_(0.1 * torch.randn(parameter.shape, generator=generator))
            else:
                parameter.fill_(1.0)
    return model


def inputs(index: int) -> torch.Tensor:
    """Token ids [2, 16], the same for the same index."""
    return torch.randint(0, 64, (2, 16), generator=torch.Generator().manual_seed(index))


def config_of(freq: int, spectra_freq: int) -> Config:
    return Config(diagnostics=Diagnostics(freq=freq, spectra_freq=spectra_freq))


def one_rank() -> SimpleNamespace:
    return SimpleNamespace(world_size=1, pp=1, dp_replicate=1)


def collect(diagnostics: Diagnosing, step: int) -> dict[str, float]:
    """The metrics of a step on one rank."""
    numbers = RankNumbers(diagnostics.factors, torch.device("cpu"))
    return diagnostics.collect(step, numbers.gather(diagnostics.measure(step)))
