"""Train all runs of sweeps in one process: many seeds, rates and arms of one small Llama side by side, on a GPU that a single
one would leave idle.

python -m experiments.batched SWEEP.toml... --output FOLDER [--seconds 500]

Every weight is [S, out, in] for the S runs of a sweep, every product one batched matmul. The runs' losses are added, so each
gets its own gradient; clipping and rates are by run. Initial weights, batches, schedule and PC are the recipe's, and so are the
losses, up to rounding: `training.mixed_precision_param` is autocast's type, and with float32 a GPU's matmuls are in TF32. The runs
may differ in seed, rate, `init_factors` and `lr_factors`, and in whether PC is on; the optimizer is AdamW.

FOLDER/NAME.jsonl has the rows of NAME.toml, as in the runs.jsonl of experiments; until the runs' end they are in
FOLDER/NAME.partial.jsonl, written after each validation.
"""

import argparse
import json
import math
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torchtitan.models.llama3.model.model import apply_rotary_emb

from experiments.evidence import CONDITION
from pc.blocks import block_of, names_layer
from pc.command import exit_on_user_error
from pc.errors import UserError
from pc.method import Method, method_of
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
MISSING = (
    "checkpoint.initial_load_path",
    "data.skip",
    "experiment.arm",
    "model.converters",
    "pc.heads",
    "pc.learnable_gamma",
)
"""Keys that this trainer knows at their defaults only."""
PROGRESS, TRIED = 50, 100  # steps between two lines, and before a sweep may be given up; the first steps compile

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


@dataclass
class Group:
    """Layers with PC whose matrices have one shape: their runs with PC are one batch for PC, one layer after another."""

    method: Method
    names: list[str]
    u: Tensor
    v: Tensor
    kept: Any = ()
    """what `Method.evaluate` keeps for the pull back"""


class Training:
    """The state of all runs of a sweep, after `step` steps.

    Args:
        configs: those with PC first.

    Attributes:
        flat: [S, N], all numbers that are trained; so few operations change them.
        trained: parts of it: W of all layers, and with PC gammas [S, 1] by the layer's name.
        used: what the forward pass multiplies by: PC(W) of the runs with PC, and W.
        layers, turned: the layers with matrices, and those of them that PC is for, with or without it.
    """

    def __init__(self, configs: Sequence[Config], device: torch.device) -> None:
        self.config, self.device, self.step = configs[0], device, 0
        self.number, self.with_pc = len(configs), sum(config.pc.enable for config in configs)
        models = [Llama2(model_args_of(config)) for config in configs]
        for model in models:
            model.init_weights()
        self.losses = torch.compile(losses) if self.config.compile.enable else losses
        self.heads, self.rotation = models[0].model_args.n_heads, models[0].freqs_cis.to(device)
        initial = [dict(model.named_parameters()) for model in models]
        weights = {name: torch.stack([one[name].detach() for one in initial]) for name in initial[0]}
        self.used = {name: weight.to(device, copy=True).requires_grad_() for name, weight in weights.items()}
        self.layers = [layer for layer in (name.removesuffix(".weight") for name in weights) if block_of(layer)]
        entries = {layer: [one for one in self.config.pc.blocks if names_layer([one], layer)] for layer in self.layers}
        self.turned = [layer for layer in self.layers if entries[layer]]
        self.groups: list[Group] = []
        if self.with_pc:
            weights |= {layer: torch.ones(self.number, 1) for layer in self.turned}
            self._group(
                {layer: method_of(self.config.pc.pc_config.for_block(entries[layer][0])) for layer in self.turned}
            )

        def flat(values: Iterable[Tensor]) -> Tensor:
            return torch.cat([value.flatten(1) for value in values], 1).to(device)

        self.flat = flat(weights.values())
        parts = self.flat.split([weight[0].numel() for weight in weights.values()], 1)
        self.trained = {n: part.view(weight.shape) for (n, weight), part in zip(weights.items(), parts, strict=True)}
        rates = {name: torch.tensor([_rate(config, name) for config in configs]) for name in weights}
        self.rates = flat(rates[name].view(-1, 1).expand_as(weight.flatten(1)) for name, weight in weights.items())
        self.share = rate_factor(self.config.lr_scheduler, self.config.training.steps)
        self.mean, self.square = torch.zeros_like(self.flat), torch.zeros_like(self.flat)
        self._write()

    def _group(self, methods: dict[str, Method]) -> None:
        alike: dict[tuple, list[str]] = {}
        for layer, method in methods.items():
            alike.setdefault((method, *self.used[f"{layer}.weight"].shape[1:]), []).append(layer)
        for (method, *shape), names in alike.items():
            vectors = [initial_vectors(name, shape) for name in names]
            u, v = (torch.cat([one.expand(self.with_pc, -1) for one in some]) for some in zip(*vectors, strict=True))
            self.groups.append(Group(method, names, u.to(self.device), v.to(self.device)))

    def _of(self, tensors: Weights, names: Iterable[str]) -> Tensor:
        """Those of the runs with PC, as one batch."""
        return torch.cat([tensors[name][: self.with_pc] for name in names])

    def _into(self, tensors: Weights, names: Sequence[str], batch: Tensor) -> None:
        for name, values in zip(names, batch.chunk(len(names)), strict=True):
            tensors[name][: self.with_pc] = values

    @torch.no_grad()
    def _write(self) -> None:
        """`used` from `trained`."""
        torch._foreach_copy_(list(self.used.values()), [self.trained[name] for name in self.used])
        for group in self.groups:
            weights = [f"{name}.weight" for name in group.names]
            raw, gamma = self._of(self.trained, weights), self._of(self.trained, group.names)
            result, group.u, group.v, _, group.kept = group.method.evaluate(raw, gamma, group.u, group.v)
            self._into(self.used, weights, result)

    def advance(self, tokens: Tensor) -> Tensor:
        """A step on [S, B, T + 1]; the losses [S] before it."""
        found = self._losses(tokens)
        gradients = dict(zip(self.used, torch.autograd.grad(found.sum(), list(self.used.values())), strict=True))
        with torch.no_grad():
            for group in self.groups:
                weights = [f"{name}.weight" for name in group.names]
                raw, gamma = self._of(self.trained, weights), self._of(self.trained, group.names)
                of_used = self._of(gradients, weights)
                of_raw, of_gamma = group.method.pull_back(raw, of_used, gamma, group.u, group.v, group.kept)
                self._into(gradients, weights, of_raw)
                gradients |= {name: torch.zeros(self.number, 1, device=self.device) for name in group.names}
                self._into(gradients, group.names, of_gamma)
            self._adamw(torch.cat([gradients[name].flatten(1) for name in self.trained], 1))
        self._write()
        return found.detach()

    def _losses(self, tokens: Tensor) -> Tensor:
        dtype = getattr(torch, self.config.training.mixed_precision_param)
        with torch.autocast(self.device.type, dtype, enabled=dtype != torch.float32):
            return self.losses(self.used, tokens, self.heads, self.rotation)

    def _adamw(self, gradient: Tensor) -> None:
        """torch's AdamW on [S, N], after clipping each run's gradient by its own norm."""
        optimizer, share = self.config.optimizer, self.share(self.step)
        self.step += 1
        norm = torch.linalg.vector_norm(gradient, dim=1, keepdim=True)
        gradient.mul_((self.config.training.max_norm / (norm + 1e-6)).clamp(max=1.0))
        self.mean.lerp_(gradient, 1 - optimizer.beta1)
        self.square.mul_(optimizer.beta2).addcmul_(gradient, gradient, value=1 - optimizer.beta2)
        of_mean, of_square = (1 - beta**self.step for beta in (optimizer.beta1, optimizer.beta2))
        divisor = self.square.sqrt().div_(math.sqrt(of_square)).add_(optimizer.eps)
        decay = share * optimizer.weight_decay
        self.flat.mul_(1 - decay if optimizer.independent_decay else 1 - decay * self.rates)
        self.flat.addcmul_(self.rates, self.mean / divisor, value=-share / of_mean)

    @torch.no_grad()
    def validate(self) -> Tensor:
        """The final losses [S] on the recipe's fixed sequences, the same for all runs."""
        config, runs = self.config, self.number
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
            total += self._losses(tokens.expand(runs, -1, -1)) * len(tokens)
            number += len(tokens)
        return total / number

    @torch.no_grad()
    def conditions(self) -> dict[str, Tensor]:
        """{logged name: condition numbers of effective weights [S], geometric means over layers}"""
        found = {
            name: modified_condition_number(singular_values(self.used[f"{name}.weight"].cpu())) for name in self.layers
        }
        of_qkv = [name for name in self.layers if block_of(name) in ("q", "k", "v")]
        groups = dict(zip(CONDITION, (self.turned, of_qkv, self.layers), strict=True))
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
    defaults, batch = all_values(Config()), first["training.global_batch_size"]
    wanted = {key: defaults[key] for key in MISSING} | {
        "optimizer.name": "AdamW",
        "training.local_batch_size": batch,
    }
    if differing := [key for key, value in wanted.items() if first[key] != value]:
        raise UserError(f"{differing[0]}: should be {wanted[differing[0]]!r} for runs that are trained in one process")
    if len(runs[0].resolved.data.folders) > 1:
        raise UserError("data.path: should be one folder for runs that are trained in one process")


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
    """Train the runs of a sweep, and write their rows. Returns whether they ended; they are given up after `TRIED` steps if
    the speed of the last of these says that they would not before the time `end`."""
    runs = sorted(sweep.runs, key=lambda run: not run.resolved.pc.enable)
    require_alike(runs)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    torch.backends.cuda.matmul.fp32_precision = "tf32"  # PC sets its own
    configs = [run.resolved for run in runs]
    config, steps, name = configs[0], configs[0].training.steps, sweep.path.stem
    state, data, times = Training(configs, device), batches(configs, device), {0: time.monotonic()}
    logs: dict[str, list[dict]] = {run.name: [] for run in runs}
    for step in range(1, steps + 1):
        found = state.advance(next(data))
        if is_due(step, PROGRESS, steps):
            mean = found.mean().item()  # waits for the device
            times[step] = time.monotonic()
            memory = torch.cuda.max_memory_allocated() / 2**30 if device.type == "cuda" else 0
            seconds = times[step] - times[0]
            print(f"{name}: step {step}/{steps}  mean loss {mean:.4f}  {seconds:.1f} s  {memory:.1f} GiB", flush=True)
        if step == TRIED:
            left = (times[TRIED] - times[TRIED - PROGRESS]) / PROGRESS * (steps - step)
            if times[step] + left > end:
                print(f"{name}: given up, as {left:.0f} s more are too many", flush=True)
                return False
        if is_due(step, config.validation.freq, steps):
            numbers = {VALIDATION: state.validate()}
            if is_due(step, config.diagnostics.spectra_freq, steps):
                numbers |= state.conditions()
            tokens = step * config.training.global_batch_size * config.training.seq_len
            for i, log in enumerate(logs.values()):
                own = {key: values[i].item() for key, values in numbers.items()}
                finite = {key: value if math.isfinite(value) else None for key, value in own.items()}
                log.append({"step": step, "tokens": tokens} | finite)
            rows = [row(run, name, logs[run.name], device) for run in sweep.runs]  # the reference's first
            lines = "".join(json.dumps(one, allow_nan=False) + "\n" for one in rows)
            write_atomically(output / f"{name}.partial.jsonl", lines)
    (output / f"{name}.partial.jsonl").rename(output / f"{name}.jsonl")
    return True


@exit_on_user_error
def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("sweeps", nargs="+", metavar="SWEEP", help="TOML files of sweeps, trained one after another")
    parser.add_argument("--output", type=Path, required=True, help="the folder of the rows")
    parser.add_argument("--seconds", type=at_least_one, help="give up a sweep that would not end in so many from now")
    arguments = parser.parse_args()
    end = time.monotonic() + (arguments.seconds or math.inf)
    for sweep in [load(path) for path in arguments.sweeps]:
        train(sweep, arguments.output, end)


if __name__ == "__main__":
    main()
