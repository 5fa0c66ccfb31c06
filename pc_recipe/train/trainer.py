"""A run: TorchTitan's trainer with the steps of `pc_recipe.train.step`, from its first weights or a checkpoint to its end
or a signal (`pc_recipe.runs.worker` is the command)."""

import math
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from datetime import timedelta
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist
import torchtitan.train
from torch.distributed import distributed_c10d
from torchtitan.distributed.utils import init_distributed
from torchtitan.tools.logging import logger

from pc.api import preserve
from pc.errors import UserError
from pc.preconditioner import Preconditioner
from pc_recipe.config import Config, load_config, rules
from pc_recipe.config.headline import headline
from pc_recipe.config.rank_batches import RankBatches
from pc_recipe.config.run_key import all_values
from pc_recipe.data.manifest import Manifest
from pc_recipe.files.run_folder import require_no_other_run, write_state
from pc_recipe.files.run_log import set_aside_metrics
from pc_recipe.train import cpu, fingerprint, fsdp_sync, run_tokenizer, train_spec  # noqa: F401 (it registers itself)
from pc_recipe.train.checkpoint import Checkpoints, plain_keys
from pc_recipe.train.checkpoint_folder import CheckpointFolder
from pc_recipe.train.environment import require_agreement
from pc_recipe.train.llama2 import Llama2Args
from pc_recipe.train.parallelize import AlwaysSharded
from pc_recipe.train.step import StepTrainer


class PCTrainer(StepTrainer):
    """TorchTitan's trainer with PC, a stop signal, and a status file.

    On SIGUSR2 to any rank, all ranks save a checkpoint after the current step and exit normally; after the next one, if
    they have already agreed on the current step's update.
    """

    model_args: Llama2Args

    def __init__(self, config: Config) -> None:
        self.stopped = False
        cpu.use_cpu_where_there_is_no_gpu()
        # Before all that takes long: the launcher's children ignore the signal until they handle it.
        signal.signal(signal.SIGUSR2, lambda *_: setattr(self, "_stop_requested", True))
        # All pipeline stages know the loss (`pc_recipe.train.step`); TorchTitan would warn that rank 0 does not.
        with replaced(torchtitan.train, CheckpointManager=Checkpoints, ensure_pp_loss_visible=_nothing):
            super().__init__(config)
        self.scorer = self.build_scorer()
        self.checkpointer.may_save = lambda: not self.optimizers.skips_step

    def make_preconditioner(self) -> Preconditioner | None:
        return self.optimizers.preconditioner

    def init_distributed(self) -> AlwaysSharded:
        """TorchTitan's, with FSDP on any number of ranks, after all ranks have agreed on what they train."""
        world_size = init_distributed(self.job_config.comm, base_folder=self.config.job.dump_folder)
        require_agreement(self.config)
        dims = RankBatches.of(self.config, world_size).dims
        rules.require(self.config, dims, on_cpu=cpu.is_cpu())
        return AlwaysSharded(**asdict(dims), ep=1, etp=1, once_per_step=fsdp_sync.once_per_step(self.config))

    def load(self) -> None:
        """Load what this run continues or starts from, if there is anything. Nothing changes before all is checked.

        Raises:
            UserError: a checkpoint of another method, model or optimizer, or of a step after the last; or initial
                weights that are not plain.
        """
        checkpointer, settings = self.checkpointer, self.config.checkpoint
        folder = Path(self.config.job.dump_folder)
        self.data = Manifest.read(next(iter(self.config.data.folders)))
        self.tokenizer_names = run_tokenizer.describe(self.data)
        method = fingerprint.fingerprint(self.config.pc, self.config.model, self.tokenizer_names)
        checkpointer.states["method"] = dict(method)
        if not settings.enable:
            checkpointer.call_on_rank_0(
                lambda: require_no_other_run(folder, self.config.model_dump(exclude_unset=True))
            )
            return
        newest, initial_path = checkpointer.newest_valid(), settings.initial_load_path
        if newest is not None:
            self._require_same_run(newest)
            if saved := fingerprint.read_tokenizer(newest):
                words = f"{newest.path} belongs to", f"{self.data.folder} was made with"
                run_tokenizer.require_equal(saved, self.tokenizer_names, *words)
            checkpointer.exclude_from_loading = []  # it is for what a new run starts from
            checkpointer.read(newest.path)
            if dist.get_rank() == 0:
                self._say_what_changed(folder)
        elif initial_path and settings.initial_load_in_hf:
            from pc_recipe.train.hf_folder import require_initial_load  # takes seconds

            require_initial_load(initial_path, self.model_args)
            self._require_same_tokenizer(Path(initial_path))
            checkpointer.read(initial_path, model_only=True, from_hf=True)
        elif initial_path and settings.initial_load_model_only:
            checkpoint = checkpointer.verified(initial_path)
            fingerprint.require_same_model(checkpoint, self.config.model, plain_keys(self._model_shapes()))
            self._require_same_tokenizer(checkpoint)
            checkpointer.read(initial_path, model_only=True)
        elif initial_path:
            checkpoint = checkpointer.verified(initial_path)
            self._require_same_run(checkpoint)
            self._require_same_tokenizer(checkpoint)
            checkpointer.read(initial_path)
        self._take_loaded(is_plain=newest is None and (settings.initial_load_in_hf or settings.initial_load_model_only))
        checkpointer.states["method"] = method  # a load puts the checkpoint's in its place, perhaps of an older version
        if self.step > (last := self.config.training.steps):
            path = newest.path if newest else initial_path
            raise UserError(
                f"training.steps = {last} is below step {self.step} of {path}, which this run continues; raise "
                "it, or go back by moving newer checkpoints out of the folder"
            )

    def _take_loaded(self, is_plain: bool) -> None:
        """Make PC's tensors those of the loaded weights: of plain ones by `pc.start`."""
        if self.preconditioner is None:
            return
        if not (is_plain and self.config.checkpoint.initial_load_path):
            self.preconditioner.note_loaded()
        elif self.config.pc.start == "preserve":
            preserve(self.model_parts)
        else:
            self.preconditioner.restart()

    def _say_what_changed(self, folder: Path) -> None:
        """Name the keys in which this run's learning rates differ from those of its earlier part, and the way back."""
        try:
            earlier = load_config(folder / "config.toml")
        except UserError:  # of an older version
            earlier = self.config
        before, now = all_values(earlier), all_values(self.config)
        keys = [key for key in now if key.startswith(("optimizer.", "lr_scheduler.")) or key == "training.steps"]
        changed = [f"{key} {before[key]} -> {now[key]}" for key in keys if before[key] != now[key]]
        rates = zip(self.optimizers.saved_rates, self.optimizers.rates(), strict=True)
        old, new = max(rates, key=lambda pair: abs(pair[1] - pair[0]))
        if changed or not math.isclose(old, new, rel_tol=1e-6):
            total = earlier.lr_scheduler.total_steps or earlier.training.steps
            logger.warning(
                f"continues with {', '.join(changed) or 'another schedule'}: the rate goes from {old:.3g} to {new:.3g} "
                f"(--lr_scheduler.total_steps {total} keeps a schedule of {total} steps)"
            )

    def _require_same_run(self, checkpoint: CheckpointFolder) -> None:
        kinds = {"adamw", self.config.optimizer.name.lower()}
        fingerprint.require_same_run(checkpoint, self.config.pc, kinds)
        fingerprint.require_same_model(checkpoint, self.config.model, self._model_shapes())

    def _require_same_tokenizer(self, start: CheckpointFolder | Path) -> None:
        if not self.config.checkpoint.initial_load_tokenizer_is_the_same:
            run_tokenizer.require_for_start(start, self.data)

    def _model_shapes(self) -> dict[str, torch.Size]:
        return {name: tensor.shape for name, tensor in self.checkpointer.states["model"].state_dict().items()}

    def train(self, record: Callable[[int], None] = lambda step: None) -> None:
        """Load, and train to the end or to a request to stop.

        Args:
            record: called on rank 0 with the step that training starts from, once nothing can refuse this start: the
                record of the run in the folder must not change before.
        """
        self.load()
        folder = Path(self.config.job.dump_folder)
        if dist.get_rank() == 0:
            write_state(folder, "running", self.step, self.config.training.steps)
            set_aside_metrics(folder, self.step)
            record(self.step)
        logger.info(self._describe_start())
        with replaced(torchtitan.train.dist_utils, set_pg_timeouts=_nothing):  # `_set_timeouts` does it
            super().train()
        # A late request has nothing to stop; at its exit Python would restore the default, which is to end in failure.
        signal.signal(signal.SIGUSR2, signal.SIG_IGN)
        if dist.get_rank() == 0:
            state, reason = ("stopped", "asked to stop") if self.stopped else ("finished", "")
            write_state(folder, state, self.step, self.config.training.steps, reason)

    def train_step(self, data_iterator) -> None:
        self.metrics_processor.resume()
        super().train_step(data_iterator)
        self.metrics_processor.pause()
        if self.scorer is not None and self.scorer.is_due(self.step):
            self.metrics_processor.log_metrics(self.step, self.scorer.score())
            fsdp_sync.reshard(self.model_parts)
        # Before the checkpoint of this step, not after it as upstream: a kill in between would lose the validation. Who
        # asks to stop does not wait for one, but the last step's is the run's result.
        waits = not self._stop_agreed or self.step == self.config.training.steps
        if self.config.validation.enable and self.validator.is_due(self.step) and waits:
            self.validator.validate(self)
        if not self._has_stepped:
            self._set_timeouts()
        self._has_stepped = True
        self.metrics_processor.progress.show(self.step)

    def state_dict(self) -> dict:
        """TorchTitan's, with the tokens of all ranks, so that a resume on another number of ranks counts correctly."""
        return super().state_dict() | {"ntokens_seen": self.ntokens_seen * self._data_ranks}

    def load_state_dict(self, state_dict: dict) -> None:
        super().load_state_dict(state_dict)
        self.ntokens_seen = state_dict["ntokens_seen"] // self._data_ranks

    def should_continue_training(self) -> bool:
        if not super().should_continue_training():
            return False
        if not self._has_stepped:  # later the last step's exchange has told
            wish = torch.tensor(self._stop_requested, dtype=torch.int)
            dist.all_reduce(wish, dist.ReduceOp.MAX, group=self.checkpointer.group)
            self._stop_agreed = bool(wish)
        self.stopped = self._stop_agreed
        if self.stopped:
            saves = "saving" if self.checkpointer.enable else "checkpoint.enable = false, so nothing is saved of"
            logger.info(f"Asked to stop: {saves} step {self.step}")
            self.checkpointer.save_and_stop(self.step)
            self.checkpointer.call_together(self._require_data)
        return not self.stopped

    def _require_data(self) -> None:
        if self._data_error is not None:
            raise self._data_error

    def _describe_start(self) -> str:
        config, device = self.config, self.metrics_processor.device_memory_monitor.device_name
        sequences = config.training.local_batch_size * self._data_ranks * self.gradient_accumulation_steps
        return (
            f"{headline(config)}: steps {self.step + 1} to {config.training.steps} of {sequences} sequences of "
            f"{config.training.seq_len} tokens, {self.gradient_accumulation_steps} micro-batches of "
            f"{config.training.local_batch_size} on each of {dist.get_world_size()} x {device}"
        )

    def _set_timeouts(self) -> None:
        """After the first step, set `comm.train_timeout_seconds` for all process groups that it has created.

        TorchTitan does so only after step 1, which a resumed run does not have, not for the groups of `pc.owner`, and by
        a private function of torch, which has a public one in its place from 2.15 on.
        """
        dist.barrier(group=self.checkpointer.group)  # a rank's first step may take longer than the timeout
        timeout = timedelta(seconds=self.config.comm.train_timeout_seconds)
        set_timeout = getattr(dist, "set_timeout", None) or distributed_c10d._set_pg_timeout
        for group in distributed_c10d._world.pg_map:
            if dist.get_backend(group) != "fake":  # TorchTitan's fake groups of mesh dimensions with one rank
                set_timeout(timeout, group)

    def build_scorer(self):
        """None, or an object with `is_due(step)` and a collective `score()` that scores the model during training."""
        return None


@contextmanager
def replaced(module: ModuleType, **values: Any) -> Iterator[None]:
    """Give names of a module other values for a while: TorchTitan has no other way to choose them."""
    before = {name: getattr(module, name) for name in values}
    vars(module).update(values)
    try:
        yield
    finally:
        vars(module).update(before)


def _nothing(*_, **__) -> None:
    pass
