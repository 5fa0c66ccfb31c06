"""TorchTitan's checkpoint manager with checksums: finds damage before a load, and a failed save harms no checkpoint."""

import contextlib
import shutil
import tempfile
import time
from collections.abc import Callable
from itertools import filterfalse
from pathlib import Path
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType
from torchtitan.components.checkpoint import AsyncMode, CheckpointManager
from torchtitan.tools.logging import logger
from torchtitan.tools.utils import GarbageCollection

from pc.errors import UserError
from pc.weight import ADDED
from pc_recipe.checkpoints.folder import CheckpointFolder, Damaged, plain_errors
from pc_recipe.checkpoints.writer import ChecksummedWriter
from pc_recipe.config.schema import Checkpoint
from pc_recipe.files import look, run_folder
from pc_recipe.files.errors import DiskFailed, ReadFailed
from pc_recipe.files.places import checkpoints_of
from pc_recipe.train.optimizers import Optimizers

T = TypeVar("T")
REMEDY = "Bring one back (is a disk or a link missing?), or start a new run with another --job.dump_folder"
SECONDS_TO_END_A_SAVE = 60.0
"""How long to wait after a failure. Other ranks, which the save needs, may be gone."""


def plain_keys(state: dict[str, Any]) -> dict[str, Any]:
    """A model's state without what PC has added: that of a plain Llama, with PC(W)."""
    added = {f"{key.removesuffix('orig')}{own}" for key in state if key.endswith("_orig") for own in ADDED}
    return {key: value for key, value in state.items() if key not in added}


class Checkpoints(CheckpointManager):
    """TorchTitan's manager of a run's checkpoints."""

    folder: Path  # type: ignore[assignment]  # TorchTitan joins names to it

    def __init__(self, **arguments) -> None:
        self.group = cast(dist.ProcessGroup, dist.new_group(backend="gloo"))
        """All ranks, on the CPU, so that GPUs do not wait for each other."""
        self._optimizers: Optimizers = arguments["optimizers"]
        self.save_is_due = False
        """Whether all ranks have agreed to save the current step, whatever the interval says."""
        config: Checkpoint = arguments["checkpoint_config"].ours
        self._seconds, self._saved_at = 60 * config.minutes, time.monotonic()
        self._keep_every = config.keep_every
        self._saving: Path | None = None
        """The folder of the newest save."""
        super().__init__(**arguments)
        self.run = Path(arguments["base_folder"])
        self.folder = checkpoints_of(self.run)  # without checkpoints TorchTitan sets none

    # --- saving -------------------------------------------------------------------------------------

    def dcp_save(self, state_dict, checkpoint_id, async_mode, *_, **__):  # garbage collection, Hugging Face's format
        if "optimizer" not in state_dict:  # weights alone
            state_dict = plain_keys(state_dict)
        self._saved_at = begin = time.monotonic()
        self._saving, writer = Path(checkpoint_id), ChecksummedWriter(checkpoint_id)
        if async_mode == AsyncMode.DISABLED:
            with plain_errors(self._saving):
                dcp.save(state_dict, storage_writer=writer)
            self._note_saved()
            GarbageCollection.collect("GC collection invoked by checkpointer.")
            logger.info(f"Saved {checkpoint_id} in {time.monotonic() - begin:.1f} s")
            return None
        logger.info(f"Writing {checkpoint_id} while training continues")
        writer.per_thread_copy_ahead = 0  # The state is in CPU memory; copying ahead would use GPU 0 on every rank.
        arguments: dict[str, Any] = {"storage_writer": writer, "process_group": self.pg}
        if async_mode == AsyncMode.ASYNC_WITH_PINNED_MEM:
            arguments |= {"async_stager": self.stager, "async_checkpointer_type": AsyncCheckpointerType.PROCESS}
            return dcp.async_save(state_dict, **arguments)
        # torch's default stager without a writer; with a writer, torch would use the writer's older staging
        stager = DefaultStager(StagingOptions(False, False, False, False))
        future: Any = dcp.async_save(state_dict, async_stager=stager, **arguments)
        future.add_done_callback(lambda _: stager.close())
        return future

    def save(self, curr_step: int, last_step: bool = False) -> None:
        # The weights of a skipped step are not known to be finite: the cause may be in W itself.
        if last_step or not self._optimizers.skips_step:
            super().save(curr_step, last_step)

    def _should_save(self, curr_step: int, last_step: bool = False) -> bool:
        is_due = self.save_is_due or self._is_milestone(curr_step)
        return super()._should_save(curr_step, last_step) or (self.enable and is_due)

    def _is_milestone(self, step: int) -> bool:
        """Whether the checkpoint of a step is kept for good."""
        return self._keep_every > 0 and step % self._keep_every == 0

    def minutes_are_over(self) -> bool:
        """Whether the newest checkpoint is older than `checkpoint.minutes` by this rank's clock."""
        return bool(self._seconds) and time.monotonic() - self._saved_at >= self._seconds

    @torch.no_grad()
    def save_and_stop(self, step: int) -> None:
        """Save this step completely, unless it is saved: a kill while writing it again would destroy it.

        TorchTitan may save only the weights of a last step, from which no run can continue.
        """
        if not self.enable:
            return
        self._async_wait()
        path = Path(self._create_checkpoint_id(step))
        if step and not self.call_on_rank_0(lambda: run_folder.is_complete(path)):
            self.dcp_save(self._flattened_model_states_sd(), path, AsyncMode.DISABLED)

    def end_save(self) -> None:
        """After a failure: let an asynchronous save end, and remove what is not complete, since it may fill the disk."""
        if self._saving is None:
            return
        if self.save_future is not None:
            with contextlib.suppress(Exception, CheckpointException):  # the earlier failure is reported
                self.save_future.result(timeout=SECONDS_TO_END_A_SAVE)
        with contextlib.suppress(ReadFailed):  # what may be complete stays
            if dist.get_rank() == 0 and not run_folder.is_complete(self._saving):
                shutil.rmtree(self._saving, ignore_errors=True)

    def _purge_stale_checkpoints(self) -> None:
        """Instead of TorchTitan's, which deletes everything that has "step-N" in its name."""
        if self.keep_latest_k and dist.get_rank() == 0:
            try:
                complete = run_folder.list_complete(self.folder)
                newest = run_folder.step_of(self._saving) if self._saving else -1  # higher numbers are not of this run
                old = [step for step in complete if step <= newest][: -self.keep_latest_k]
                for step in filterfalse(self._is_milestone, old):
                    try:
                        run_folder.purge(complete[step])
                    except OSError as error:  # as in a layer of a container image; the others are purged
                        logger.warning(f"{complete[step]} stays for now: {error.strerror}")
                for path in run_folder.list_purged(self.folder):
                    self.purge_queue.put(str(path))
            except ReadFailed as error:
                logger.warning(f"Old checkpoints stay for now: {error}")

    def _async_wait(self) -> None:
        with plain_errors(self._saving or self.folder):
            super()._async_wait()
        if self._saving is not None:
            self._note_saved()

    def _note_saved(self) -> None:
        if dist.get_rank() == 0:
            run_folder.note_saved(self.run)

    # --- loading ------------------------------------------------------------------------------------

    def newest_valid(
        self, load: Callable[[CheckpointFolder], None] = lambda checkpoint: None
    ) -> CheckpointFolder | None:
        """Load the checkpoint that this run continues from, and return it. Newer ones that cannot be used are then renamed.

        Args:
            load: called with a verified checkpoint; raises `Damaged` if it cannot be loaded.

        Raises:
            Damaged: one is, and no other is usable.
            ReadFailed: whether one is damaged cannot be known.
            UserError: the folder cannot be written, so no checkpoint could be saved; or a checkpoint is gone; or what
                `load` raises. Nothing is renamed.
        """
        problems: dict[Path, str] = {}
        valid, damage = None, None
        for path, was_whole in self.call_on_rank_0(self._list_checkpoints):
            if not was_whole:
                problems[path] = f"incomplete, without {run_folder.INDEX}, which is written last"
            elif valid is None:
                try:
                    checkpoint = self.verified(path)
                    load(checkpoint)
                    valid = checkpoint
                except Damaged as error:
                    problems[path] = str(error)
                    damage = damage or error
        if damage and not valid:
            raise Damaged(f"{damage}; no other checkpoint in {self.folder} is complete and undamaged. {REMEDY}")
        self.call_on_rank_0(self._note_saved if valid else lambda: self._require_new(len(problems)))
        self.call_on_rank_0(lambda: self._set_aside(problems))
        return valid

    def _list_checkpoints(self) -> list[tuple[Path, bool]]:
        """(folder, whether it was ever complete) of all checkpoints, newest first. The folder must be writable."""
        self.folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=self.folder):
            pass
        newest_first = reversed(run_folder.list_checkpoints(self.folder).values())
        return [(path, run_folder.was_complete(path)) for path in newest_first]

    def _require_new(self, incomplete: int) -> None:
        """Raise a `UserError` if a checkpoint was completed here, and is gone: its disk may be missing.

        A crash before the first checkpoint, or while it is written, loses nothing that could have been kept.
        """
        run, state = self.run, run_folder.read_state(self.run)
        saves = run_folder.read_first_config(run).get("checkpoint", {}).get("enable", True)
        was_saved = saves and state.state in ("stopped", "finished") and state.step > 0
        if run_folder.has_saved(run) or was_saved or incomplete > 1:
            raise UserError(
                f"{run} has had a checkpoint, and {self.folder} has no complete one ({incomplete} incomplete). {REMEDY}"
            )

    def verified(self, checkpoint: Path) -> CheckpointFolder:
        """A checkpoint with verified checksums; each rank verifies a share of the files. All ranks call it; all raise or
        none.

        Raises:
            UserError: there is no checkpoint, or it holds another step than its folder's number.
            Damaged, ReadFailed: names a file.
        """
        opened: list[CheckpointFolder] = []

        def verify() -> None:
            opened.append(CheckpointFolder(checkpoint))
            opened[0].verify(dist.get_rank(self.group), dist.get_world_size(self.group))

        self.call_together(verify)
        self.call_on_rank_0(lambda: opened[0].step)
        return opened[0]

    def load(self, step: int = -1) -> bool:
        """Nothing, for TorchTitan's loop: `pc_recipe.train.start` has loaded what there is."""
        return False

    def model_shapes(self) -> dict[str, torch.Size]:
        """{name: shape} of the tensors that the model saves and expects."""
        return {name: tensor.shape for name, tensor in self.states["model"].state_dict().items()}

    @torch.no_grad()
    def read(self, start: CheckpointFolder | Path, *, model_only: bool = False) -> None:
        """Load a checkpoint into the states of this run, or a Hugging Face folder, with `model_only`, into the model."""
        state = self._states_to_load(model_only)
        if isinstance(start, CheckpointFolder):
            logger.info(f"Loading the checkpoint from {start.path}.")
            start.load(state)
            self.states["model"].load_state_dict(state)
        else:
            logger.info(f"Loading the weights from {start}.")
            with plain_errors(start):
                self.dcp_load(state, str(start), from_hf=True, from_quantized=False)
        GarbageCollection.collect("GC collection for checkpoint loading.")

    def _states_to_load(self, model_only: bool) -> dict[str, Any]:
        states = super()._states_to_load(model_only)
        return plain_keys(states) if model_only else states

    def call_on_rank_0(self, function: Callable[[], T]) -> T:
        """What `function` returns on rank 0; other ranks do not call it. All raise what it raises.

        A network file system may show other nodes an older state, and ranks must decide equally.
        """
        return self.call_together(function if dist.get_rank(self.group) == 0 else lambda: cast(T, None))

    def call_together(self, function: Callable[[], T]) -> T:
        """What `function` returns on rank 0. If it raises on any rank, all raise what the first of them did.

        Raises:
            UserError: also in place of an error of the file system.
        """
        result = error = None
        try:
            result = function()
        except UserError as caught:
            error = caught
        except OSError as caught:
            error = DiskFailed(f"{self.folder}: cannot be used ({caught.filename}: {caught.strerror})")
        of_ranks: list[Any] = [None] * dist.get_world_size(self.group)
        dist.all_gather_object(of_ranks, (result, error), group=self.group)
        for _, error in of_ranks:
            if error:
                raise error
        return of_ranks[0][0]

    def _set_aside(self, problems: dict[Path, str]) -> None:
        """Rename checkpoints to step-N.damaged. Of incomplete ones only the newest is kept, of others all."""
        for path, problem in problems.items():
            aside = Path(f"{path}.damaged")
            while look.is_there(aside):
                aside = Path(f"{aside}.damaged")
            path.rename(aside)
            logger.warning(f"{path} is not used: {problem}; it is now {aside}")
        damaged = run_folder.list_damaged(self.folder)
        for path in [path for path in damaged if not run_folder.was_complete(path)][:-1]:
            shutil.rmtree(path, ignore_errors=True)
            damaged.remove(path)
        if damaged:
            names = ", ".join(path.name for path in damaged)
            logger.warning(f"{self.folder} keeps {len(damaged)} damaged or incomplete checkpoints, not used: {names}")
