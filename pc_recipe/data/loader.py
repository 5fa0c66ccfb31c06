"""Batches of token sequences in one global order; the only state is a position.

The documents of a split are concatenated and cut into sequences of `seq_len` tokens (plus one token, the last label).
An epoch visits every sequence once, in a seeded shuffle. `position` counts the sequences of all ranks since the start
of training: micro-batch m of B sequences on each of W ranks takes positions m·B·W … (m+1)·B·W - 1, and rank r takes
the r-th B of them. So the order does not depend on B or W, and a run that resumes with other values continues with the
next sequence.
"""

import json
import logging
import os
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.distributed.checkpoint.stateful import Stateful

from pc.errors import UserError
from pc_recipe.data.manifest import Manifest, require_different, require_same_tokenizer
from pc_recipe.data.mixture import CYCLE, Mixture
from pc_recipe.data.order import shuffled
from pc_recipe.data.skip import Skip
from pc_recipe.data.token_files import TokenStream, require_files

logger = logging.getLogger(__name__)

IGNORED_LABEL = -100  # torch's cross entropy skips it
VALIDATION_SEED = 0  # the validation order does not depend on the run's seed

Batch = tuple[dict[str, torch.Tensor], torch.Tensor]


class FolderSequences:
    """Sequences of one folder's split by position; `length` of them are an epoch."""

    def __init__(self, manifest: Manifest, split: str, seq_len: int, seed: int):
        self.stream = TokenStream(manifest, split)
        self.seq_len, self.seed = seq_len, seed
        tokens = manifest.tokens(split)
        self.length = (tokens - 1) // seq_len
        if self.length < 1:
            raise UserError(
                f"the {split} split of {manifest.folder} has {tokens} tokens, too few for one sequence of "
                f"seq_len + 1 = {seq_len + 1}"
            )

    def tokens(self, position: int) -> np.ndarray:
        """The tokens at a position [seq_len + 1]: inputs, and labels shifted by one."""
        # Sequence i holds the tokens from i * seq_len to (i + 1) * seq_len. The last of them is only a label here, and the
        # first input of sequence i + 1, so an epoch has every token once as an input and once as a label.
        epoch, place = divmod(position, self.length)
        first = shuffled(place, self.length, self.seed, epoch) * self.seq_len
        return self.stream.read(first, first + self.seq_len + 1)


class Sequences:
    """Sequences by position, of one folder or of a `Mixture` of several.

    Attributes:
        limit: number of positions, at most `limit_sequences`; None in training, which is endless.
        content: which data, in which shares.
    """

    def __init__(
        self,
        manifests: Sequence[Manifest],
        weights: Sequence[float],
        split: str,
        seq_len: int,
        seed: int,
        limit_sequences: int | None,
    ):
        # sorted by content, so that folders may be moved, and listed in another order
        parts = sorted(zip(manifests, weights, strict=True), key=lambda part: part[0].identity)
        self.seq_len = seq_len
        self.folders = [FolderSequences(manifest, split, seq_len, seed) for manifest, _ in parts]
        self.limit = None if split == "train" else min(limit_sequences or self.length, self.length)
        self.mixture, self.content = None, parts[0][0].identity
        if len(parts) > 1:
            self.mixture = Mixture({str(manifest.folder): weight for manifest, weight in parts}, seed)
            shares = zip(self.mixture.counts, parts, strict=True)
            self.content = ", ".join(f"{n / CYCLE} of {manifest.identity[:12]}" for n, (manifest, _) in shares)

    @property
    def length(self) -> int:
        """Sequences of all folders."""
        return sum(folder.length for folder in self.folders)

    def batch(self, positions: Sequence[int]) -> tuple[torch.Tensor, torch.Tensor]:
        """Inputs and labels, int64 [B, seq_len] each; beyond `limit`, labels are `IGNORED_LABEL`."""
        shape = len(positions), self.seq_len
        inputs, labels = (np.empty(shape, dtype=np.int64) for _ in range(2))
        for row, position in enumerate(positions):
            if self.limit is None or position < self.limit:
                folder, place = self.mixture.locate(position) if self.mixture else (0, position)
                tokens = self.folders[folder].tokens(place)
                inputs[row] = tokens[:-1]
                labels[row] = tokens[1:]
            else:
                inputs[row], labels[row] = 0, IGNORED_LABEL
        return torch.from_numpy(inputs), torch.from_numpy(labels)


class GlobalOrderLoader(Stateful):
    """Iterates over batches of a folder of token shards; its state is `position` and the settings that decide which
    sequence a position is.

    On the training split, every `iter()` continues from `position`, epoch after epoch; on the validation split it starts
    again, with the same order in every run (ignored labels fill the last micro-batch, so that all ranks have the same
    number).

    Args:
        path: folder with manifest.json; in training also {folder: weight}, a mixture.
        split: "train" or "validation".
        seq_len: tokens per sequence.
        local_batch_size: sequences per rank and micro-batch.
        vocab_size: the model's.
        seed: of the training order.
        pin_memory: copies to an accelerator can then run while the host goes on.
        limit_sequences: sequences of a validation pass over all ranks, at most; the checks before a run warn of fewer.
        skip: training positions to skip (`Skip`), counted without skipping, so it may change on resume.
    """

    def __init__(
        self,
        path: str | Path | Mapping[str, float],
        split: str = "train",
        *,
        seq_len: int,
        local_batch_size: int,
        dp_rank: int,
        dp_world_size: int,
        vocab_size: int,
        seed: int = 0,
        pin_memory: bool = False,
        limit_sequences: int | None = None,
        skip: Sequence[str] = (),
    ) -> None:
        weights = path if isinstance(path, Mapping) else {str(path): 1.0}
        self.manifests = manifests = [Manifest.read(folder) for folder in weights]
        require_different(manifests)
        for manifest in manifests:
            self._require_usable(manifest, manifests[0], split, vocab_size)
        seed = seed if split == "train" else VALIDATION_SEED
        self.sequences = Sequences(manifests, list(weights.values()), split, seq_len, seed, limit_sequences)
        self.position = 0
        """Sequences that all ranks together have used so far."""
        self._source: Iterator[Batch | UserError] = iter(())
        self._ahead: deque[Batch | UserError] = deque()
        """read, and not yet used"""
        self.local_batch_size, self.dp_rank, self.dp_world_size = local_batch_size, dp_rank, dp_world_size
        self._skip = Skip(skip)
        self._settings: dict[str, str | int] = {
            "data.path (its content)": self.sequences.content,
            "split": split,
            "training.seq_len": seq_len,
            "data.seed": seed,
        }
        self._pin = pin_memory and torch.accelerator.is_available()

    @staticmethod
    def _require_usable(manifest: Manifest, first: Manifest, split: str, vocab_size: int) -> None:
        """Check a folder against the model and the first folder, and the sizes of its files."""
        require_same_tokenizer(first, manifest)
        if manifest.tokenizer.vocab_size > vocab_size:
            raise UserError(
                f"{manifest.folder} was tokenised with {manifest.tokenizer.name!r} of {manifest.tokenizer.vocab_size} "
                f"entries, but model.vocab_size is {vocab_size}"
            )
        if os.environ.get("LOCAL_RANK", "0") == "0":  # the others of this machine would find the same
            require_files(manifest.folder, manifest.shards[split])
            if split == "train":
                tokens, files = manifest.tokens(split), len(manifest.shards[split])
                logger.info(f"Data: {manifest.folder}, {tokens:,} tokens in {files:,} files of the right sizes")

    def state_dict(self) -> dict[str, Any]:
        return {"position": self.position, "identity": json.dumps(self._settings, sort_keys=True)}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Raises UserError if a setting differs."""
        saved = json.loads(state_dict["identity"])
        for key, current in self._settings.items():
            if saved.get(key) != current:
                raise UserError(
                    f"the checkpoint was made with {key} = {saved.get(key)}, this run has {current}: it "
                    "cannot continue with the next sequence; restore the setting or start a new run"
                )
        self.position = state_dict["position"]

    def __iter__(self) -> Iterator[Batch]:
        if self.sequences.limit is not None:
            self.position = 0
        stride = self.local_batch_size * self.dp_world_size
        self._source = map(self._read, self._positions(stride))
        self._ahead.clear()
        while self.look_ahead(1) or self._ahead:
            batch = self._ahead.popleft()
            if isinstance(batch, UserError):
                raise batch
            self.position = self._skip.advance(self.position, stride)
            yield batch

    def look_ahead(self, count: int) -> UserError | None:
        """Read the next `count` micro-batches before they are asked for; returns the first error that they will raise, or
        None."""
        self._ahead.extend(islice(self._source, max(0, count - len(self._ahead))))
        return next((batch for batch in self._ahead if isinstance(batch, UserError)), None)

    def _read(self, positions: list[int]) -> Batch | UserError:
        """A micro-batch, or the error to raise when it is used: reading ahead raises nothing."""
        try:
            inputs, labels = self.sequences.batch(positions)
        except UserError as error:
            return error
        if self._pin:
            inputs, labels = inputs.pin_memory(), labels.pin_memory()
        return {"input": inputs}, labels

    def _positions(self, stride: int) -> Iterator[list[int]]:
        """This rank's positions in each micro-batch; all ranks together use `stride` of them."""
        position, limit = self.position, self.sequences.limit
        # The next `stride` positions that are not skipped, rank after rank. `advance(first, k + 1)` is the position after
        # row k, so row k is the one before it; `advance(first, k)`, after row k - 1, may be a position to skip.
        while limit is None or position < limit:
            first = self._skip.advance(position, self.dp_rank * self.local_batch_size)
            yield [self._skip.advance(first, row + 1) - 1 for row in range(self.local_batch_size)]
            position = self._skip.advance(position, stride)
