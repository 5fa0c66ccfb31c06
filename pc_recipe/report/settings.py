"""In which settings runs differ, and whether they train the same model: what a comparison of losses has to say first."""

from collections.abc import Sequence

from pc.errors import UserError
from pc_recipe.config import Config, load_config, run_key
from pc_recipe.config.model_sizes import sizes_of
from pc_recipe.files.run_log import RunLog


def read(run: RunLog) -> Config | None:
    """The run's configuration; None without one that this version can read."""
    try:
        return load_config(run.file.parent / "config.toml")
    except UserError:
        return None


def are_of_one_model(first: Config | None, other: Config | None) -> bool:
    """Whether both have the same sizes, whatever their PC; of an unknown configuration it is taken to be so."""
    if first is None or other is None:
        return True
    return sizes_of(first.model) == sizes_of(other.model)


def differences(runs: Sequence[RunLog]) -> list[str]:
    """Such as "optimizer.lr: 0.001 in baseline, 0.002 in pc" for each setting that decides a result."""
    known = {run.name: config for run in runs if (config := read(run)) is not None}
    keys = {name: run_key.result_key(config, data={}) for name, config in known.items()}
    first, *others = keys.values() or [{}]
    differing = dict.fromkeys(key for other in others for key in run_key.differing_keys(first, other))
    if "pc.enable" in differing:  # the baseline has none of the others
        differing = {key: None for key in differing if key == "pc.enable" or not key.startswith("pc.")}
    values = {name: run_key.all_values(config) for name, config in known.items()}
    unknown = [run.name for run in runs if run.name not in known]
    return [f"{key}: {', '.join(f'{values[name].get(key)} in {name}' for name in known)}" for key in differing] + (
        [f"unknown settings: no configuration of {', '.join(unknown)} can be read"] if unknown else []
    )
