"""Draw summary.png, the figure of docs/should-i.md: what each method ends at, and how PC's lead changes with tokens.

python -m experiments.summary
"""

import hashlib

from matplotlib.patches import Rectangle

from experiments.evidence import digest
from experiments.numbers import FOLDER, studies
from pc_recipe.pages.plots import save, subplots

GPU, CPU = "C0", "C1"
ARMS = {
    "MuonH-level-2": "MuonH + PC",
    "muon-level-2": "Muon + PC",
    "muon": "Muon",
    "MuonH": "MuonH",
    "level-4": "PC",
    "scale": "larger weights and rates",
    "AdamH": "AdamH",
    "identity": "PC without polynomial",
    "row-norm": "row norms",
    "worsening": "worsening polynomial",
}
TUNED = {"scale-level-4": "PC + tuned init and rates", "scale": "tuned init and rates"}
"""Arms of the study of the initialisation: larger weights and rates, tuned."""
SHOWN = [
    ("verdict-20", ARMS, GPU),
    ("cell-20", ARMS, CPU),
    ("rivals", {arm: ARMS[arm] for arm in ("MuonH", "AdamH", "row-norm")}, CPU),
    ("initialisation-20", TUNED, CPU),
]
LEADS = [
    ("verdict-5", "level-4 - baseline", GPU),
    ("verdict-20", "level-4 - baseline", GPU),
    ("cell-20", "level-4 - baseline", CPU),
    ("verdict-40", "level-4 - baseline", CPU),
    ("adamw", "pc on - pc off", CPU),
]
PAPER = {"bytes per parameter": (4 * 152, 4 * 213), "nats per byte": (0.0547 / 4, 0.070 / 4)}
"""One run each of 1B and 271M; a token is some four bytes."""


def rows() -> str:
    """Checksum of the rows that the figure shows."""
    folders = ("conditioning", "initialisation", "rivals", "regime", "verdict")
    return hashlib.sha256("".join(digest(FOLDER / name) for name in folders).encode()).hexdigest()


def main() -> None:
    figure, (arms, leads) = subplots(1, 2, width=3.6, height=2.9, gridspec_kw={"width_ratios": [1.2, 1]})
    _draw_arms(arms)
    _draw_leads(leads)
    print(save(figure, FOLDER / "summary", metadata={"Rows": rows()}))


def _draw_arms(axes) -> None:
    found = [
        (name, studies()[study][f"{arm} - baseline"], color)
        for study, arms, color in SHOWN
        for arm, name in arms.items()
        if arm in studies()[study].experiment.runs.arm.values
    ]
    lowest = {name: tested.mean for name, tested, _ in reversed(found)}
    order = sorted(lowest, key=lambda name: lowest[name])
    on_gpu = {name for name, _, color in found if color == GPU}
    for name, tested, color in found:
        below = 0.25 if color == CPU and name in on_gpu else 0
        ends, place = tested.interval, order.index(name) + below
        error = [[tested.mean - ends.low], [ends.high - tested.mean]]
        axes.errorbar(tested.mean, place, xerr=error, fmt="o", color=color, markersize=4, capsize=2)
    axes.axvline(0, color="black", linewidth=0.8)
    axes.set_yticks(range(len(order)), order)
    axes.invert_yaxis()
    axes.locator_params("x", nbins=5)
    axes.set_xlabel("loss minus AdamW's (nats per byte)")
    axes.set_title("at 20 tokens per parameter", fontsize=9, loc="left")
    for place, (color, name) in enumerate(((GPU, "one H100"), (CPU, "CPUs"))):
        axes.annotate(name, (0.98, 0.93 - 0.08 * place), xycoords="axes fraction", color=color, ha="right", fontsize=8)


def _draw_leads(axes) -> None:
    for study, arms, color in LEADS:
        one = studies()[study]
        tested, tokens = one[arms], one.experiment.tokens_per_parameter
        error = [[-tested.mean + tested.interval.high], [tested.mean - tested.interval.low]]
        wide = study != "adamw"
        at = tokens * (1.08 if study == "cell-20" else 1)  # beside the other at 20
        axes.errorbar(
            at, -tested.mean, error, fmt="o", color=color, mfc=color if wide else "white", markersize=4, capsize=2
        )
        if not wide:
            axes.annotate("width 32", (at, -tested.mean), (6, -3), textcoords="offset points", fontsize=8)
    (left, right), (low, high) = PAPER.values()
    axes.axhspan(low, high, color="C2", alpha=0.15, linewidth=0)
    axes.add_patch(Rectangle((left, low), right - left, high - low, color="C2"))
    axes.annotate(
        "the paper's, one\nrun of each size", (right, high), (0, 6), textcoords="offset points", color="C2", fontsize=8, ha="right"
    )  # fmt: skip
    axes.axhline(0, color="black", linewidth=0.8)
    axes.set_xscale("log")
    axes.set_xticks([5, 20, 40, 157, 850], ["5", "20", "40", "157", "850"])
    axes.minorticks_off()
    axes.set_xlabel("tokens (bytes) per parameter")
    axes.set_xlim(4, 1100)
    axes.set_title("PC's lead on AdamW (nats per byte)", fontsize=9, loc="left")


if __name__ == "__main__":
    main()
