"""The plotting commands: read, draw everything for which there is data, and report what is missing.

Drawn here are the diagnostics of a run, which are the estimator's error, activation sizes, condition numbers.
"""

from collections.abc import Callable, Sequence
from pathlib import Path

import pandas as pd
from matplotlib.ticker import MaxNLocator

from pc.errors import UserError
from pc.measure import conditioning
from pc.report import page
from pc.report.read import of_tensors
from pc.report.terminal import announce_and_watch
from pc_recipe.files import look
from pc_recipe.files.atomic import write_atomically
from pc_recipe.files.plots import label_tokens, legend_below, save, subplots
from pc_recipe.files.run_log import RunLog, read_log, read_logs, unique_names
from pc_recipe.report import curves, settings, spectra
from pc_recipe.report.spectra import BLOCK_TITLES
from pc_recipe.runs.sweep import points

_ERROR = "spectra/estimate_error/"
_GMCN = {"pc": "PC blocks", "qkv": r"$W_\mathrm{Q}, W_\mathrm{K}, W_\mathrm{V}$", "all": "all"}


def draw_curves(paths: Sequence[Path], output: Path) -> None:
    """Validation curves with a summary table; all else if it was logged."""
    runs = curves.marked(read_logs(paths))
    rows = curves.compare(runs)
    table = curves.table(rows) + "".join(f"Runs differ in {line}.\n" for line in settings.differences(runs))
    print(table)
    write_atomically(output / "summary.md", table)
    print(curves.plot(runs, rows, output))
    _print_or_explain("training_loss", curves.plot_training_loss, runs, output)
    _print_or_explain("validation_loss_by_time", curves.plot_validation_over_time, runs, output)
    _print_or_explain("activation_rms", plot_activation_rms, runs, output)
    _print_or_explain("estimator_error", plot_estimator_error, runs, output)


def draw_sweeps(folders: Sequence[Path], baselines: Sequence[Path], output: Path) -> None:
    """Final losses of each sweep, named after its folder, or as much of its path as is needed."""
    for earlier in output.glob("sweep_*.png"):
        earlier.unlink()
    baseline_runs = [read_log(path) for path in baselines]
    names = unique_names(
        [folder.resolve() if look.is_folder(folder) else folder.resolve().parent for folder in folders]
    )
    for folder, name in zip(folders, names, strict=True):
        file = output / f"sweep_{name.replace('/', '-')}"
        print(points.plot(points.read_results(folder), file, baseline_runs))


def draw_spectra(sources: Sequence[Path], output: Path, layers: Sequence[int] | None) -> None:
    """Histograms of singular values of the checkpoints; condition numbers of their runs against tokens."""
    by_name: dict[str, spectra.Spectra] = {}
    checkpoints = spectra.checkpoints_of(sources)
    for name, checkpoint in checkpoints.items():
        by_name[name] = spectra.compute(checkpoint, layers)
        layers = layers or sorted({layer for layer, _ in by_name[name]})  # the first one's, for all
    print(spectra.plot(by_name, output))
    runs = [spectra.run_folder_of(checkpoint) for checkpoint in checkpoints.values()]
    _print_or_explain("gmcn", plot_gmcn, read_logs(runs), output)


def write_report(sources: Sequence[Path], output: Path) -> None:
    """The page of `pc.report` about the checkpoints; of a run with PC about W and PC(W)."""
    models, with_pc = {}, []
    for name, checkpoint in spectra.checkpoints_of(sources).items():
        for which, tensors in spectra.both_weights(checkpoint).items():
            title = f"{name}, {which}" if which else name
            with_pc += [title] if which else []
            found = of_tensors(title, tensors)
            models[title] = conditioning(found.model, found.load, watch=announce_and_watch)
    page.write(models, output / "report.html", with_pc)
    print(output / "report.html")


def _print_or_explain(
    name: str, plot: Callable[[Sequence[RunLog], Path], Path], runs: list[RunLog], output: Path
) -> None:
    """Draw, or print why not, because other figures can still be drawn; then one of an earlier comparison goes."""
    try:
        print(plot(runs, output))
    except UserError as error:
        (output / f"{name}.png").unlink(missing_ok=True)
        print(f"no {name}.png: {error}")


def plot_estimator_error(runs: Sequence[RunLog], output: Path) -> Path:
    """Relative error of the spectral-norm estimate against steps: per matrix type, median and maximum."""
    logged = {key.split("/")[2] for run in runs for key in run.keys() if key.startswith(_ERROR)}
    blocks = [block for block in BLOCK_TITLES if block in logged]
    if not blocks:
        raise UserError("no run logged it: it needs [pc] enable = true and [diagnostics] spectra_freq above 0")
    figure, panels = subplots(1, len(blocks), width=3.2, height=2.9, sharey=True, squeeze=False)
    for axes, block in zip(panels[0], blocks, strict=True):
        for i, run in enumerate(runs):
            for statistic, style in (("median", "-"), ("max", "--")):
                series = run.series(f"{_ERROR}{block}/{statistic}")
                # An estimate can be exact to the last bit, but the logarithmic axis has no zero.
                values, label = series.clip(lower=1e-9), f"{run.name}, {statistic}" if len(series) else None
                axes.plot(series.index, values, style, marker=".", color=f"C{i}", label=label)
        axes.set_yscale("log")
        axes.set_title(BLOCK_TITLES[block])
        axes.set_xlabel("step")
    panels[0, 0].set_ylabel(r"$|s(W) - \|W\|_2| \,/\, \|W\|_2$")
    legend_below(figure, panels[0, 0])
    return save(figure, output / "estimator_error")


def plot_activation_rms(runs: Sequence[RunLog], output: Path) -> Path:
    """RMS of attention and FFN outputs before the residual addition, averaged over layers, against steps."""
    figure, panels = subplots(1, 2, width=4.0)
    for axes, part, title in zip(panels, ("attention", "ffn"), ("Attention", "FFN"), strict=True):
        for i, run in enumerate(runs):
            layers = [run.series(key) for key in run.keys() if key.startswith(f"signal/{part}/rms/")]
            if not layers:
                raise UserError(f"{run.file}: none were logged; set [diagnostics] freq above 0")
            mean = pd.DataFrame(layers).mean()
            axes.plot(mean.index, mean, color=f"C{i}", label=run.name)
        axes.set_title(f"{title} output, mean over layers")
        axes.set_xlabel("step")
        axes.set_ylabel("RMS")
    legend_below(figure, panels[0])
    return save(figure, output / "activation_rms")


def plot_gmcn(runs: Sequence[RunLog], output: Path) -> Path:
    """Global modified condition number against tokens, for the PC blocks, QKV and all matrices."""
    figure, panels = subplots(1, 3, width=3.2)
    for axes, (group, title) in zip(panels, _GMCN.items(), strict=True):
        for i, run in enumerate(runs):
            curve = run.series(f"spectra/gmcn/{group}", "tokens", "set [diagnostics] spectra_freq above 0")
            axes.plot(curve.index, curve, marker=".", color=f"C{i}", label=run.name)
        axes.set_title(title)
        label_tokens(axes)
        axes.xaxis.set_major_locator(MaxNLocator(4))
        axes.set_ylabel(r"$\tilde\kappa$")
    legend_below(figure, panels[0])
    return save(figure, output / "gmcn")
