"""Draw dial.png: the final loss against the condition number where nothing but the spectrum differs (B of README.md).

python -m experiments.verdict.dial
"""

from experiments.evidence import digest
from experiments.numbers import FOLDER, studies
from pc_recipe.pages import markdown
from pc_recipe.pages.plots import save, subplots

VERDICT = FOLDER / "verdict"
DIAL = {
    "dial-1.2": "p = 1.2",
    "dial-1": "1, control",
    "dial-0.54": "0.54",
    "dial-0.33": "1/3",
    "dial-0": "0, all equal",
}
OTHERS = {"baseline": "baseline", "level-4": "PC, with larger norms and steps"}


def table() -> str:
    """What each spectrum ends at and gains, at 5 tokens per parameter."""
    study, control = studies()["verdict-5"], "dial-1"
    rows = []
    for arm, name in DIAL.items():
        tested, gains = study[arm], arm != control
        change = format(study[f"{arm} - {control}"], "+.4f") if gains else "-"
        share = format(study.share(arm, control), ".0%") if gains else "-"
        rows.append([name, f"{tested.condition:.1f}", f"{tested.mean:.4f} ± {tested.sd:.4f}", change, share])
    header = ["power p", "condition number", "final loss", "minus control (95 % interval)", "share of PC's gain"]
    return markdown.table(header, rows)


def main() -> None:
    study = studies()["verdict-5"]
    figure, axes = subplots(width=5.0, height=3.2)
    axes.plot([study[arm].condition for arm in DIAL], [study[arm].mean for arm in DIAL], color="C0", linewidth=1)
    for arm, name in (DIAL | OTHERS).items():
        tested, color = study[arm], "C0" if arm in DIAL else "C1"
        error = [[tested.mean - tested.interval.low], [tested.interval.high - tested.mean]]
        axes.errorbar(tested.condition, tested.mean, yerr=error, fmt="o", color=color, markersize=4, capsize=2)
        place, side = ((-6, 4), "right") if arm == "baseline" else ((6, 4 if arm == "dial-0" else -9), "left")
        axes.annotate(
            name, (tested.condition, tested.mean), place, textcoords="offset points", color=color, fontsize=8, ha=side
        )
    axes.set_xscale("log", base=2)
    axes.xaxis.set_major_formatter("{x:g}")
    axes.set_xlabel("condition number of o and ffn at the end")
    axes.set_ylabel("final validation loss (nats per byte)")
    print(save(figure, VERDICT / "dial", metadata={"Rows": digest(VERDICT)}))


if __name__ == "__main__":
    main()
