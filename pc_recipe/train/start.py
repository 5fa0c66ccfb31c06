"""What a run continues or starts from: its newest checkpoint, another run's, weights alone, or a Hugging Face folder."""

import contextlib
import math
from pathlib import Path

import torch.distributed as dist
from torchtitan.tools.logging import logger

from pc.api import preserve
from pc.errors import UserError
from pc_recipe.checkpoints import fingerprint, run_tokenizer
from pc_recipe.checkpoints.folder import CheckpointFolder
from pc_recipe.config import Config, read_earlier
from pc_recipe.config.rank_batches import RankBatches
from pc_recipe.config.run_key import BATCH, STARTS, all_values
from pc_recipe.config.sections import RESULT, keys_of
from pc_recipe.data.manifest import Manifest
from pc_recipe.files.run_folder import read_environment, require_no_other_run
from pc_recipe.train.checkpoint import Checkpoints, plain_keys
from pc_recipe.train.llama2 import model_args_of
from pc_recipe.train.optimizers import Optimizers


def load(
    config: Config, batches: RankBatches, data: Manifest, checkpointer: Checkpoints, optimizers: Optimizers
) -> Path | None:
    """Load what the run starts from into the states of the checkpointer. All ranks call it; nothing changes before all
    checks have passed.

    Args:
        data: of the first folder, which has the run's tokenizer.

    Returns:
        The folder loaded from; None if there is nothing to load.

    Raises:
        UserError: a checkpoint of another method, model or optimizer; initial weights that are not plain; or a folder of
            another run.
    """
    settings, folder = config.checkpoint, config.folder
    names = run_tokenizer.describe(data)
    method = fingerprint.fingerprint(config.pc, config.model, names)
    checkpointer.states["method"] = dict(method)
    if not settings.enable:
        checkpointer.call_on_rank_0(lambda: require_no_other_run(folder, config.model_dump(exclude_unset=True)))
        return None

    def resume(checkpoint: CheckpointFolder) -> None:
        _require_same_run(checkpoint, config, checkpointer)
        if saved := fingerprint.read_tokenizer(checkpoint):
            run_tokenizer.require_equal(saved, names, f"{checkpoint.path} belongs to", f"{data.folder} was made with")
        checkpointer.exclude_from_loading = []  # it applies only where a new run starts
        checkpointer.read(checkpoint)

    newest, initial = checkpointer.newest_valid(resume), Path(settings.initial_load_path or "")
    if newest is not None:
        if dist.get_rank() == 0:
            _say_what_changed(folder, config, batches, optimizers)
    elif not settings.initial_load_path:
        return None
    elif settings.initial_load_in_hf:
        from pc_recipe.checkpoints.hf_folder import require_initial_load  # takes seconds

        require_initial_load(initial, model_args_of(config))
        _require_same_tokenizer(initial, config, data)
        checkpointer.read(initial, model_only=True)
    else:
        checkpoint = checkpointer.verified(initial)
        if settings.initial_load_model_only:
            fingerprint.require_same_model(checkpoint, config.model, plain_keys(checkpointer.model_shapes()))
        else:
            _require_same_run(checkpoint, config, checkpointer)
        _require_same_tokenizer(checkpoint, config, data)
        checkpointer.read(checkpoint, model_only=settings.initial_load_model_only)
    is_plain = newest is None and (settings.initial_load_in_hf or settings.initial_load_model_only)
    _take_loaded(config, optimizers, is_plain)
    checkpointer.states["method"] = method  # loading put the checkpoint's in its place, perhaps of an older version
    return newest.path if newest else initial


def _take_loaded(config: Config, optimizers: Optimizers, is_plain: bool) -> None:
    """Make W, gamma, u and v fit the loaded weights. For plain weights the key `start` of section `[pc]` says how."""
    if optimizers.preconditioner is None:
        return
    if not is_plain:
        optimizers.preconditioner.note_loaded()
    elif config.pc.start == "preserve":
        preserve(optimizers.model_parts)
    else:
        optimizers.preconditioner.restart()


def _say_what_changed(folder: Path, config: Config, batches: RankBatches, optimizers: Optimizers) -> None:
    """Warn of keys that decide the result and differ from the run's earlier part; of the rate, say how to go back."""
    earlier = read_earlier(folder) or config
    before, now = all_values(earlier), all_values(config)
    with contextlib.suppress(UserError):  # the earlier number of ranks is not known
        before[BATCH] = RankBatches.of(earlier, read_environment(folder).get("world_size", 0)).sequences
        now[BATCH] = batches.sequences
    # other training data are refused, whatever their path
    keys = [key for key, decides, *_ in keys_of(config) if decides == RESULT and key not in (*STARTS, "data.path")]
    keys = [key for key in keys if before[key] != now[key]]
    changed = [f"{key} {before[key]} -> {now[key]}" for key in keys]
    rates = zip(optimizers.saved_rates, optimizers.rates(), strict=True)
    old, new = max(rates, key=lambda pair: abs(pair[1] - pair[0]))
    rate, is_scheduled = "", any(key.startswith("lr_scheduler.") or key == "training.steps" for key in keys)
    if is_scheduled or not math.isclose(old, new, rel_tol=1e-6):
        total = earlier.lr_scheduler.total_steps or earlier.training.steps
        goes = f"goes from {old:.3g} to {new:.3g}" if f"{old:.3g}" != f"{new:.3g}" else f"is still {new:.3g}"
        rate = f": the rate {goes} (--lr_scheduler.total_steps {total} keeps a schedule of {total} steps)"
    if changed or rate:
        logger.warning(f"continues with {', '.join(changed) or 'another schedule'}{rate}")


def _require_same_run(checkpoint: CheckpointFolder, config: Config, checkpointer: Checkpoints) -> None:
    fingerprint.require_same_run(checkpoint, config.pc, {"adamw", config.optimizer.name.lower()})
    fingerprint.require_same_model(checkpoint, config.model, checkpointer.model_shapes())


def _require_same_tokenizer(start: CheckpointFolder | Path, config: Config, data: Manifest) -> None:
    if not config.checkpoint.initial_load_tokenizer_is_the_same:
        run_tokenizer.require_for_start(start, data)
