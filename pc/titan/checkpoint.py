"""TorchTitan's checkpoint manager, with checksums: damage is found before a load, and no save harms what is there."""

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType
from torchtitan.components.checkpoint import AsyncMode, CheckpointManager
from torchtitan.tools.logging import logger
from torchtitan.tools.utils import GarbageCollection

from pc.common.run_folder import INDEX, checkpoints
from pc.errors import UserError
from pc.titan.checksums import ChecksummedWriter, Damaged, has_checksums
from pc.titan.distcp import CheckpointFolder, LoadPlanner, Reader


class Checkpoints(CheckpointManager):
    """Upstream's manager of a run's folder of checkpoints.

    Args:
        keep_every: checkpoints of these steps are kept whatever `keep_latest_k` says; 0 is none.
        may_save: asked before a save on every rank; if False, it is left to the next interval.
        group: processes that agree on what is damaged, on the CPU; None: this one alone.
        others: upstream's arguments.
    """

    def __init__(
        self, *, keep_every: int, may_save: Callable[[], bool], group: dist.ProcessGroup | None, **others: Any
    ) -> None:
        self._keep_every, self._may_save, self._group = keep_every, may_save, group
        super().__init__(**others)

    # --- saving -------------------------------------------------------------------------------------

    def dcp_save(
        self, state_dict, checkpoint_id, async_mode, enable_garbage_collection=False, to_hf=False
    ):  # upstream's signature
        if to_hf:
            return super().dcp_save(state_dict, checkpoint_id, async_mode, enable_garbage_collection, to_hf)
        arguments: dict[str, Any] = {"storage_writer": ChecksummedWriter(checkpoint_id)}
        self._saving = checkpoint_id
        result = None
        if async_mode == AsyncMode.DISABLED:
            try:
                dcp.save(state_dict, **arguments)
            except CheckpointException as error:
                self._give_up(error)
        elif async_mode == AsyncMode.ASYNC:
            # the stager that torch takes where no writer is given; a writer would stage in its own, older way
            stager = DefaultStager(StagingOptions(False, False, False, False))
            result = dcp.async_save(state_dict, process_group=self.pg, async_stager=stager, **arguments)
            result.add_done_callback(lambda _: stager.close())
        else:
            arguments |= {"async_checkpointer_type": AsyncCheckpointerType.PROCESS, "async_stager": self.stager}
            result = dcp.async_save(state_dict, process_group=self.pg, **arguments)
        if enable_garbage_collection:
            GarbageCollection.collect("GC collection invoked by checkpointer.")
        return result

    def save(self, curr_step: int, last_step: bool = False) -> None:
        if self._should_save(curr_step, last_step) and not self._may_save() and not last_step:
            logger.warning(f"No checkpoint of step {curr_step}, which was left out")
            return
        super().save(curr_step, last_step)

    def finish_saving(self) -> None:
        """Wait for a checkpoint that is still being written; raises UserError if it cannot be."""
        if self.enable:
            self._async_wait()

    def is_whole(self, step: int) -> bool:
        """Whether the checkpoint of a step was written to its end."""
        return self.enable and Path(self._create_checkpoint_id(step), INDEX).exists()

    def _async_wait(self) -> None:
        try:
            super()._async_wait()
        except CheckpointException as error:
            self.save_future = None
            self._give_up(error)

    def _give_up(self, error: CheckpointException) -> None:
        """Raise the reason why a save failed, if it is one that a user can fix. Every rank gets here, or none."""
        for rank, (cause, _) in sorted(error.failures.items()):
            if isinstance(cause, OSError):
                if dist.get_rank() == 0:
                    shutil.rmtree(self._saving, ignore_errors=True)  # half a checkpoint; it may fill the disk
                raise UserError(
                    f"{self._saving} could not be written (rank {rank}: {cause.strerror}); earlier checkpoints are "
                    "as they were, and the same command continues from the newest"
                ) from error
        raise error

    def _purge_stale_checkpoints(self) -> None:
        """Keep the newest whole checkpoints and those of every n-th step; drop halves older than the newest whole one."""
        if self.keep_latest_k == 0 or dist.get_rank() != 0:
            return
        steps = self._steps()
        whole = [step for step in steps if self.is_whole(step)]
        kept = set(whole[-self.keep_latest_k :])
        for step in steps:
            is_due = self._keep_every and step % self._keep_every == 0 and step in whole
            if step not in kept and not is_due and whole and step < whole[-1]:
                folder = self._create_checkpoint_id(step)
                # first of all it stops being whole: a kill may come before the last file is gone
                Path(folder, INDEX).unlink(missing_ok=True)
                self.purge_queue.put(folder)

    def _steps(self) -> list[int]:
        """Steps that have a folder, whole or not."""
        return list(checkpoints(self.folder))

    # --- loading ------------------------------------------------------------------------------------

    def dcp_load(self, state_dict, checkpoint_id, from_hf, from_quantized) -> None:
        if from_hf:
            super().dcp_load(state_dict, checkpoint_id, from_hf, from_quantized)
            return
        if not has_checksums(checkpoint_id):
            logger.warning(f"{checkpoint_id} has no checksums; only the sizes of its files were checked")
        dcp.load(state_dict, storage_reader=Reader(checkpoint_id), planner=LoadPlanner())
        self.states["model"].load_state_dict(state_dict)

    def verify(self, checkpoint: str | Path) -> None:
        """Compare a checkpoint's checksums, each rank its share of the files. All ranks call it, all raise or none.

        Raises:
            UserError: no checkpoint there.
            Damaged: naming a file.
        """
        rank, ranks = (0, 1) if self._group is None else (dist.get_rank(), dist.get_world_size())
        error = None
        try:
            CheckpointFolder(checkpoint).verify(rank, ranks)
        except UserError as found:
            error = found
        errors = [error]
        if self._group is not None:
            errors = [None] * ranks
            dist.all_gather_object(errors, error, group=self._group)
        for error in errors:
            if error is not None:
                raise error

    def newest_whole(self) -> int:
        """The step of the newest checkpoint that is whole and undamaged; -1 if there is none yet.

        Newer ones that are not are set aside, and so is a folder that holds no whole one at all: TorchTitan would
        take its existence for a resume and leave the start that the config names unread.

        Raises:
            Damaged: there are whole checkpoints, and every one is damaged.
        """
        steps = self._steps()
        bad: dict[int, str] = {}
        chosen, damage = -1, None
        for step in reversed(steps):
            if not self.is_whole(step):
                bad[step] = "half written, as a kill during a save leaves it"
                continue
            try:
                self.verify(self._create_checkpoint_id(step))
                chosen = step
                break
            except Damaged as error:
                bad[step] = str(error)
                damage = damage or error
        if chosen == -1 and damage is not None:
            raise Damaged(f"{damage}; no other checkpoint in {self.folder} is whole")
        if self._group is not None:
            dist.barrier(group=self._group)  # every rank has looked
        if dist.get_rank() == 0:
            for step, complaint in bad.items():
                self._set_aside(Path(self._create_checkpoint_id(step)), complaint)
            if chosen == -1 and Path(self.folder).is_dir():
                for rest in Path(self.folder).iterdir():
                    self._set_aside(rest, "no checkpoint of this trainer")
                Path(self.folder).rmdir()
        if self._group is not None:
            dist.barrier(group=self._group)
        return chosen

    def go_back(self, step: int) -> None:
        """Set checkpoints newer than this aside, or a restart would go on from them. Every rank calls it."""
        if self._group is not None:
            dist.barrier(group=self._group)  # every rank has looked
        newer = [other for other in self._steps() if other > step] if dist.get_rank() == 0 else []
        for other in newer:
            complaint = f"the run went back to step {step} (checkpoint.load_step)"
            self._set_aside(Path(self._create_checkpoint_id(other)), complaint, Path(f"{self.folder}.abandoned"))

    def remind(self) -> None:
        """Say once more what was set aside in this run, by this job or an earlier one."""
        if self.enable and self._aside.is_dir() and dist.get_rank() == 0:
            names = ", ".join(sorted(folder.name for folder in self._aside.iterdir()))
            logger.warning(f"Damaged or half-written checkpoints were set aside in {self._aside}: {names}")

    @property
    def _aside(self) -> Path:
        return Path(f"{self.folder}.damaged")

    def _set_aside(self, path: Path, complaint: str, where: Path | None = None) -> None:
        where = where or self._aside
        where.mkdir(exist_ok=True)
        names = (f"{path.name}.{n}" if n else path.name for n in range(10**6))
        target = next(where / name for name in names if not (where / name).exists())
        path.rename(target)
        logger.warning(f"{path} is not used: {complaint}; it is now {target}")
