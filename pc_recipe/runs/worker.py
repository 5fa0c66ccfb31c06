"""One process of a run: `torchrun ... -m pc_recipe.runs.worker CONFIG.toml --section.key value ...`."""

import contextlib
import os
import sys
from pathlib import Path

import torch.distributed as dist
from torchtitan.tools.logging import logger

from pc.command import DISK_ERRORS, describe_end, print_plainly
from pc.errors import UserError
from pc_recipe.checkpoints import run_tokenizer
from pc_recipe.config import Config, load_config, run_key, write_config
from pc_recipe.files.errors import DiskFailed
from pc_recipe.files.lock import join_lock
from pc_recipe.files.places import CONFIG, PENDING
from pc_recipe.files.run_folder import keep_earlier_config, read_first_config, write_failure
from pc_recipe.runs.nodes import meet_privately
from pc_recipe.train.console import start_logging
from pc_recipe.train.environment import write_environment
from pc_recipe.train.nonfinite import Diverged
from pc_recipe.train.trainer import Trainer

REFUSALS = PermissionError, IsADirectoryError, NotADirectoryError, FileExistsError

meet_privately()  # not in `main`, because a process that torch spawns imports this module alone


def end_with(error: BaseException, folder: Path | None, step: int, rank: int) -> None:
    """Write to status.json why the run ends; exit with a one-line message if the cause is a `UserError`, not a bug.

    Args:
        folder: of the run; None if its config cannot be read.
    """
    # whatever file it was about: TensorBoard's, a compiler's, one of another user
    if isinstance(error, OSError) and (error.errno in DISK_ERRORS or isinstance(error, REFUSALS)):
        error = DiskFailed(f"{os.fsdecode(error.filename or folder or '')}: {error.strerror}")
    if folder and (rank == 0 or isinstance(error, UserError)):
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        with contextlib.suppress(UserError):  # then status.json still says "running"; readers show "interrupted"
            write_failure(folder, reason, step, "diverged" if isinstance(error, Diverged) else "failed")
    if isinstance(error, UserError):
        kind, status = describe_end(error)
        print(f"{kind}: {error}", file=sys.stderr, flush=True)  # torchrun shows rank 0 and logs the others
        os._exit(status)  # other ranks may wait in a collective


def main() -> None:
    rank = int(os.environ.get("RANK", "0"))
    print_plainly()
    start_logging(rank)
    path, *overrides = sys.argv[1:]
    trainer: Trainer | None = None
    config: Config | None = None
    try:
        config = load_config(path, overrides)
        folder = config.folder
        lock_file = join_lock(folder)  # noqa: F841
        trainer = Trainer(config)

        def record(step: int) -> None:
            """Record in the run folder what this start trains with; warn of settings that a resumed run cannot apply."""
            begun = config
            if step and (first := read_first_config(folder)):
                for setting in run_key.list_unapplied(config, first):
                    logger.warning(
                        f"{setting} has no effect: only a new run uses it, and this one continues from step {step}"
                    )
                begun = run_key.as_begun(config, first)
            keep_earlier_config(folder, begun.model_dump(exclude_unset=True), step)
            write_config(begun, folder / CONFIG)
            data = trainer.dataloader.manifests
            write_environment(folder, config, dist.get_world_size(), step, run_tokenizer.describe(data[0]))
            for manifest in [*data, *(trainer.validator.manifests if config.validation.enable else ())]:
                manifest.pin()
            run_tokenizer.keep(folder, data[0])
            (folder / PENDING).unlink(missing_ok=True)

        trainer.train(record)
        trainer.close()
    except BaseException as error:
        if trainer is not None:
            trainer.checkpointer.end_save()
        end_with(error, config.folder if config else None, trainer.step if trainer else 0, rank)
        if trainer is not None:
            trainer.close()
        raise
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
