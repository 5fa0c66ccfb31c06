"""Optimizers as people bring them: ten steps with PC, and with a resume after five, beside the paper's layers in the graph.

    pip install --no-deps --target extra apollo-torch bitsandbytes galore-torch heavyball muon-optimizer opt-einsum \\
        prodigyopt pytorch-optimizer schedulefree torch-optimi torch-optimizer pytorch-ranger
    PYTHONPATH=extra:DION:SHAMPOO OMP_NUM_THREADS=1 python benchmarks/optimizers.py

DION and SHAMPOO: checkouts of github.com/microsoft/dion and github.com/facebookresearch/optimizers. Both runs of a row draw
the same random numbers. An optimizer is right if W and gamma differ by at most 1e-12 from the reference, or by at most ten
times what noise of one rounding in the initial weights changes in the reference itself, because it computes in less than
the weights' precision. The command fails if a row is neither right nor refused in one line.
"""

import argparse
import copy
import importlib
import importlib.metadata
import importlib.util
import itertools
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from datetime import date
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import pc
from pc.layer import put_in_graph
from pc_recipe.pages import markdown

STEPS, RESUME, DRAWS, WIDTH = 10, 5, 3, 16
LIMIT, TIMES_NOISE = 1e-12, 10
CONFIG = pc.PCConfig(blocks=("*wo", "*w1", "*w2"))


def flat(parameters: list[Tensor]) -> list[Tensor]:
    return parameters


def by_shape(matrices: dict[str, Any], vectors: dict[str, Any]) -> Callable[[list[Tensor]], list[dict]]:
    """Two groups of one optimizer, with these keys; the rates differ."""
    return lambda parameters: [
        {"params": [p for p in parameters if p.ndim == 2], **matrices},
        {"params": [p for p in parameters if p.ndim < 2], **vectors},
    ]


@dataclass(frozen=True)
class Row:
    """An optimizer. Several classes in one row have the same options."""

    classes: str
    """module:classes"""
    options: dict[str, Any]
    package: str = ""
    """of the version; by default the module"""
    groups: Callable[[list[Tensor]], list] = flat
    inner: Callable | None = None
    """what a wrapper wraps"""
    by_hand: bool = False
    """made after `pc.precondition(model)`, with `write_pc` after each step"""
    dtype: torch.dtype = torch.float64
    closure: bool = False
    second_order: bool = False
    resumes: bool = True
    """whether its own `state_dict` works with this torch"""
    prepare: Callable[[], object] = lambda: None


def _without_compilation() -> None:
    import heavyball.utils

    heavyball.utils.compile_mode = None


def _adamw(parameters) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-2)


ALGORITHM = by_shape({"algorithm": "muon", "lr": 1e-2}, {"algorithm": "adamw", "lr": 3e-3})
NORMUON = by_shape({"algorithm": "normuon", "lr": 1e-2}, {"algorithm": "adamw", "lr": 3e-3})
USE_MUON = by_shape({"use_muon": True, "lr": 1e-2}, {"use_muon": False, "lr": 3e-3})
LOW_RANK = {"rank": 4, "update_proj_gap": 20, "scale": 1.0, "proj_type": "std"}
GALORE = by_shape(LOW_RANK, {"lr": 3e-3})
APOLLO = by_shape(LOW_RANK | {"proj": "random", "scale_type": "channel"}, {"lr": 3e-3})
SHAMPOO = "facebookresearch/optimizers"

ROWS = [
    Row("torch.optim:SGD,RMSprop,AdamW,NAdam,RAdam,Adagrad,Adamax,ASGD,Rprop", {"lr": 1e-2}, "torch"),
    Row("torch.optim:AdamW,SGD,Adagrad", {"lr": 1e-2, "fused": True}, "torch"),
    Row("torch.optim:Adafactor,Adadelta", {"lr": 1e-1}, "torch"),
    Row("torch.optim:LBFGS", {"lr": 0.5, "max_iter": 4}, "torch", closure=True),
    Row("torchao.optim:_AdamW", {"lr": 1e-2}, dtype=torch.float32),
    Row("torchao.optim:AdamW8bit,AdamW4bit,AdamWFp8", {"lr": 1e-2, "block_size": 32}, dtype=torch.float32),
    Row("bitsandbytes.optim:AdamW8bit,Lion8bit", {"lr": 1e-2, "min_8bit_size": 1}, dtype=torch.float32),
    Row("bitsandbytes.optim:AdamW,Lion", {"lr": 1e-2}, dtype=torch.float32),
    Row("schedulefree:AdamWScheduleFree,SGDScheduleFree,RAdamScheduleFree", {"lr": 1e-2}),
    Row("prodigyopt:Prodigy", {"lr": 1.0}),
    Row("heavyball:AdamW,SOAP,Muon,SFAdamW,PSGDKron", {"lr": 1e-2}, dtype=torch.float32, prepare=_without_compilation),
    Row("pytorch_optimizer:SOAP,MARS,AdEMAMix,Lion,ADOPT,CAME", {"lr": 1e-2}, "pytorch-optimizer"),
    Row("pytorch_optimizer:Kron", {"lr": 1e-2}, "pytorch-optimizer", dtype=torch.float32),
    Row("pytorch_optimizer:Muon", {}, "pytorch-optimizer", groups=USE_MUON),
    Row("pytorch_optimizer:Lookahead,TRAC,ScheduleFreeWrapper", {}, "pytorch-optimizer", inner=_adamw),
    Row("pytorch_optimizer:Lookahead,TRAC", {}, "pytorch-optimizer", inner=_adamw, by_hand=True),
    Row("pytorch_optimizer:SophiaH,AdaHessian", {"lr": 1e-2}, "pytorch-optimizer", second_order=True),
    Row("torch_optimizer:Lookahead", {"k": 3}, "torch-optimizer", inner=_adamw, resumes=False),
    Row("torch_optimizer:Lookahead", {"k": 3}, "torch-optimizer", inner=_adamw, by_hand=True, resumes=False),
    Row("dion:Muon", {}, "microsoft/dion", groups=ALGORITHM),
    Row("dion:NorMuon", {}, "microsoft/dion", groups=NORMUON),
    Row("galore_torch:GaLoreAdamW", {"lr": 1e-2}, "galore-torch", groups=GALORE),
    Row("apollo_torch:APOLLOAdamW", {"lr": 1e-2}, "apollo-torch", groups=APOLLO),
    Row("muon:SingleDeviceMuonWithAuxAdam", {}, "muon-optimizer", groups=USE_MUON),
    Row("optimi:AdamW,Lion,Adan", {"lr": 1e-2}, "torch-optimi"),
    Row("distributed_shampoo:DistributedShampoo", {"lr": 1e-2, "epsilon": 1e-8}, SHAMPOO),
    Row("distributed_shampoo:DistributedShampoo", {"lr": 1e-2, "epsilon": 1e-8}, SHAMPOO, by_hand=True),
]


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.wo = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH, bias=False)
        self.w1, self.w2 = nn.Linear(WIDTH, 24, bias=False), nn.Linear(24, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.w2(torch.tanh(self.w1(self.wo(self.norm(x)))))


def model(row: Row, noise: int) -> nn.Module:
    torch.manual_seed(0)
    net = nn.Sequential(Block(), Block(), nn.Linear(WIDTH, WIDTH)).to(row.dtype)
    if noise:
        generator = torch.Generator().manual_seed(noise)
        for parameter in net.parameters():
            signs = torch.randint(-1, 2, parameter.shape, generator=generator).to(row.dtype)
            parameter.data *= 1 + signs * torch.finfo(row.dtype).eps
    return net


class Run:
    """A model and an optimizer: with PC once per step, or with the paper's layers in the graph."""

    def __init__(self, row: Row, make: Callable, in_graph: bool, noise: int = 0) -> None:
        self.row, self.preconditioner = row, None
        self.model = model(row, noise)
        if in_graph:
            self.layers = put_in_graph(self.model, CONFIG)
            named = self.model.named_parameters()
            # gammas joined last, but for an optimizer that was made when they were there
            order = sorted(named, key=lambda one: one[0].endswith("gamma") and not row.by_hand)
            self.optimizer = make([parameter for _, parameter in order])
        else:
            pc.attach(self.model, CONFIG)
            if row.by_hand:
                self.preconditioner = pc.precondition(self.model)
            self.optimizer = make([*self.model.parameters()])
            if not row.by_hand:
                self.preconditioner = pc.precondition(self.model, self.optimizer)

    def switch(self, mode: str) -> None:
        """`eval` or `train` of a schedule-free optimizer, which exchanges the weights."""
        change = getattr(self.optimizer, mode, None)
        if change is None:
            return
        before = [value.clone() for value in self.trained()]
        change()
        if not all(map(torch.equal, before, self.trained())):
            self.refresh()

    def refresh(self) -> None:
        """What a user calls after W was changed by other than a followed optimizer's step."""
        if self.preconditioner is None:
            for layer in self.layers.values():
                layer.refresh()

    def loss(self, index: int) -> Tensor:
        generator = torch.Generator().manual_seed(1000 + index)
        x = torch.randn(32, WIDTH, generator=generator, dtype=torch.float64).to(self.row.dtype)
        return (self.model(x) - x.flip(1)).square().mean()

    def gradients(self, index: int) -> Tensor:
        self.optimizer.zero_grad()
        loss = self.loss(index)
        loss.backward(create_graph=self.row.second_order)
        if self.preconditioner:
            self.preconditioner.pull_back()
        return loss

    def step(self, index: int) -> None:
        if self.row.closure:
            calls = itertools.count()

            def closure():
                if next(calls):  # the search has moved W
                    self.refresh()
                self.optimizer.zero_grad()
                loss = self.loss(index)
                loss.backward()
                return loss

            self.optimizer.step(closure)
        else:
            self.gradients(index)
            self.optimizer.step()
        if self.preconditioner is None:
            self.refresh()
        elif self.row.by_hand:
            self.preconditioner.write_pc()

    def trained(self) -> list[Tensor]:
        if self.preconditioner is None:
            return [t.detach() for layer in self.layers.values() for t in (layer.weight, layer.gamma)]
        return [t.detach() for w in self.preconditioner.weights.values() for t in (w.orig, w.gamma)]

    def states(self) -> tuple:
        return copy.deepcopy((self.model.state_dict(), self.optimizer.state_dict())), torch.get_rng_state()

    def load(self, states: tuple) -> None:
        (weights, state), generator = states
        self.model.load_state_dict(weights)
        self.optimizer.load_state_dict(state)
        torch.set_rng_state(generator)


def train(row: Row, make: Callable, in_graph: bool, noise: int = 0) -> list[Tensor]:
    """W and gamma at the end, and those of a run that resumed; and the losses of an evaluation at the resume."""
    run = Run(row, make, in_graph, noise)
    torch.manual_seed(1)
    run.switch("train")
    for index in range(RESUME):
        run.step(index)
    run.switch("eval")
    with torch.no_grad():
        evaluated = [run.loss(-1)]
    states = run.states() if row.resumes else ()
    found: list[Tensor] = []
    for again in (False, True)[: 1 + row.resumes]:
        if again:
            run = Run(row, make, in_graph, noise)
            run.load(states)
        run.switch("train")
        for index in range(RESUME, STEPS):
            run.step(index)
        found += [value.clone() for value in run.trained()]
    return evaluated + found


def difference(found: list[Tensor], expected: list[Tensor]) -> float:
    return max((a - b).abs().max().item() for a, b in zip(found, expected, strict=True))


def maker(row: Row, name: str) -> Callable[[list[Tensor]], Any]:
    module = importlib.import_module(row.classes.split(":")[0])
    made = getattr(module, name)

    def make(parameters: list[Tensor]) -> Any:
        if row.inner:
            return made(row.inner(row.groups(parameters)), **row.options)
        return made(row.groups(parameters), **row.options)

    return make


def measure(row: Row, name: str) -> tuple[str, float, float]:
    """How one class ends: "equal", "near" (but for rounding), "refused", or what is wrong. Then how far W and gamma are off,
    and how far noise brings the reference."""
    try:
        row.prepare()
        make = maker(row, name)
        expected = train(row, make, in_graph=True) if not row.second_order else []
    except Exception as error:
        return f"the reference does not train: {type(error).__name__}: {error}", 0.0, 0.0
    try:
        found = train(row, make, in_graph=False)
    except pc.UserError as error:
        print(f"  refused: {error}", file=sys.stderr)
        return "refused", 0.0, 0.0
    except Exception as error:
        return f"a traceback, {type(error).__name__}: {error}", 0.0, 0.0
    if row.second_order:
        return "not refused", 0.0, 0.0
    off = difference(found, expected)
    if off <= LIMIT:
        return "equal", off, 0.0
    noise = max(difference(train(row, make, True, draw), expected) for draw in range(1, DRAWS + 1))
    return "near" if off <= TIMES_NOISE * noise else "wrong", off, noise


def version(row: Row) -> str:
    """Of a package; of a checkout its commit."""
    module = row.classes.split(":")[0].split(".")[0]
    try:
        return importlib.metadata.version(row.package or module)
    except importlib.metadata.PackageNotFoundError:
        if not (found := importlib.util.find_spec(module)):
            return "not installed"
        folder = Path(found.origin or "").parent
        words = ["git", "-C", str(folder), "log", "-1", "--format=%h, %cs"]
        return subprocess.run(words, capture_output=True, text=True, check=True).stdout.strip()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="part of a row's module or classes")
    chosen = parser.parse_args()
    torch.set_num_threads(1)
    lines: dict[tuple, list[tuple[str, float, float]]] = {}  # equal and refused ones of a package share a line
    for row in ROWS:
        module, names = row.classes.split(":")
        for name in names.split(",") if chosen.only in row.classes else ():
            print(f"{module} {name} ...", file=sys.stderr)
            said, *numbers = measure(row, name)
            how = " (`write_pc`)" if row.by_hand else " (fused)" if row.options.get("fused") else ""
            key = row.package or module.split(".")[0], version(row), said, "" if said in ("equal", "refused") else name
            lines.setdefault(key, []).append((name + how, *numbers))
    table = []
    for (package, of, said, _), rows in lines.items():
        off, noise = (f"{max(row[i] for row in rows):.0e}" for i in (1, 2))
        result = {
            "equal": f"within {off}",
            "near": f"within {off}; noise: {noise}",
            "wrong": f"WRONG: {off}; noise: {noise}",
        }
        table.append([package, of, ", ".join(row[0] for row in rows), result.get(said, said)])
    print(f"torch {torch.__version__}, {date.today()}\n")
    print(markdown.table(["package", "version", "optimizers", "W and gamma beside `PCLinear`"], table), end="")
    sys.exit(any(said not in ("equal", "near", "refused") for _, _, said, _ in lines))


if __name__ == "__main__":
    main()
