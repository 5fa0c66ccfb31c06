"""Final validation losses as points: learning-rate grids and ablations, from a sweep's results."""

import math
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pandas as pd
from pydantic import ConfigDict
from typing_extensions import Required, TypedDict

from pc.errors import UserError
from pc_recipe.config.sections import Text
from pc_recipe.files import record
from pc_recipe.files.run_folder import list_runs, read_state
from pc_recipe.files.run_log import VALIDATION, RunLog, unique_names
from pc_recipe.pages.plots import save, subplots
from pc_recipe.runs.comparable import require_same_sequences, require_same_text
from pc_recipe.runs.sweep.spec import label


class _Result(TypedDict, total=False):
    """A line of results.jsonl; the keys that are not required are missing in older ones."""

    __pydantic_config__ = ConfigDict(extra="allow", allow_inf_nan=False)  # type: ignore[misc]
    config: Required[Text]
    settings: Required[dict[str, Any]]
    name: Text
    folder: Text
    state: str
    validation_loss: float | None
    spikes: int | None
    """null: too few losses were logged to look for them."""


def read_results(folder: Path) -> list[dict]:
    """Lines of `results.jsonl` in a sweep's folder, one per finished or diverged run.

    The loss is null or absent if the run diverged or was not validated.

    Raises:
        UserError: the file is missing, has other content, or is older than a run in its folder.
    """
    file = folder / "results.jsonl"
    results = record.read(file, _Result)
    if results is None:
        raise UserError(f"{file}: no such file; scripts/sweep.py select writes it into the sweep's folder")
    states = {(folder / result.get("name", "")).resolve(): result.get("state", "finished") for result in results}
    _require_up_to_date(file, states)
    return results


def _require_up_to_date(file: Path, known: dict[Path, str]) -> None:
    """Refuse old results: SLURM's array tasks do not write them when they end.

    `known`: {resolved folder: state}. In a sweep that has grown, runs of new names are links to earlier ones.
    """
    for run in list_runs(file.parent):
        state = read_state(run).state
        if state in ("finished", "diverged") and known.get(run.resolve()) != state:
            raise UserError(
                f"{file} is older than {run.relative_to(file.parent)}, which has {state}; scripts/sweep.py select updates "
                "it if the sweep still has that run; else move the run's folder away"
            )


def plot(results: Sequence[dict], path: Path) -> Path:
    """The panels of a sweep side by side, as PNG."""
    drawn = panels(results)
    figure, all_axes = subplots(1, len(drawn), width=4.6, height=3.4, squeeze=False)
    for axes, (title, draw) in zip(all_axes[0], drawn.items(), strict=True):
        draw(axes)
        axes.set_title(title)
    return save(figure, path)


def panels(results: Sequence[dict], baselines: Sequence[RunLog] = ()) -> dict[str, Callable[[Any], None]]:
    """{name of a config: what draws its panel}, a point per setting: mean over seeds with the range; hollow if losses
    spiked.

    The mean is that of the runs with a final loss; the number of those without is written at the bottom.

    Args:
        results: lines of results.jsonl.
        baselines: one run per config, in the order of their first results, to draw as a dashed line; or none.

    Raises:
        UserError: another number of baselines, or the losses of one panel cannot be compared.
    """
    every = [result["settings"] for result in results]
    varied = [
        key
        for key in dict.fromkeys(key for one in every for key in one)
        if len({str(one[key]) for one in every if key in one}) > 1
    ]
    names = [label({key: one[key] for key in varied if key in one}) or "as it is" for one in every]
    runs = pd.DataFrame(results).reindex(columns=["config", VALIDATION, "spikes"]).assign(setting=names)
    groups = dict(list(runs.groupby("config", sort=False)))
    titles = unique_names([Path(config).with_suffix("") for config in groups])
    by_config = dict(zip(titles, groups.values(), strict=True))
    if baselines and len(baselines) != len(by_config):
        raise UserError(
            f"{len(baselines)} runs given with the sweep, {len(by_config)} needed: one for each of {', '.join(by_config)}"
        )
    for i, config in enumerate(groups):
        own = [Path(one["folder"]) for one in results if one["config"] == config and _has_loss(one)]
        drawn = own + [baseline.file.parent for baseline in baselines[i : i + 1]]
        require_same_text(drawn)
        require_same_sequences(drawn)
    return {
        title: partial(_draw_panel, group=group, baseline=baselines[i] if baselines else None)
        for i, (title, group) in enumerate(by_config.items())
    }


def _has_loss(result: dict) -> bool:
    """Whether a result has a loss and, as older ones do not, the folder of its run."""
    return result.get(VALIDATION) is not None and "folder" in result


def _draw_panel(axes: Any, group: pd.DataFrame, baseline: RunLog | None) -> None:
    settings, shown = group.groupby("setting", sort=False), group[VALIDATION].dropna().tolist()
    for place, (_, one) in enumerate(settings):
        _draw(axes, place, one[VALIDATION].astype(float), spiked=(one.spikes.astype(float) > 0).any())
    if baseline is not None:
        final = baseline.series(VALIDATION, remedy="the baseline has no validation").iloc[-1]
        axes.axhline(final, color="C3", linestyle="--", label=f"{baseline.name}, {final:.4f}")
        shown += [final] if math.isfinite(final) else []
    if shown:
        margin = 0.25 * (max(shown) - min(shown)) or 0.01 * max(shown)
        axes.set_ylim(min(shown) - margin, max(shown) + margin)
    axes.set_xlim(-0.6, len(settings) - 0.4)  # also where the last has no point
    axes.set_xticks(range(len(settings)), [name for name, _ in settings], rotation=35, ha="right", fontsize=7)
    axes.set_ylabel("final validation loss (nats per token)")


def _draw(axes, place: int, losses: pd.Series, spiked: bool) -> None:
    if losses.isna().any():
        note = f"no loss:\n{losses.isna().sum()} of {len(losses)}"
        axes.annotate(note, (place, 0.01), xycoords=("data", "axes fraction"), ha="center", fontsize=7)
    if losses.notna().any():
        axes.vlines(place, losses.min(), losses.max(), color="C0")
        axes.plot(place, losses.mean(), "o", color="C0", markerfacecolor="white" if spiked else None)
        above = {"xytext": (0, 4), "textcoords": "offset points"}
        axes.annotate(f"{losses.mean():.4f}", (place, losses.max()), **above, ha="center", va="bottom", fontsize=7)
