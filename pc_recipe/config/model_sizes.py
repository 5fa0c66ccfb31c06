"""The section `[model]`, and the sizes of Llama 2 that `model.flavor` can choose. Other keys change them. To add one, add an
entry to `FLAVORS`."""

import math
from dataclasses import dataclass, replace
from typing import Annotated, Literal

from pc_recipe.config.sections import RESULT, BlockFactors, Few, Positive, Section, Width, key, one_of


@dataclass(frozen=True)
class Flavor:
    """The shape of a model, in TorchTitan's terms (`pc_recipe.train.llama2` builds it)."""

    dim: int
    n_layers: int
    n_heads: int
    multiple_of: int
    """The width of the FFN is 8/3 dim, times `ffn_dim_multiplier`, rounded up to a multiple of this."""
    n_kv_heads: int | None = None
    ffn_dim_multiplier: float | None = None
    rope_theta: float = 10_000.0

    @property
    def head_dim(self) -> int:
        return self.dim // self.n_heads

    @property
    def ffn_dim(self) -> int:
        """TorchTitan's width of the FFN."""
        wanted = int(8 * self.dim / 3)
        if self.ffn_dim_multiplier is not None:
            wanted = int(self.ffn_dim_multiplier * wanted)
        return -(-wanted // self.multiple_of) * self.multiple_of


# The paper's sizes (table 5), smaller ones, and Llama 2's own (70B with grouped-query attention).
FLAVORS: dict[str, Flavor] = {
    "regime": Flavor(dim=32, n_layers=12, n_heads=2, multiple_of=32),
    "conditioning": Flavor(dim=128, n_layers=2, n_heads=4, multiple_of=128),
    "nano": Flavor(dim=128, n_layers=5, n_heads=4, multiple_of=64),
    "debug": Flavor(dim=256, n_layers=4, n_heads=4, multiple_of=64),
    "35M": Flavor(dim=384, n_layers=6, n_heads=6, multiple_of=128),
    "60M": Flavor(dim=512, n_layers=8, n_heads=8, multiple_of=128),
    "134M": Flavor(dim=768, n_layers=12, n_heads=12, multiple_of=256),
    "271M": Flavor(dim=1024, n_layers=16, n_heads=16, multiple_of=256),
    "1B": Flavor(dim=2048, n_layers=18, n_heads=16, multiple_of=256),
    "7B": Flavor(dim=4096, n_layers=32, n_heads=32, multiple_of=256),
    "13B": Flavor(dim=5120, n_layers=40, n_heads=40, multiple_of=256),
    "70B": Flavor(dim=8192, n_layers=80, n_heads=64, n_kv_heads=8, ffn_dim_multiplier=1.3, multiple_of=4096),
}

FlavorName = Annotated[str, one_of(FLAVORS)]


class Model(Section):
    decides = RESULT
    name: Literal["pc_llama2"] = key("pc_llama2", "TorchTitan's train spec.")
    flavor: FlavorName = key("debug", f"Model size: {', '.join(FLAVORS)}. Each size below replaces the flavor's.")
    dim: Width | None = key(None, "Width of the residual stream.")
    n_layers: Few | None = key(None, "Transformer blocks.")
    n_heads: Width | None = key(None, "Attention heads.")
    n_kv_heads: Width | None = key(None, "Heads of keys and values, which attention heads share in equal groups.")
    ffn_dim: Width | None = key(None, "Width of the feed-forward layers; unset: 8/3 dim, rounded up as in the flavor.")
    rope_theta: Positive | None = key(None, "Base of the rotary positions; unset: 10000.")
    vocab_size: Width = key(32_000, "Rows of embedding and head; at least the tokenizer's vocabulary size.")
    init_std: Positive = key(0.02, "Deviation of the blocks' initial weights; that of wo, w2 and w3 falls with depth.")
    init_factors: BlockFactors = key({}, "Factors of the initial weights of some blocks, such as {o = 1.6, ffn = 1.8}.")
    converters: list[Literal["quantize.linear.float8"]] = key([], "TorchTitan's converters of linear layers.")


def shape_of(model: Model) -> Flavor:
    """The config's flavor, changed by the sizes that the config sets itself."""
    given = {name: getattr(model, name) for name in ("dim", "n_layers", "n_heads", "n_kv_heads", "rope_theta")}
    shape = replace(FLAVORS[model.flavor], **{name: size for name, size in given.items() if size is not None})
    if model.ffn_dim is None:
        return shape
    # The multiplier turns 8/3 dim into 1, which is rounded up to the wanted width.
    return replace(shape, ffn_dim_multiplier=0.5 / shape.dim, multiple_of=model.ffn_dim)


def weight_shapes(model: Model) -> dict[str, tuple[int, ...]]:
    """{name: shape} of all weights, as TorchTitan names them, without those that PC adds."""
    shape = shape_of(model)
    dim, ffn_dim, of_keys = shape.dim, shape.ffn_dim, shape.head_dim * (shape.n_kv_heads or shape.n_heads)
    block = {
        "attention.wq": (dim, dim),
        "attention.wk": (of_keys, dim),
        "attention.wv": (of_keys, dim),
        "attention.wo": (dim, dim),
        "feed_forward.w1": (ffn_dim, dim),
        "feed_forward.w2": (dim, ffn_dim),
        "feed_forward.w3": (ffn_dim, dim),
        "attention_norm": (dim,),
        "ffn_norm": (dim,),
    }
    whole: dict[str, tuple[int, ...]] = {"tok_embeddings": (model.vocab_size, dim)}
    for layer in range(shape.n_layers):
        whole |= {f"layers.{layer}.{name}": size for name, size in block.items()}
    whole |= {"norm": (dim,), "output": (model.vocab_size, dim)}
    return {f"{name}.weight": size for name, size in whole.items()}


def count_parameters(model: Model) -> int:
    """Parameters of the whole model, without those that PC adds."""
    return sum(map(math.prod, weight_shapes(model).values()))


def sizes_of(model: Model) -> dict[str, float]:
    """{key of `[model]`: the size in effect}. Two models are the same if these are equal."""
    shape = shape_of(model)
    sizes = {name: getattr(shape, name) for name in ("dim", "n_layers", "n_heads", "ffn_dim", "rope_theta")}
    return sizes | {"n_kv_heads": shape.n_kv_heads or shape.n_heads, "vocab_size": model.vocab_size}
