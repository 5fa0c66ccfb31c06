"""Batches directly from a Hub dataset, tokenised during training: for quick experiments without shards.

Each rank reads its own part of the stream and packs it into sequences as the shards are. There is no validation
split, and only a thousand documents at a time are shuffled. `PROMISE`, which is logged at the start, describes resume.
"""

import itertools
import logging
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch

from pc.data.encoding import Encoder
from pc.data.loader import Batch, Resumable
from pc.data.shards import smallest_dtype
from pc.data.tokenizers import DEFAULT_TOKENIZER, load_tokenizer
from pc.errors import UserError

logger = logging.getLogger(__name__)

SHUFFLED_TOGETHER = 1000  # documents

PROMISE = (
    "Streaming {dataset} is for quick experiments. A resumed run reads and tokenises the stream again from its "
    "start, which takes as long as before, and continues with the next sequence only if the dataset has not "
    "changed; the number of ranks must stay the same. For exact and immediate resume, tokenise the dataset into "
    "shards (scripts/tokenize_fineweb.py) and set data.path."
)


class StreamingLoader(Resumable):
    """Created by `build_streaming_dataloader`; its state is the global position in sequences."""

    def __init__(
        self,
        dataset: str,
        documents,
        encoder: Encoder,
        *,
        seed: int,
        seq_len: int,
        local_batch_size: int,
        dp_rank: int,
        dp_world_size: int,
    ):
        self.dataset = dataset
        self.documents = documents
        self.encoder = encoder
        self.seed = seed
        self.seq_len = seq_len
        self.local_batch_size = local_batch_size
        self.dp_rank = dp_rank
        self.dp_world_size = dp_world_size
        self.position = 0
        self.identity = {
            "data.streaming": dataset,
            "tokenizer": encoder.tokenizer.sha256,
            "training.seq_len": seq_len,
            "data.seed": seed,
            "number of data-parallel ranks": dp_world_size,
        }

    def __iter__(self) -> Iterator[Batch]:
        sequences = self._sequences()
        skipped = self.position // self.dp_world_size
        if skipped:
            logger.info(f"Skipping {skipped:,} sequences per rank of {self.dataset}")
            for _ in range(skipped):
                next(sequences)
        while True:
            rows = np.stack([next(sequences) for _ in range(self.local_batch_size)])
            batch = torch.from_numpy(rows)  # [B, seq_len + 1]
            self.position += self.local_batch_size * self.dp_world_size
            yield {"input": batch[:, :-1].clone()}, batch[:, 1:].clone()

    def _sequences(self) -> Iterator[np.ndarray]:
        """This rank's sequences [seq_len + 1]; each starts with the last token of the previous one."""
        dtype = smallest_dtype(self.encoder.tokenizer.vocab_size)
        kept = np.zeros(0, dtype=np.int64)
        for epoch in itertools.count():
            count = 0
            for texts in self._texts(epoch):
                kept = np.concatenate([kept, self.encoder.documents(texts, dtype)[0].astype(np.int64)])
                start = 0
                while start + self.seq_len < len(kept):
                    yield kept[start : start + self.seq_len + 1]
                    start += self.seq_len
                    count += 1
                kept = kept[start:]
            if count == 0:
                raise UserError(
                    f"{self.dataset} has too little text for rank {self.dp_rank} of {self.dp_world_size}: "
                    f"not one sequence of {self.seq_len} tokens"
                )
            logger.warning(f"{self.dataset} is at its end; rank {self.dp_rank} reads it again")

    def _texts(self, epoch: int) -> Iterator[list[str]]:
        for number, rows in enumerate(self.documents.iter(batch_size=SHUFFLED_TOGETHER)):
            if "text" not in rows:
                raise UserError(f"{self.dataset} has no column 'text'; it has {', '.join(rows)}")
            order = np.random.default_rng([self.seed, epoch, number]).permutation(len(rows["text"]))
            yield [rows["text"][i] or "" for i in order]


def build_streaming_dataloader(
    dataset: str,
    *,
    tokenizer: str = "",
    seq_len: int,
    local_batch_size: int,
    dp_rank: int,
    dp_world_size: int,
    seed: int,
    vocab_size: int,
) -> StreamingLoader:
    """A loader over the `train` split of a Hub dataset `owner/name` or `owner/name:subset`.

    It may also be a local folder of parquet files. tokenizer: see `load_tokenizer`; empty: the default. The
    other arguments are those of `build_dataloader`.
    """
    import datasets
    from datasets.distributed import split_dataset_by_node

    encoder = Encoder(load_tokenizer(tokenizer or DEFAULT_TOKENIZER))
    if encoder.tokenizer.vocab_size > vocab_size:
        raise UserError(
            f"tokenizer {encoder.tokenizer.name!r} has {encoder.tokenizer.vocab_size} entries, "
            f"but the model's vocabulary has {vocab_size}"
        )
    name, _, subset = dataset.partition(":")
    try:
        if Path(name).is_dir():
            stream = datasets.load_dataset("parquet", data_dir=name, split="train", streaming=True)
        else:
            stream = datasets.load_dataset(name, subset or None, split="train", streaming=True)
    except Exception as error:  # unknown dataset or subset, no network, no access: the message explains it
        raise UserError(f"data.streaming = {dataset!r} cannot be read: {error}") from error
    if dp_rank == 0:
        logger.warning(PROMISE.format(dataset=dataset))
    return StreamingLoader(
        dataset,
        split_dataset_by_node(stream, rank=dp_rank, world_size=dp_world_size),
        encoder,
        seed=seed,
        seq_len=seq_len,
        local_batch_size=local_batch_size,
        dp_rank=dp_rank,
        dp_world_size=dp_world_size,
    )
