"""The arms of this study: `Watch` logs matrices, `Dial` prescribes their singular values, `Retract` pulls them towards PC(W).

A run's log, `matrices.jsonl` in its folder, has a line for the first weights (step 0), each of the first 20 steps and every 20
steps: `step`, and under `matrices` of each layer's weight

weight          of the weight that the forward pass multiplies by, after the step: Frobenius norm, stable rank, modified condition
                number, quantiles of the singular values (0, 10, 50, 90, 100 %), and of o and FFN all of them, descending
change          the Frobenius norm and the largest singular value of what the step added to it, each relative to the Frobenius norm
                before the step
raw             where PC is on, the same of W
after_gain      where a norm stands before it, the same of the weight times that norm's gain

Of a step with several lines the last counts: a run that was killed repeats steps.
"""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from pc.blocks import block_of, matches
from pc.errors import UserError
from pc.maps import resolve
from pc.polynomial import apply
from pc.shards import local
from pc.spectral import modified_condition_number, singular_values
from pc.targets import clean_name
from pc_recipe.config import Config
from pc_recipe.files import json_lines
from pc_recipe.train.arm import Arm
from pc_recipe.train.optimizers import Optimizers

LOG = "matrices.jsonl"
NORM_BEFORE = {
    "q": "attention_norm",
    "k": "attention_norm",
    "v": "attention_norm",
    "gate": "ffn_norm",
    "up": "ffn_norm",
}


def raw_weights(optimizers: Optimizers) -> dict[str, Tensor]:
    """{layer: W} of the layers with PC, after a step. Only this function knows where PC keeps W."""
    weights = {} if optimizers.preconditioner is None else optimizers.preconditioner.weights
    return {name: local(weight.orig) for name, weight in weights.items()}


def describe(weight: Tensor, every_value: bool = False) -> dict[str, Any]:
    """What the log says of a matrix [n, m]; `every_value`: with all singular values."""
    sigma = singular_values(weight).flip(-1)  # descending
    squares = sigma.square().sum()
    numbers = {
        "norm": _short(squares.sqrt()),
        "stable_rank": _short(squares / sigma[0].square()),
        "condition": _short(modified_condition_number(sigma)),
        "quantiles": _short(sigma.quantile(torch.tensor([0.0, 0.1, 0.5, 0.9, 1.0], dtype=sigma.dtype))),
    }
    return numbers | ({"sigma": _short(sigma)} if every_value else {})


def _short(numbers: Tensor) -> Any:
    """As JSON, rounded as float32 would."""
    values = numbers.tolist()
    return [float(f"{x:.8g}") for x in values] if isinstance(values, list) else float(f"{values:.8g}")


class Watch(Arm):
    """Logs, and changes nothing.

    Args:
        every: steps between lines of the log, after the first `every` steps, all of which have them.
    """

    def __init__(self, parts: list[nn.Module], optimizers: Optimizers, config: Config, every: int = 20) -> None:
        super().__init__(parts, optimizers, config)
        self.every, self.log = every, Path(config.job.dump_folder) / LOG
        given = {clean_name(name): weight for part in parts for name, weight in part.named_parameters()}
        if any(local(weight).shape != weight.shape for weight in given.values()):
            raise UserError("experiment.arm: arms of this study take one process, as they need whole matrices")
        self.weights = {name.removesuffix(".weight"): weight for name, weight in given.items()}
        self.names = [name for name in self.weights if block_of(name)]
        self.turned = [name for name in self.names if any(matches(entry, name) for entry in config.pc.blocks)]
        """those that PC is for"""
        self.before: dict[str, Tensor] = {}

    def value(self, name: str) -> Tensor:
        """The weight itself, not a copy."""
        return local(self.weights[name])

    @torch.no_grad()
    def before_step(self, step: int) -> None:
        self.before = {name: self.value(name).clone() for name in self.names}
        if step == 1:
            self.write(0)

    @torch.no_grad()
    def after_step(self, step: int) -> None:
        self.change(step)
        if step < self.every or step % self.every == 0:
            self.write(step)

    def write(self, step: int) -> None:
        """Of step 0: the weights of the first forward pass."""
        json_lines.append(self.log, {"step": step, "matrices": {name: self._describe(name) for name in self.names}})

    def change(self, step: int) -> None:
        """What an arm makes of the weights after the optimizer's step; `before` has them before it."""

    def _describe(self, name: str) -> dict[str, Any]:
        # On the CPU, where decompositions of such small matrices are faster than on a GPU.
        weight, before, raw = self.value(name).cpu(), self.before[name].cpu(), raw_weights(self.optimizers).get(name)
        change, norm = (weight - before).double(), before.double().norm()
        ratios = {"norm": _short(change.norm() / norm), "top": _short(singular_values(change)[-1] / norm)}
        numbers = {"weight": describe(weight, every_value=name in self.turned), "change": ratios}
        if raw is not None:
            numbers["raw"] = describe(raw.cpu())
        if gain := NORM_BEFORE.get(block_of(name) or ""):
            layer = name.rsplit(".", 2)[0]
            numbers["after_gain"] = describe(weight * self.value(f"{layer}.{gain}").cpu())
        return numbers


class WithoutPC(Watch):
    """The base of arms that change weights."""

    def __init__(self, parts: list[nn.Module], optimizers: Optimizers, config: Config, every: int = 20) -> None:
        if config.pc.enable:
            raise UserError("experiment.arm: Dial and Retract change the trained weights; set pc.enable = false")
        super().__init__(parts, optimizers, config, every)


class Dial(WithoutPC):
    """After each step the singular values of o and the FFN matrices are those of a reference to a power, in the stepped
    weight's singular vectors; its Frobenius norm stays. So are those of the first weights.

    Args:
        spectrum: a reference's file (`experiments.verdict.reference`), whose singular values, divided by their norm, count.
        power: of them. 1: the reference's spectrum. 0: all are equal.
        scale: if given, a reference's file whose norms are prescribed too, and whose lengths of a step relative to the norm:
            the optimizer's step is multiplied so that what remains of it after the projection has that length.
    """

    def __init__(
        self,
        parts: list[nn.Module],
        optimizers: Optimizers,
        config: Config,
        spectrum: str,
        power: float = 1.0,
        scale: str = "",
        every: int = 20,
    ) -> None:
        super().__init__(parts, optimizers, config, every)
        self.spectrum, self.power = Reference(spectrum, self.turned), power
        self.scale = Reference(scale, self.turned) if scale else None
        with torch.no_grad():
            for name in self.turned:
                self.value(name).copy_(self.projected(name, self.value(name).cpu(), 0))

    @torch.no_grad()
    def change(self, step: int) -> None:
        for name in self.turned:
            weight, before = self.value(name).cpu(), self.before[name].cpu()
            change, stepped = weight - before, weight
            if self.scale is not None and change.any():
                length = self.scale.at(name, step, "change") * before.norm()
                factor = length / change.norm()
                tried = self.projected(name, before + factor * change, step)
                # the projection takes a part of the step, so the second is as much longer as the first was too short
                stepped = before + factor * length / (tried - before).norm() * change
            self.value(name).copy_(self.projected(name, stepped, step))

    def projected(self, name: str, weight: Tensor, step: int) -> Tensor:
        """Of a weight on the CPU, where the references are."""
        u, sigma, vt = torch.linalg.svd(weight, full_matrices=False)
        wanted = self.spectrum.at(name, step, "spectrum").pow(self.power)
        norm = sigma.norm() if self.scale is None else self.scale.at(name, step, "norm")
        return (u * (norm / wanted.norm() * wanted).to(weight.dtype)) @ vt


class Reference:
    """What reference runs logged, at any step: between logged steps on the line that joins them."""

    def __init__(self, file: str, names: Sequence[str]) -> None:
        try:
            content = json.loads(Path(file).read_text())
        except (OSError, ValueError) as error:
            raise UserError(f"experiment.options: {file} is no reference ({error}); reference.py makes one") from None
        if missing := [name for name in names if name not in content["matrices"]]:
            raise UserError(f"experiment.options: {file} has no {missing[0]}")
        self.steps = torch.tensor(content["steps"])
        self.curves = {
            name: {key: torch.tensor(values, dtype=torch.float64) for key, values in of.items()}
            for name, of in content["matrices"].items()
        }

    def at(self, name: str, step: int, key: str) -> Tensor:
        """ "spectrum" [min(n, m)], of norm 1 and descending; "norm" []; or "change" [], the length of the step."""
        curve = self.curves[name][key]
        after = min(int(torch.searchsorted(self.steps, step)), len(self.steps) - 1)
        before = max(after - 1, 0)
        width = int(self.steps[after] - self.steps[before])
        share = min(max((step - int(self.steps[before])) / width, 0.0), 1.0) if width else 1.0
        return torch.lerp(curve[before], curve[after], share)


class Retract(WithoutPC):
    """After each step W becomes (1 - strength) W + strength PC(W), for o and FFN; PC(W) is s g(W / s), with s its largest
    singular value. No pull back, no gamma, no second weight.

    Args:
        keep_norm: the Frobenius norm stays that of the stepped W.
    """

    def __init__(
        self,
        parts: list[nn.Module],
        optimizers: Optimizers,
        config: Config,
        strength: float,
        level: int = 4,
        keep_norm: bool = False,
        every: int = 20,
    ) -> None:
        super().__init__(parts, optimizers, config, every)
        self.strength, self.map, self.keep_norm = strength, resolve(level).map, keep_norm

    @torch.no_grad()
    def change(self, step: int) -> None:
        for name in self.turned:
            weight = self.value(name)
            norm, top = weight.norm(), torch.linalg.matrix_norm(weight, 2)
            new = torch.lerp(weight, top * apply(self.map, weight / top), self.strength)
            weight.copy_(new * (norm / new.norm()) if self.keep_norm else new)
