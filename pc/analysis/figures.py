"""The plotting commands: read, draw everything for which there is data, and report what is missing."""

from collections.abc import Callable, Sequence
from pathlib import Path

from pc.analysis import curves, signals, spectra
from pc.common.files import write_atomically
from pc.common.run_folder import read_log, read_logs, unique_names
from pc.errors import UserError
from pc.sweep import bars


def draw_curves(paths: Sequence[Path], output: Path) -> None:
    """Validation curves with a summary table; activation sizes and estimator error if they were logged."""
    runs = read_logs(paths)
    rows = curves.compare(runs)
    table = curves.table(rows)
    print(table)
    write_atomically(output / "summary.md", table)
    print(curves.plot(runs, rows, output))
    _print_or_explain("activation sizes", lambda: signals.plot_activation_rms(runs, output))
    _print_or_explain("estimator error", lambda: signals.plot_estimator_error(runs, output))


def draw_sweeps(folders: Sequence[Path], baselines: Sequence[Path], output: Path) -> None:
    """A bar plot for each sweep, named after its folder, or as much of its path as is needed."""
    baseline_runs = [read_log(path) for path in baselines]
    names = unique_names([folder.resolve() if folder.is_dir() else folder.resolve().parent for folder in folders])
    for folder, name in zip(folders, names, strict=True):
        file = output / f"bars_{name.replace('/', '-')}"
        print(bars.plot(bars.read_results(folder), file, baseline_runs))


def draw_spectra(sources: Sequence[Path], output: Path, layers: Sequence[int] | None) -> None:
    """Histograms of singular values of the checkpoints; condition numbers of their runs against tokens."""
    found: dict[str, spectra.Spectra] = {}
    checkpoints = spectra.checkpoints_of(sources)
    for name, checkpoint in checkpoints.items():
        found[name] = spectra.compute(checkpoint, layers)
        layers = layers or sorted({layer for layer, _ in found[name]})  # the first one's, for all
    print(spectra.plot(found, output))
    runs = [spectra.run_of(checkpoint) for checkpoint in checkpoints.values()]
    _print_or_explain("GMCN against tokens", lambda: signals.plot_gmcn(read_logs(runs), output))


def _print_or_explain(what: str, plot: Callable[[], Path]) -> None:
    """Draw, or print why not, because other figures can still be drawn."""
    try:
        print(plot())
    except UserError as error:
        print(f"no figure of {what}: {error}")
