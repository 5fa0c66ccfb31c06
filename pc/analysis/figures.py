"""What the plotting commands do: read, draw all for which there is data, say what there was none for."""

from collections.abc import Sequence
from pathlib import Path

from pc.analysis import bars, curves, signals, spectra, spectra_plots
from pc.common.files import write_atomically
from pc.common.run_folder import METRICS, read_log, read_logs
from pc.errors import UserError


def draw_curves(paths: Sequence[Path], output: Path) -> None:
    """Validation curves with a summary table; activation sizes and estimator error where they were logged."""
    runs = read_logs(paths)
    print(curves.table(curves.compare(runs)))
    _print(curves.write_comparison(runs, output))
    for what, plot in (
        ("activation sizes", signals.plot_activation_rms),
        ("estimator error", signals.plot_estimator_error),
    ):
        _print_or_explain(what, plot, runs, output)


def draw_sweeps(folders: Sequence[Path], baselines: Sequence[Path], output: Path) -> None:
    """A bar plot for each sweep, named after its folder."""
    baseline_runs = [read_log(path) for path in baselines]
    for folder in folders:
        results = bars.read_results(folder)
        name = folder.resolve().name if folder.is_dir() else folder.resolve().parent.name
        _print(bars.plot(results, baseline_runs, output / f"bars_{name}"))


def draw_spectra(sources: Sequence[Path], output: Path, layers: Sequence[int] | None) -> None:
    """Singular values, histograms, quantile curves, condition numbers; GMCN of run folders."""
    all_spectra = [spectra.of_source(source, output) for source in sources]
    for item in all_spectra:
        if not item.pc_blocks:
            print(f"{item.name}, step {item.step}: without PC; its raw weights are its effective weights")
    text = spectra.table(all_spectra)
    print(text)
    write_atomically(output / "condition_numbers.md", text)
    _print(spectra_plots.plot_histograms(all_spectra, layers, output))
    _print(spectra_plots.plot_quantiles(all_spectra, output))
    # singular values that were stored in a run's folder know the run
    folders = [source.parent if source.suffix == ".npz" else source for source in sources]
    folders = list(dict.fromkeys(folder for folder in folders if (folder / METRICS).is_file()))
    if folders:
        _print_or_explain("GMCN against tokens", signals.plot_gmcn, read_logs(folders), output)
    else:
        print(f"no figure of the GMCN against tokens: give run folders, or .npz files beside a {METRICS}")


def _print_or_explain(what: str, plot, runs, output: Path) -> None:
    """Draw, or say why not: these figures come with others that can be drawn."""
    try:
        _print(plot(runs, output))
    except UserError as error:
        print(f"no figure of {what}: {error}")


def _print(paths: Sequence[Path]) -> None:
    for path in paths:
        print(path)
