"""TorchTitan's checkpoint manager with checksums: finds damage before a load, and a failed save harms no checkpoint."""

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType
from torchtitan.components.checkpoint import AsyncMode, CheckpointManager
from torchtitan.tools.logging import logger
from torchtitan.tools.utils import GarbageCollection

from pc.common.errors import WriteFailed
from pc.common.run_folder import INDEX, checkpoints
from pc.errors import UserError
from pc.titan.checksums import ChecksummedWriter, Damaged, has_checksums
from pc.titan.distcp import CheckpointFolder, LoadPlanner, Reader

T = TypeVar("T")


class Checkpoints(CheckpointManager):
    """TorchTitan's manager of a run's checkpoints.

    Args:
        keep_every: keep checkpoints of multiples of this step regardless of `keep_latest_k`; 0 is off.
        may_save: called on every rank before a save; if it returns False, the save is skipped until the next interval.
        group: CPU process group that agrees on which checkpoints are damaged; None for a single process.
        others: TorchTitan's arguments.
    """

    def __init__(
        self, *, keep_every: int, may_save: Callable[[], bool], group: dist.ProcessGroup | None, **others: Any
    ) -> None:
        self._keep_every, self._may_save, self._group = keep_every, may_save, group
        self.after_load: Callable[[bool], None] = lambda loaded: None
        self.step_to_load = -1
        super().__init__(**others)

    # --- saving -------------------------------------------------------------------------------------

    def dcp_save(
        self, state_dict, checkpoint_id, async_mode, enable_garbage_collection=False, to_hf=False
    ):  # TorchTitan's signature
        if to_hf:
            return super().dcp_save(state_dict, checkpoint_id, async_mode, enable_garbage_collection, to_hf)
        writer = ChecksummedWriter(checkpoint_id)
        if async_mode != AsyncMode.DISABLED:
            writer.per_thread_copy_ahead = 0  # The state is in CPU memory; copying ahead would use GPU 0 on every rank.
        arguments: dict[str, Any] = {"storage_writer": writer}
        self._saving = checkpoint_id
        result = None
        if async_mode == AsyncMode.DISABLED:
            try:
                dcp.save(state_dict, **arguments)
            except CheckpointException as error:
                self._give_up(error)
        elif async_mode == AsyncMode.ASYNC:
            # torch's default stager without a writer; with a writer, torch would use the writer's older staging
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
            logger.warning(f"No checkpoint of step {curr_step}, because the step was skipped")
            return
        super().save(curr_step, last_step)

    def finish_saving(self) -> None:
        """Wait for a checkpoint that is still being written; raises UserError if writing fails."""
        if self.enable:
            self._async_wait()

    def is_complete(self, step: int) -> bool:
        """Whether the checkpoint of a step was written completely."""
        return self.enable and Path(self._create_checkpoint_id(step), INDEX).exists()

    def _async_wait(self) -> None:
        try:
            super()._async_wait()
        except CheckpointException as error:
            self.save_future = None
            self._give_up(error)

    def _give_up(self, error: CheckpointException) -> None:
        """Raise a failed save's reason as `WriteFailed` if the file system refused. All ranks call it, or none."""
        for rank, (cause, _) in sorted(error.failures.items()):
            if isinstance(cause, OSError):
                if dist.get_rank() == 0:
                    shutil.rmtree(self._saving, ignore_errors=True)  # incomplete, and it may fill the disk
                raise WriteFailed(
                    f"{self._saving} could not be written (rank {rank}: {cause.strerror}); earlier checkpoints are "
                    "unchanged, and the same command resumes from the newest"
                ) from error
        raise error

    def _purge_stale_checkpoints(self) -> None:
        """Keep the newest complete checkpoints, those of `keep_every`, and incomplete ones newer than all of them."""
        if self.keep_latest_k == 0 or dist.get_rank() != 0:
            return
        steps = self._steps()
        complete = [step for step in steps if self.is_complete(step)]
        kept = set(complete[-self.keep_latest_k :])
        for step in steps:
            is_due = self._keep_every and step % self._keep_every == 0 and step in complete
            if step not in kept and not is_due and complete and step < complete[-1]:
                folder = self._create_checkpoint_id(step)
                # Delete the index first: a kill during the deletion must not leave a folder that looks complete.
                Path(folder, INDEX).unlink(missing_ok=True)
                self.purge_queue.put(folder)

    def _steps(self) -> list[int]:
        """Steps that have a folder, complete or not."""
        return list(checkpoints(self.folder))

    # --- loading ------------------------------------------------------------------------------------

    def load(self, step: int = -1) -> bool:
        """TorchTitan's for `step_to_load` instead of `step`, then `after_load`, also if there is nothing to load."""
        loaded = super().load(self.step_to_load)
        self.after_load(loaded)
        return loaded

    def dcp_load(self, state_dict, checkpoint_id, from_hf, from_quantized) -> None:
        if from_hf:
            super().dcp_load(state_dict, checkpoint_id, from_hf, from_quantized)
            return
        if not has_checksums(checkpoint_id):
            logger.warning(f"{checkpoint_id} has no checksums; only the sizes of its files were checked")
        dcp.load(state_dict, storage_reader=Reader(checkpoint_id), planner=LoadPlanner())
        self.states["model"].load_state_dict(state_dict)

    def verify(self, checkpoint: str | Path) -> None:
        """Verify a checkpoint's checksums, each rank a share of the files. All ranks call it; all raise or none.

        Raises:
            UserError: there is no checkpoint.
            Damaged: names a file.
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

    def newest_valid(self) -> int:
        """The step of the newest complete and undamaged checkpoint; -1 if there is none yet.

        Newer ones are moved aside. So are all files if no checkpoint is complete: TorchTitan would resume because the
        folder exists, and ignore the initial checkpoint that the config names.

        Raises:
            Damaged: all complete checkpoints are damaged.
        """
        bad: dict[int, str] = {}
        chosen, damage = -1, None
        for step, complete in self.from_rank_0(
            lambda: [(step, self.is_complete(step)) for step in self._steps()][::-1]
        ):
            if not complete:
                bad[step] = "incomplete (killed during the save)"
                continue
            try:
                self.verify(self._create_checkpoint_id(step))
                chosen = step
                break
            except Damaged as error:
                bad[step] = str(error)
                damage = damage or error
        if chosen == -1 and damage is not None:
            raise Damaged(f"{damage}; no other checkpoint in {self.folder} is complete and undamaged")
        if self._group is not None:
            dist.barrier(group=self._group)  # all ranks have read the folder
        if dist.get_rank() == 0:
            for step, complaint in bad.items():
                self._set_aside(Path(self._create_checkpoint_id(step)), complaint)
            if chosen == -1 and Path(self.folder).is_dir():
                for rest in Path(self.folder).iterdir():
                    self._set_aside(rest, "not a checkpoint of this trainer")
                Path(self.folder).rmdir()
        if self._group is not None:
            dist.barrier(group=self._group)
        return chosen

    def from_rank_0(self, read: Callable[[], T]) -> T:
        """What rank 0 reads. A network file system may show other nodes an older state, and ranks must decide equally."""
        answer = [read() if self._group is None or dist.get_rank() == 0 else None]
        if self._group is not None:
            dist.broadcast_object_list(answer, group=self._group)
        return answer[0]

    def go_back(self, step: int) -> None:
        """Move aside checkpoints newer than `step`, so that a restart does not resume from them. All ranks call it."""
        if self._group is not None:
            dist.barrier(group=self._group)  # all ranks have read the folder
        newer = [other for other in self._steps() if other > step] if dist.get_rank() == 0 else []
        for other in newer:
            complaint = f"the run went back to step {step} (checkpoint.load_step)"
            self._set_aside(Path(self._create_checkpoint_id(other)), complaint, Path(f"{self.folder}.abandoned"))

    def remind(self) -> None:
        """Log again which checkpoints this job or an earlier one moved aside."""
        if self.enable and self._aside.is_dir() and dist.get_rank() == 0:
            names = ", ".join(sorted(folder.name for folder in self._aside.iterdir()))
            logger.warning(f"Damaged or incomplete checkpoints were moved to {self._aside}: {names}")

    @property
    def _aside(self) -> Path:
        return Path(f"{self.folder}.damaged")

    def _set_aside(self, path: Path, complaint: str, where: Path | None = None) -> None:
        where = where or self._aside
        where.mkdir(exist_ok=True)
        names = (f"{path.name}.{n}" if n else path.name for n in range(10**6))
        target = next(where / name for name in names if not (where / name).exists())
        path.rename(target)
        logger.warning(f"{path} is not used: {complaint}; moved to {target}")
