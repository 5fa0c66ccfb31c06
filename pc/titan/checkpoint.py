"""TorchTitan's checkpoint manager with checksums: finds damage before a load, and a failed save harms no checkpoint."""

import shutil
import time
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
from pc.common.run_folder import INDEX, checkpoints, step_of
from pc.errors import UserError
from pc.titan.checkpoint_folder import CheckpointFolder, ChecksummedWriter, Damaged, LoadPlanner, Reader

T = TypeVar("T")


class Checkpoints(CheckpointManager):
    """TorchTitan's manager of a run's checkpoints."""

    def __init__(self, **arguments) -> None:
        self.group = dist.new_group(backend="gloo")
        """all ranks, on the CPU, so that GPUs do not wait for each other"""
        self.may_save: Callable[[], bool] = lambda: True
        """whether the weights are known to be finite: not in a step that is left out, whose cause may be in W itself"""
        self.is_due = False
        """whether all ranks have agreed to save the current step, whatever the interval says"""
        self._seconds, self._saved_at = 60 * arguments["checkpoint_config"].minutes, time.monotonic()
        self._keep_every = arguments["checkpoint_config"].keep_every
        super().__init__(**arguments)

    # --- saving -------------------------------------------------------------------------------------

    def dcp_save(
        self, state_dict, checkpoint_id, async_mode, enable_garbage_collection=False, to_hf=False
    ):  # TorchTitan's signature
        if to_hf:
            return super().dcp_save(state_dict, checkpoint_id, async_mode, enable_garbage_collection, to_hf)
        self._saved_at = time.monotonic()
        self._saving, writer = checkpoint_id, ChecksummedWriter(checkpoint_id)
        if async_mode == AsyncMode.DISABLED:
            try:
                dcp.save(state_dict, storage_writer=writer)
            except CheckpointException as error:
                self._give_up(error)
            GarbageCollection.collect("GC collection invoked by checkpointer.")
            return None
        writer.per_thread_copy_ahead = 0  # The state is in CPU memory; copying ahead would use GPU 0 on every rank.
        arguments: dict[str, Any] = {"storage_writer": writer, "process_group": self.pg}
        if async_mode == AsyncMode.ASYNC_WITH_PINNED_MEM:
            return dcp.async_save(
                state_dict,
                async_stager=self.stager,
                async_checkpointer_type=AsyncCheckpointerType.PROCESS,
                **arguments,
            )
        # torch's default stager without a writer; with a writer, torch would use the writer's older staging
        stager = DefaultStager(StagingOptions(False, False, False, False))
        result = dcp.async_save(state_dict, async_stager=stager, **arguments)
        result.add_done_callback(lambda _: stager.close())
        return result

    def save(self, curr_step: int, last_step: bool = False) -> None:
        if last_step or self.may_save():
            super().save(curr_step, last_step)

    def _should_save(self, curr_step: int, last_step: bool = False) -> bool:
        is_milestone = self._keep_every and curr_step % self._keep_every == 0
        return super()._should_save(curr_step, last_step) or (self.enable and bool(self.is_due or is_milestone))

    def _purge_stale_checkpoints(self) -> None:
        """Remove all but the newest and the milestones. Whole names count: what a user has renamed stays."""
        if not self.keep_latest_k or dist.get_rank(self.group):
            return
        found = checkpoints(self.folder)
        for step in list(found)[: -self.keep_latest_k]:
            if not (self._keep_every and step % self._keep_every == 0):
                self.purge_queue.put(str(found[step]))

    def minutes_are_over(self) -> bool:
        """Whether the newest checkpoint is older than `checkpoint.minutes` by this rank's clock."""
        return bool(self._seconds) and time.monotonic() - self._saved_at >= self._seconds

    def save_and_stop(self, step: int) -> None:
        """Save this step unless it is saved: a kill while writing the same again would destroy it."""
        if not self.enable:
            return
        self._async_wait()
        if step and not self._from_rank_0(lambda: self._is_complete(step)):
            self.save(step, last_step=True)

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

    def _is_complete(self, step: int) -> bool:
        return Path(self._create_checkpoint_id(step), INDEX).exists()

    # --- loading ------------------------------------------------------------------------------------

    def newest_valid(self) -> CheckpointFolder | None:
        """The verified checkpoint that this run continues from.

        Moves newer ones aside, and all files if no checkpoint is complete: TorchTitan would resume because the
        folder exists, and ignore the initial checkpoint that the config names.

        Raises:
            Damaged: all complete checkpoints are.
        """
        complaints: dict[str, str] = {}
        found, damage = None, None
        for path, complete in self._from_rank_0(
            lambda: [(path, self._is_complete(step)) for step, path in checkpoints(self.folder).items()][::-1]
        ):
            if not complete:
                complaints[path.name] = "incomplete (killed during the save)"
                continue
            try:
                found = self.verified(path)
                break
            except Damaged as error:
                complaints[path.name] = str(error)
                damage = damage or error
        if found is None and damage is not None:
            raise Damaged(f"{damage}; no other checkpoint in {self.folder} is complete and undamaged")
        dist.barrier(group=self.group)  # all ranks have read the folder
        if dist.get_rank() == 0 and Path(self.folder).is_dir():
            for path in sorted(Path(self.folder).iterdir()):
                if found is None or path.name in complaints:
                    self._set_aside(path, complaints.get(path.name, "not a checkpoint of this trainer"))
            if found is None:
                Path(self.folder).rmdir()
        dist.barrier(group=self.group)
        return found

    def verified(self, checkpoint: str | Path) -> CheckpointFolder:
        """A checkpoint whose checksums were compared, each rank a share of the files. All ranks call it; all raise or
        none.

        Raises:
            UserError: there is no checkpoint.
            Damaged: names a file.
        """
        folder = error = None
        try:
            folder = CheckpointFolder(checkpoint)
            folder.verify(dist.get_rank(self.group), dist.get_world_size(self.group))
        except UserError as found:
            error = found
        errors: list[UserError | None] = [None] * dist.get_world_size(self.group)
        dist.all_gather_object(errors, error, group=self.group)
        for error in filter(None, errors):
            raise error
        return folder

    def load(self, step: int = -1) -> bool:
        """Nothing, for TorchTitan's loop: `PCTrainer.load` has loaded what there is."""
        return False

    def load_from(self, found: CheckpointFolder | None) -> None:
        """Load a checkpoint of this run, or what the config starts from."""
        super().load(-1 if found is None else step_of(found.path))

    def dcp_load(self, state_dict, checkpoint_id, from_hf, from_quantized) -> None:
        if from_hf:
            super().dcp_load(state_dict, checkpoint_id, from_hf, from_quantized)
            return
        dcp.load(state_dict, storage_reader=Reader(checkpoint_id), planner=LoadPlanner())
        self.states["model"].load_state_dict(state_dict)

    def _from_rank_0(self, read: Callable[[], T]) -> T:
        """What rank 0 reads. A network file system may show other nodes an older state, and ranks must decide equally."""
        answer = [read() if dist.get_rank(self.group) == 0 else None]
        dist.broadcast_object_list(answer, group=self.group)
        return answer[0]

    def _set_aside(self, path: Path, complaint: str) -> None:
        """Move to `<run>/checkpoint.damaged`."""
        where = Path(f"{self.folder}.damaged")
        where.mkdir(exist_ok=True)
        target, number = where / path.name, 0
        while target.exists():
            number += 1
            target = where / f"{path.name}.{number}"
        path.rename(target)
        logger.warning(f"{path} is not used: {complaint}; moved to {target}")
