"""Llama 2 on TorchTitan's Llama: sizes, and an initialisation that is the same for every parallel layout."""

import hashlib
import math
from dataclasses import asdict, dataclass, field

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.nn.attention import SDPBackend
from torchtitan.models.attention import ScaledDotProductAttentionWrapper
from torchtitan.models.llama3.model.args import RoPEScalingArgs, TransformerModelArgs
from torchtitan.models.llama3.model.model import Transformer

from pc.shards import local, own_slice
from pc.targets import clean_name
from pc_recipe.config import Config
from pc_recipe.config.model_sizes import shape_of
from pc_recipe.config.sections import block_factor


@dataclass
class Llama2Args(TransformerModelArgs):
    """Llama 2: rotary base 10000 without scaling (TorchTitan's default scales), untied head, 32,000 tokens."""

    vocab_size: int = 32_000
    rope_theta: float = 10_000
    norm_eps: float = 1e-5
    rope_scaling_args: RoPEScalingArgs = field(default_factory=lambda: RoPEScalingArgs(scaling_factor=1.0))
    init_seed: int = 0
    """Seed of the initial weights; `debug.seed`."""

    init_std: float = 0.02
    """Standard deviation of a block's initial weights, before the factor for depth; `model.init_std`."""

    init_factors: dict[str, float] = field(default_factory=dict)
    """{block or group: factor of its initial weights}; `model.init_factors`."""

    def update_from_config(self, job_config, **kwargs) -> None:
        vars(self).update(vars(model_args_of(job_config.ours)))


def model_args_of(config: Config) -> Llama2Args:
    """The arguments of a run's model."""
    return Llama2Args(
        **asdict(shape_of(config.model)),
        vocab_size=config.model.vocab_size,
        max_seq_len=config.training.seq_len,
        init_seed=config.debug.seed,
        init_std=config.model.init_std,
        init_factors=config.model.init_factors,
    )


class Llama2(Transformer):
    """TorchTitan's transformer with an initialisation that does not depend on the parallel layout.

    Each parameter is drawn whole by a generator of its own, seeded with its name, and each rank keeps its shard. With
    torch's random initialisation, all CPU ranks draw the same shard, and pipeline stages draw other numbers than one
    process.
    """

    model_args: Llama2Args

    def __init__(self, model_args: Llama2Args) -> None:
        super().__init__(model_args)
        for module in self.modules():
            if isinstance(module, ScaledDotProductAttentionWrapper):
                # TorchTitan's other kernels do not support float32, so it would use the one that stores all scores.
                module.sdpa_backends = [*module.sdpa_backends[:-1], SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]

    def init_weights(self, buffer_device: torch.device | None = None) -> None:
        """Initialise all parameters and buffers; `pc.precondition` adds PC's later."""
        with torch.device(buffer_device or self.freqs_cis.device):
            self.freqs_cis = self._precompute_freqs_cis()
        with torch.no_grad():
            for name, parameter in self.named_parameters():
                draw_parameter(clean_name(name), parameter, self.model_args)


def draw_parameter(name: str, parameter: Tensor, args: Llama2Args) -> None:
    """Initialise one parameter [n] or [n, m] in place (the released code's scheme; see `initial_std`)."""
    if name.endswith("norm.weight"):
        parameter.fill_(1.0)
        return
    digest = hashlib.sha256(f"{args.init_seed}.{name}".encode()).digest()
    generator = torch.Generator(parameter.device).manual_seed(int.from_bytes(digest[:8], "big", signed=True))
    whole, std = torch.empty(parameter.shape, device=parameter.device), initial_std(name, args)
    if name == "output.weight":  # truncated at three standard deviations, by the inverse of the normal distribution
        bound = math.erf(3 / math.sqrt(2))
        whole.uniform_(-bound, bound, generator=generator).erfinv_().mul_(math.sqrt(2) * std)
    else:
        whole.normal_(0, std, generator=generator)
    if isinstance(parameter, DTensor):
        whole = own_slice(whole, parameter.device_mesh, parameter.placements)
    local(parameter).copy_(whole)


def initial_std(name: str, args: Llama2Args) -> float:
    """Initial standard deviation of a matrix: embedding 1; wq, wk, wv, w1 `init_std`; wo, w2, w3 decreasing with depth;
    each times the block's factor; head d^-0.5. Raises ValueError for any other parameter."""
    if name == "tok_embeddings.weight":
        return 1.0
    if name == "output.weight":
        return args.dim**-0.5
    _, layer, _, matrix, _ = name.split(".")
    std = args.init_std * block_factor(args.init_factors, name.removesuffix(".weight"))
    if matrix in ("wq", "wk", "wv", "w1"):
        return std
    if matrix in ("wo", "w2", "w3"):
        return std / math.sqrt(2 * (int(layer) + 1))
    raise ValueError(f"no initialisation for {name}")
