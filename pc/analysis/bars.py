"""Bars of final validation losses: learning-rate grids and ablations, from a sweep's results.jsonl."""

import json
import math
import statistics
from collections.abc import Sequence
from pathlib import Path

from pc.analysis.curves import VALIDATION
from pc.common.plots import save, subplots
from pc.common.run_folder import RunLog
from pc.errors import UserError
from pc.sweep.spec import label


def read_results(source: Path) -> list[dict]:
    """Lines of `results.jsonl` (a sweep's folder or the file itself), one per finished or diverged run.

    The loss is null or absent if the run diverged or was not validated.
    """
    file = source / "results.jsonl" if source.is_dir() else source
    if not file.is_file():
        raise UserError(f"{file}: no such file; scripts/sweep.py select writes it into the sweep's folder")
    try:
        results = [json.loads(line) for line in file.read_text().splitlines() if line.strip()]
        for result in results:
            result["config"], result["settings"], result["spikes"]
    except (json.JSONDecodeError, KeyError, AttributeError) as error:
        raise UserError(f"{file}: not the results of a sweep ({error})") from None
    return results


def plot(results: Sequence[dict], baselines: Sequence[RunLog], path: Path) -> Path:
    """A panel per config, a bar per setting: mean over seeds with the range; hatched if losses spiked.

    The mean is that of the runs with a final loss; the number of those without is written at the bottom.

    Args:
        baselines: one run per config, in the order of their first results, to draw as a dashed line; or none.
    """
    if all(result.get(VALIDATION) is None for result in results):
        raise UserError(f"{path.name}: no finished run of the sweep has a {VALIDATION}")
    configs = list(dict.fromkeys(result["config"] for result in results))
    if baselines and len(baselines) != len(configs):
        names = ", ".join(Path(config).stem for config in configs)
        raise UserError(f"--baseline: {len(baselines)} given, {len(configs)} needed, one for each of {names}")
    figure, panels = subplots(1, len(configs), width=4.6, height=3.4, squeeze=False)
    values: dict[str, list] = {}
    for result in results:
        for key, value in result["settings"].items():
            values.setdefault(key, []).append(value)
    varied = [key for key, given in values.items() if any(value != given[0] for value in given)]
    for i, (axes, config) in enumerate(zip(panels[0], configs, strict=True)):
        bars: dict[str, list[dict]] = {}
        for result in results:
            if result["config"] == config:
                chosen = {key: value for key, value in result["settings"].items() if key in varied}
                bars.setdefault(label(chosen) or "as it is", []).append(result)
        shown = [loss for place, runs in enumerate(bars.values()) for loss in _draw(axes, place, runs)]
        if baselines:
            final = baselines[i].require(VALIDATION, "the baseline has no validation").values[-1]
            axes.axhline(final, color="C3", linestyle="--", label=f"{baselines[i].name}: {final:.4f}")
            axes.legend(loc="upper right")
            shown += [final] if math.isfinite(final) else []
        if shown:  # the axis does not start at 0, because differences are small
            margin = 0.25 * (max(shown) - min(shown)) or 0.01 * max(shown)
            axes.set_ylim(min(shown) - margin, max(shown) + margin)
        axes.set_xlim(-0.6, len(bars) - 0.4)  # also where the last has no bar
        axes.set_xticks(range(len(bars)), bars, rotation=35, ha="right", fontsize=7)
        axes.set_title(Path(config).stem)
        axes.set_ylabel("final validation loss (nats per token)")
    return save(figure, path)


def _draw(axes, place: int, runs: Sequence[dict]) -> list[float]:
    """One bar; returns the losses that it shows."""
    losses = [run[VALIDATION] for run in runs if run.get(VALIDATION) is not None]
    if len(losses) < len(runs):
        words = f"{len(runs) - len(losses)} of {len(runs)} without a loss"
        axes.annotate(words, (place, 0.01), xycoords=("data", "axes fraction"), ha="center", fontsize=7)
    if losses:
        mean, spiked = statistics.fmean(losses), any(run["spikes"] for run in runs)
        axes.bar(place, mean, color="C0", alpha=0.8, hatch="//" if spiked else None, edgecolor="white")
        axes.vlines(place, min(losses), max(losses), color="k")
        axes.annotate(f"{mean:.4f}", (place, max(losses)), ha="center", va="bottom", fontsize=7)
    return losses
