"""The texts about a measurement, wherever it is shown: rows of tables, a summary, advice."""

import math
from collections.abc import Sequence

from pc.measure import NUMBERED_LEVELS, PC_BLOCKS, Conditioning, Measured, geometric_mean
from pc.targets import counted, wildcard_layers

TOKENS = 500_000  # of a step, in the text about the cost

# Baselines at the end of their runs, and PC minus baseline, negative: PC is better (docs/should-i.md).
EVIDENCE = (
    ("condition number", "run of this project", "PC minus baseline, nats", "95 % interval"),
    ("30.0", "micro, AdamW, 0.96 tokens per parameter", "-0.037 per token", "-0.248 to +0.175"),
    ("29.2", "nano, AdamW, 1.5 tokens per parameter", "-0.105 per token", "-0.165 to -0.045"),
    ("28.3", "conditioning, AdamW, 20 tokens per parameter", "-0.048 per byte", "-0.056 to -0.041"),
    ("28.2", "verdict, AdamW, 20 tokens per parameter", "-0.051 per byte", "-0.060 to -0.042"),
    ("28.0", "verdict, AdamW, 5 tokens per parameter", "-0.165 per byte", "-0.178 to -0.151"),
    ("19.9", "micro, AdamW, at another rate of the baseline", "+0.046 per token", "-0.014 to +0.105"),
    ("13.9", "nano, AdamW, four times the tokens", "+0.010 per token", "-0.061 to +0.081"),
    ("6.8", "verdict, MuonH, 20 tokens per parameter", "-0.012 per byte", "-0.016 to -0.008"),
    ("6.7", "regime, AdamW, 157 tokens per parameter", "+0.003 per byte", "-0.004 to +0.010"),
    ("6.5", "verdict, Muon, 20 tokens per parameter", "-0.004 per byte", "-0.007 to -0.001"),
    ("6.0", "micro, Muon, 0.96 tokens per parameter", "+0.095 per token", "-0.018 to +0.209"),
)
_HIGH, _LOW = 28, 20
WITH_PC = "Trained with PC: only another run shows how it would have ended without PC, or at another level."

BLOCK_HEADER = (
    "block", "matrices", "condition number", "Gaussian", "times", "worst", "stable rank", "effective rank", "below 1 %",
    *(f"PC {level}" for level in NUMBERED_LEVELS),
)  # fmt: skip
LEGEND = (
    "Condition number: largest singular value over the mean of the smallest tenth; for a block, the geometric mean. "
    "Gaussian: that of random matrices of the same shapes (Marchenko-Pastur); times: the first over the second, so 1.00 is "
    "as at a random start. Ranks: means, and after the slash those of Gaussian matrices. Below 1 %: share of singular values "
    "below 1 % of the largest. PC and a number: the condition number of PC(W) at that level, if these were W."
)
HOW = (
    "Singular values are computed from the eigenvalues of the Gram matrix in float64; where that could change the condition "
    "number by a relative 1e-10 or more, by a singular value decomposition."
)


def number(value: float) -> str:
    return "∞" if value == math.inf else f"{value:,.0f}" if value >= 1000 else f"{value:#.3g}".rstrip(".")


def block_row(block: str, matrices: Sequence[Measured]) -> list[str]:
    """Of `BLOCK_HEADER`."""

    def mean(key: str) -> str:
        own = (getattr(m.figures, key) for m in matrices)
        random = (getattr(m.random, key) for m in matrices)
        return f"{number(sum(own) / len(matrices))} / {number(sum(random) / len(matrices))}"

    worst = max(matrices, key=lambda m: m.ratio)
    return [
        block,
        str(len(matrices)),
        number(condition(matrices)),
        number(geometric_mean(m.random.condition for m in matrices)),
        f"×{times(matrices):.2f}",
        f"×{worst.ratio:.2f}, layer {worst.layer.rpartition('.')[2]}" if worst.layer else "",
        mean("stable_rank"),
        mean("effective_rank"),
        f"{100 * sum(m.figures.small for m in matrices) / len(matrices):.1f} %",
        *(number(geometric_mean(m.condition_at[level] for m in matrices)) for level in NUMBERED_LEVELS),
    ]


def condition(matrices: Sequence[Measured]) -> float:
    return geometric_mean(m.figures.condition for m in matrices)


def times(matrices: Sequence[Measured]) -> float:
    """How much worse conditioned than Gaussian matrices."""
    return geometric_mean(m.ratio for m in matrices)


def block_rows(found: Conditioning, of_layers: bool) -> list[list[str]]:
    return [block_row(block, matrices) for block, matrices in found.by_block(of_layers).items()]


def cells(found: Conditioning) -> tuple[list[str], dict[str, list[list[Measured]]]]:
    """Blocks, and {layer: its matrices of each block}."""
    blocks = list(found.by_block(of_layers=True))
    rows: dict[str, list[list[Measured]]] = {}
    for matrix in found.in_layers:
        row = rows.setdefault(matrix.layer, [[] for _ in blocks])
        row[blocks.index(matrix.block)].append(matrix)
    return blocks, rows


def comparison(models: dict[str, Conditioning]) -> list[list[str]]:
    """A header, and a row for each block: condition numbers of the models, and how many times those of Gaussian matrices."""
    of_model = {name: found.by_block(of_layers=True) for name, found in models.items()}
    blocks = dict.fromkeys(block for of_blocks in of_model.values() for block in of_blocks)
    rows = [["block", *models]]
    for block in blocks:
        ours = [of_blocks.get(block) for of_blocks in of_model.values()]
        rows.append([block, *(f"{number(condition(m))} ×{times(m):.2f}" if m else "" for m in ours)])
    return rows


def worst_and_median(found: Conditioning) -> dict[str, Measured]:
    ranked = sorted(found.in_layers or found.matrices, key=lambda matrix: matrix.ratio)
    return {"worst": ranked[-1], "median": ranked[(len(ranked) - 1) // 2]}


def summary(found: Conditioning) -> str:
    """What PC would change, in a sentence."""
    changed = found.of_pc
    if not changed:
        return f"None of {', '.join(PC_BLOCKS)} is known here, so nothing can be said of what PC would change."
    random = geometric_mean(m.random.condition for m in changed)
    at_4 = geometric_mean(m.condition_at[4] for m in changed)
    return (
        f"{', '.join(b for b in PC_BLOCKS if any(m.block == b for m in changed))} have a condition number of "
        f"{number(condition(changed))} (geometric mean of {len(changed)} matrices), random matrices of the same shapes "
        f"{number(random)}: ×{times(changed):.2f}. PC at level 4 would make it {number(at_4)}."
    )


def advice(found: Conditioning) -> str:
    """What this project's runs say of such a number: a hypothesis."""
    changed = found.of_pc
    if not changed:
        return "Will PC help? We do not know."
    value = condition(changed)
    if value >= _HIGH:
        said = (
            f"PC lowered the loss in all five of our comparisons whose baseline ended at {_HIGH} or more, in one not "
            "significantly. So PC may be worth a try here, after the learning rate is tuned without it."
        )
    elif value >= _LOW:
        said = f"We do not know: no baseline of ours that was compared with PC ended between {_LOW} and {_HIGH}."
    else:
        said = (
            f"Under AdamW, PC lowered the final loss in none of our comparisons whose baseline ended below {_LOW}; the "
            "paper's 1B ended at 17 and gained. Under Muon and MuonH PC gained a little, in the one study that decides it. So "
            "we do not know."
        )
    return (
        f"Will PC help? {said} This is a hypothesis from small and mostly short runs (widths 32 to 256; docs/should-i.md), "
        "not a promise; in the one study that changed nothing but singular values, with very short runs, bad conditioning "
        "was part of the reason. It is about training from the start, not about these weights. "
        "PC has no lower bound, as its maps take 0 to 0, so this is a measurement, not a certificate."
    )


def cost(found: Conditioning) -> str:
    if not found.of_pc:
        return ""
    share = 100 * found.cost_bound(TOKENS)
    return (
        f"Cost: at level 4 a step of {TOKENS:,} tokens would take at most {share:.2g} % more FLOPs in the layers' matrices (the "
        "paper's bound); half of that with twice the tokens."
    )


def left_out(found: Conditioning) -> list[str]:
    """A line for each kind of tensor that was left out: those that differ in numbers alone are counted."""
    return counted(map(wildcard_layers, found.left_out))


def card(models: dict[str, Conditioning]) -> str:
    """Markdown for a model card."""
    lines = ["## Conditioning of the weight matrices", ""]
    for name, found in models.items():
        lines += [f"**{name}.** {summary(found)}", ""]
        lines += [f"| {' | '.join(row)} |" for row in [BLOCK_HEADER, ["---"] * len(BLOCK_HEADER)]]
        lines += [f"| {' | '.join(row)} |" for row in block_rows(found, of_layers=True)]
        lines += [""]
    return "\n".join([*lines, f"{LEGEND} Measured by `python -m pc.report` (pc-layer).", ""])
