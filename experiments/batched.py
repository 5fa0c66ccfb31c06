"""Train all runs of sweeps in one process: many seeds, rates and arms of one small Llama side by side, on a GPU that a single
one would leave idle.

python -m experiments.batched SWEEP.toml... --output FOLDER [--seconds 500]

Every weight is [S, out, in] for the S runs of a sweep, every product one batched matmul. The runs' losses are added, so each
gets its own gradient; clipping and rates are by run. Initial weights, batches, schedule and PC are the recipe's, and so are the
losses, up to rounding; on a GPU matmuls of the model are in TF32. The runs may differ in seed, rate, `init_factors` and
`lr_factors`, and in whether PC is on; the optimizer is AdamW.

FOLDER/NAME.jsonl has the rows of NAME.toml, as in the runs.jsonl of experiments; until the runs' end they are in
FOLDER/NAME.partial.jsonl, written after each validation.
"""

import argparse
import json
import math
import time
from collections.abc import Iterator, Sequence
from itertools import count
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor
from torchtitan.models.llama3.model.model import apply_rotary_emb

from experiments.evidence import CONDITION
from pc.blocks import block_of, matches
from pc.errors import UserError, exit_on_user_error
from pc.method import method_of
from pc.spectral import initial_vectors, modified_condition_number, singular_values
from pc_recipe.config import Config
from pc_recipe.config.command_line import at_least_one
from pc_recipe.config.run_key import all_values
from pc_recipe.config.sections import block_factor
from pc_recipe.data.loader import FolderSequences, GlobalOrderLoader
from pc_recipe.data.manifest import Manifest
from pc_recipe.data.order import shuffled
from pc_recipe.files.atomic import write_atomically
from pc_recipe.files.run_log import VALIDATION
from pc_recipe.runs.run import Run
from pc_recipe.runs.sweep.spec import Sweep, load
from pc_recipe.train.environment import read_commit, read_processor, read_versions
from pc_recipe.train.llama2 import Llama2, model_args_of
from pc_recipe.train.optimizers import is_hidden_matrix, rate_factor
from pc_recipe.train.progress import is_due

MAY_DIFFER = {
    "debug.seed",
    "data.seed",
    "optimizer.lr",
    "optimizer.lr_factors",
    "model.init_factors",
    "job.dump_folder",
}
PROGRESS = 100  # steps between two lines

Weights = dict[str, Tensor]
"""{name in the recipe's model: [S, ...]}"""


def losses(weights: Weights, tokens: Tensor, heads: int, rotation: Tensor) -> Tensor:
    """Mean loss of each run [S] on its own sequences.

    Args:
        tokens: [S, B, T + 1], the first T of which are inputs, and the last T labels.
        rotation: of the rotary embedding, complex [T, head_dim / 2].
    """
    inputs, labels = tokens[..., :-1], tokens[..., 1:]
    runs, batch, length = inputs.shape
    _, vocabulary, dim = weights["tok_embeddings.weight"].shape

    def times(x: Tensor, layer: str) -> Tensor:
        """[S, B T, in] to [S, B T, out]."""
        return torch.bmm(x, weights[f"{layer}.weight"].mT)

    def norm(x: Tensor, layer: str) -> Tensor:
        return F.rms_norm(x, (dim,), eps=1e-5) * weights[f"{layer}.weight"][:, None]

    def heads_of(x: Tensor) -> Tensor:
        return x.view(runs * batch, length, heads, -1)

    places = inputs.flatten(1) + vocabulary * torch.arange(runs, device=inputs.device)[:, None]
    x = F.embedding(places, weights["tok_embeddings.weight"].flatten(0, 1))
    for layer in range(sum(name.endswith("wq.weight") for name in weights)):
        of = f"layers.{layer}."
        y = norm(x, of + "attention_norm")
        q, k, v = (heads_of(times(y, f"{of}attention.{name}")) for name in ("wq", "wk", "wv"))
        q, k, v = (part.transpose(1, 2) for part in (*apply_rotary_emb(q, k, rotation), v))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + times(y.transpose(1, 2).reshape(runs, batch * length, dim), of + "attention.wo")
        y = norm(x, of + "ffn_norm")
        y = F.silu(times(y, of + "feed_forward.w1")) * times(y, of + "feed_forward.w3")
        x = x + times(y, of + "feed_forward.w2")
    logits = times(norm(x, "norm"), "output")
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="none").view(runs, -1).mean(1)


class Training:
    """The state of all runs of a sweep, after `step` steps.

    Args:
        configs: those with PC first.
        names: of the layers that PC is for, with or without it.

    Attributes:
        trained: W of all layers, and gammas by the layer's name.
        used: what the forward pass multiplies by: PC(W) of the runs with PC, and W.
    """

    def __init__(self, configs: Sequence[Config], device: torch.device) -> None:
        self.config, self.device, self.step = configs[0], device, 0
        self.with_pc = sum(config.pc.enable for config in configs)
        models = [Llama2(model_args_of(config)) for config in configs]
        for model in models:
            model.init_weights()
        self.heads, self.rotation = models[0].model_args.n_heads, models[0].freqs_cis.to(device)
        self.trained: Weights = {
            name: torch.stack([dict(model.named_parameters())[name].detach() for model in models]).to(device)
            for name, _ in models[0].named_parameters()
        }
        self.used = {name: weight.clone().requires_grad_() for name, weight in self.trained.items()}
        layers = [name.removesuffix(".weight") for name in self.trained]
        self.layers = [name for name in layers if block_of(name)]
        blocks = {name: [entry for entry in self.config.pc.blocks if matches(entry, name)] for name in self.layers}
        self.names = [name for name in self.layers if blocks[name]]
        self.methods = {}
        self.vectors: dict[str, list[Tensor]] = {}
        """u, v and what pull back can reuse"""
        if self.with_pc:
            pc = self.config.pc.pc_config
            self.methods = {name: method_of(pc.for_block(blocks[name][0])) for name in self.names}
            for name in self.names:
                self.trained[name] = torch.ones(self.with_pc, 1, device=device)  # gamma
                vectors = initial_vectors(name, self.trained[f"{name}.weight"].shape[1:])
                self.vectors[name] = [vector.expand(self.with_pc, -1).to(device) for vector in vectors]
        optimizer = self.config.optimizer
        self.means = {name: torch.zeros_like(weight) for name, weight in self.trained.items()}
        self.squares = {name: torch.zeros_like(weight) for name, weight in self.trained.items()}
        self.share = rate_factor(self.config.lr_scheduler, self.config.training.steps)
        self.rates = {
            name: self._by_run(weight, [_rate(c, name) for c in configs]) for name, weight in self.trained.items()
        }
        self.decays = {
            name: optimizer.weight_decay * (torch.ones_like(rate) if optimizer.independent_decay else rate)
            for name, rate in self.rates.items()
        }
        self._write()

    def _by_run(self, weight: Tensor, values: Sequence[float]) -> Tensor:
        """[S, 1, ...], to be multiplied by a weight; of a gamma [S with PC, 1]."""
        return torch.tensor(values[: len(weight)], device=self.device).view(-1, *[1] * (weight.dim() - 1))

    @torch.no_grad()
    def _write(self) -> None:
        """`used` from `trained`."""
        for name, weight in self.used.items():
            weight.copy_(self.trained[name])
        for name, method in self.methods.items():
            raw, (u, v, *_) = self.trained[f"{name}.weight"][: self.with_pc], self.vectors[name]
            result, u, v, _, *kept = method.write(raw, self.trained[name], u, v)
            self.used[f"{name}.weight"][: self.with_pc] = result
            self.vectors[name] = [u, v, *kept]

    def advance(self, tokens: Tensor) -> Tensor:
        """A step on [S, B, T + 1]; the losses [S] before it."""
        found = losses(self.used, tokens, self.heads, self.rotation)
        gradients = dict(zip(self.used, torch.autograd.grad(found.sum(), list(self.used.values())), strict=True))
        with torch.no_grad():
            for name, method in self.methods.items():
                raw, gradient = self.trained[f"{name}.weight"][: self.with_pc], gradients[f"{name}.weight"]
                of_raw, gradients[name] = method.pull_back(
                    raw, gradient[: self.with_pc], self.trained[name], *self.vectors[name]
                )
                gradient[: self.with_pc] = of_raw
            self._clip(gradients)
            self._adamw(gradients)
        self._write()
        return found.detach()

    def _clip(self, gradients: Weights) -> None:
        """Each run's gradients by their norm; those of gammas are of the first runs."""
        squares = torch.zeros(len(self.used["norm.weight"]), device=self.device)
        for gradient in gradients.values():
            squares[: len(gradient)] += gradient.flatten(1).square().sum(1)
        factors = (self.config.training.max_norm / (squares.sqrt() + 1e-6)).clamp(max=1.0)
        for gradient in gradients.values():
            gradient.mul_(factors[: len(gradient)].view(-1, *[1] * (gradient.dim() - 1)))

    def _adamw(self, gradients: Weights) -> None:
        optimizer, share = self.config.optimizer, self.share(self.step)
        self.step += 1
        corrections = [1 - beta**self.step for beta in (optimizer.beta1, optimizer.beta2)]
        for name, weight in self.trained.items():
            mean, square, gradient = self.means[name], self.squares[name], gradients[name]
            mean.lerp_(gradient, 1 - optimizer.beta1)
            square.mul_(optimizer.beta2).addcmul_(gradient, gradient, value=1 - optimizer.beta2)
            update = mean / (square.sqrt() / math.sqrt(corrections[1]) + optimizer.eps)
            weight.mul_(1 - share * self.decays[name]).sub_(share / corrections[0] * self.rates[name] * update)

    @torch.no_grad()
    def validate(self) -> Tensor:
        """The final losses [S] on the recipe's fixed sequences, the same for all runs."""
        config, runs = self.config, len(self.used["norm.weight"])
        loader = GlobalOrderLoader(
            next(iter(config.data.validation_folders)),
            "validation",
            seq_len=config.training.seq_len,
            local_batch_size=config.training.local_batch_size,
            dp_rank=0,
            dp_world_size=1,
            vocab_size=config.model.vocab_size,
            limit_sequences=config.data.validation_sequences,
        )
        total, number = torch.zeros(runs, dtype=torch.float64, device=self.device), 0
        for inputs, labels in loader:
            rows = (labels >= 0).all(1)  # the last batch is filled up
            tokens = torch.cat([inputs["input"][rows], labels[rows, -1:]], dim=1).to(self.device)
            total += losses(self.used, tokens.expand(runs, -1, -1), self.heads, self.rotation) * len(tokens)
            number += len(tokens)
        return total / number

    @torch.no_grad()
    def conditions(self) -> dict[str, Tensor]:
        """{logged name: condition numbers of effective weights [S], geometric means over layers}"""
        found = {
            name: modified_condition_number(singular_values(self.used[f"{name}.weight"].cpu())) for name in self.layers
        }
        of_qkv = [name for name in self.layers if block_of(name) in ("q", "k", "v")]
        groups = dict(zip(CONDITION, (self.names, of_qkv, self.layers), strict=True))
        return {key: torch.stack([found[name] for name in group]).log().mean(0).exp() for key, group in groups.items()}


def _rate(config: Config, name: str) -> float:
    """The peak rate of a weight, or of a gamma, whose name is its layer's."""
    is_scaled = name.endswith(".weight") and is_hidden_matrix(name)
    factors = config.optimizer.lr_factors if is_scaled else {}
    return config.optimizer.lr * block_factor(factors, name.removesuffix(".weight"))


def batches(configs: Sequence[Config], device: torch.device) -> Iterator[Tensor]:
    """The recipe's batches of each run's seed, [S, B, T + 1]. All tokens are on the device."""
    config, seeds = configs[0], [config.data.seed for config in configs]
    manifest, length = Manifest.read(next(iter(config.data.folders))), config.training.seq_len
    sequences = FolderSequences(manifest, "train", length, 0)
    tokens = torch.from_numpy(sequences.stream.read(0, manifest.tokens("train")).astype("int32")).to(device)
    distinct = list(dict.fromkeys(seeds))
    of_run = torch.tensor([distinct.index(seed) for seed in seeds], device=device)
    size, within = config.training.local_batch_size, torch.arange(length + 1, device=device)
    for first in count(0, size):
        places = [divmod(position, sequences.length) for position in range(first, first + size)]
        items = [[shuffled(place, sequences.length, seed, epoch) for epoch, place in places] for seed in distinct]
        starts = (torch.tensor(items) * length).to(device, non_blocking=True)
        yield tokens[starts[of_run, :, None] + within].long()


def require_alike(runs: Sequence[Run]) -> None:
    """Raise a `UserError` for settings that this trainer does not have, or in which its runs may not differ."""
    first = all_values(runs[0].resolved)
    for run in runs:
        values = all_values(run.resolved)
        keys = [key for key in values if not (key.startswith("pc.") and not run.resolved.pc.enable)]
        if differing := [key for key in keys if key not in MAY_DIFFER and values[key] != first[key]]:
            raise UserError(f"{run.name} and {runs[0].name} differ in {differing[0]}; train them in two sweeps")
    batch = first["training.global_batch_size"]
    wanted = {
        "optimizer.name": "AdamW",
        "training.local_batch_size": batch,
        "training.mixed_precision_param": "float32",
        "experiment.arm": "",
    }
    if differing := [key for key, value in wanted.items() if first[key] != value]:
        raise UserError(f"{differing[0]}: should be {wanted[differing[0]]!r} for runs that are trained in one process")


def row(run: Run, study: str, log: list[dict], device: torch.device) -> dict:
    """As `evidence.collect` makes it."""
    gpus = [torch.cuda.get_device_name()] if device.type == "cuda" else []
    return {
        "study": study,
        **{"name": run.name, "config": run.config, "settings": run.settings, "variant": run.variant, "spikes": None},
        "state": "finished" if log[-1][VALIDATION] is not None else "diverged",
        "resolved": run.resolved.model_dump(exclude_unset=True),
        "environment": {
            **{"versions": read_versions(), "commit": read_commit(), "gpus": gpus, "processor": read_processor()},
            "trainer": "experiments.batched",
        },
        "log": log,
    }


def train(sweep: Sweep, output: Path, end: float) -> bool:
    """Train the runs of a sweep, and write their rows; returns whether they ended before the time `end`."""
    runs = sorted(sweep.runs, key=lambda run: not run.resolved.pc.enable)
    require_alike(runs)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    torch.backends.cuda.matmul.fp32_precision = "tf32"  # PC sets its own
    configs = [run.resolved for run in runs]
    config, steps = configs[0], configs[0].training.steps
    state, data, begin = Training(configs, device), batches(configs, device), time.monotonic()
    logs: list[list[dict]] = [[] for _ in runs]
    partial = output / f"{sweep.path.stem}.partial.jsonl"
    for step in range(1, steps + 1):
        found = state.advance(next(data))
        if step == 1 or is_due(step, PROGRESS, steps):
            seconds, memory = (
                time.monotonic() - begin,
                torch.cuda.max_memory_allocated() if device.type == "cuda" else 0,
            )
            mean = found.mean().item()
            print(
                f"{sweep.path.stem}: step {step}/{steps}  mean loss {mean:.4f}  {seconds:.1f} s  {memory / 2**30:.1f} GiB",
                flush=True,
            )
        if is_due(step, config.validation.freq, steps):
            numbers = {VALIDATION: state.validate()}
            if is_due(step, config.diagnostics.spectra_freq, steps):
                numbers |= state.conditions()
            tokens = step * config.training.global_batch_size * config.training.seq_len
            for i, log in enumerate(logs):
                own = {key: values[i].item() for key, values in numbers.items()}
                finite = {key: value if math.isfinite(value) else None for key, value in own.items()}
                log.append({"step": step, "tokens": tokens} | finite)
            rows = [row(run, sweep.path.stem, log, device) for run, log in zip(runs, logs, strict=True)]
            write_atomically(partial, "".join(json.dumps(one, allow_nan=False) + "\n" for one in rows))
            if step < steps and time.monotonic() > end:
                print(f"{sweep.path.stem}: out of time at step {step} of {steps}; {partial} has the losses so far")
                return False
    partial.rename(output / f"{sweep.path.stem}.jsonl")
    return True


@exit_on_user_error
def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("sweeps", nargs="+", metavar="SWEEP", help="TOML files of sweeps, trained one after another")
    parser.add_argument("--output", type=Path, required=True, help="the folder of the rows")
    parser.add_argument("--seconds", type=at_least_one, help="stop at the first validation after so many seconds")
    arguments = parser.parse_args()
    end = time.monotonic() + (arguments.seconds or math.inf)
    all(train(sweep, arguments.output, end) for sweep in map(load, arguments.sweeps))


if __name__ == "__main__":
    main()
