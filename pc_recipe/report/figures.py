"""The figures of `scripts/spectra.py`: it reads, draws everything for which there is data, and says what is missing."""

from collections.abc import Sequence
from pathlib import Path

from matplotlib.ticker import MaxNLocator

from pc.errors import UserError
from pc.measure import conditioning
from pc.report import page
from pc.report.read import of_tensors
from pc.report.terminal import announce_and_watch
from pc_recipe.config import read_config
from pc_recipe.files.places import run_of
from pc_recipe.files.run_log import RunLog, read_logs
from pc_recipe.pages.plots import label_tokens, legend_below, save, subplots
from pc_recipe.report import settings, spectra

_GMCN = {"pc": "PC blocks", "qkv": r"$W_\mathrm{Q}, W_\mathrm{K}, W_\mathrm{V}$", "all": "all"}


def draw_spectra(sources: Sequence[Path], output: Path, layers: Sequence[int] | None) -> None:
    """Histograms of singular values of the checkpoints; condition numbers of their runs against tokens."""
    by_name: dict[str, spectra.Spectra] = {}
    checkpoints = spectra.named_checkpoints(sources)
    for name, checkpoint in checkpoints.items():
        by_name[name] = spectra.compute(checkpoint, layers)
        layers = layers or sorted({layer for layer, _ in by_name[name]})  # the first one's, for all
    print(spectra.plot(by_name, output))
    runs = [run_of(checkpoint) for checkpoint in checkpoints.values()]
    try:
        print(plot_gmcn(read_logs(runs), output))
    except UserError as error:  # the other figure is there
        (output / "gmcn.png").unlink(missing_ok=True)  # of an earlier comparison
        print(f"no gmcn.png: {error}")


def write_report(sources: Sequence[Path], output: Path) -> None:
    """The page of `pc.report` about the checkpoints; for a run with PC, about both W and PC(W)."""
    models, with_pc = {}, []
    for name, checkpoint in spectra.named_checkpoints(sources).items():
        for which, tensors in spectra.both_weights(checkpoint).items():
            title = f"{name}, {which}" if which else name
            with_pc += [title] if which else []
            found = of_tensors(title, tensors)
            models[title] = conditioning(found.model, found.load, watch=announce_and_watch)
    page.write(models, output / "report.html", with_pc)
    print(output / "report.html")


def plot_gmcn(runs: Sequence[RunLog], output: Path) -> Path:
    """Global modified condition number against tokens, for the PC blocks, QKV and all matrices."""
    figure, panels = subplots(1, 3, width=3.2)
    for axes, (group, title) in zip(panels, _GMCN.items(), strict=True):
        for i, run in enumerate(runs):
            curve = run.series(f"spectra/gmcn/{group}", "tokens", "set [diagnostics] spectra_freq above 0")
            axes.plot(curve.index, curve, marker=".", color=f"C{i}", label=run.name)
        apart = group == "pc" and len({settings.blocks(read_config(run.file.parent)) for run in runs}) > 1
        axes.set_title(title + " (not the same ones)" * apart)
        label_tokens(axes)
        axes.xaxis.set_major_locator(MaxNLocator(4))
        axes.set_ylabel(r"$\tilde\kappa$")
    legend_below(figure, panels[0])
    return save(figure, output / "gmcn")
