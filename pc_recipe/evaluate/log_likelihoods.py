"""Log-likelihoods for lm-eval, from the trainer's own model on one rank or many, or from a Hugging Face model."""

from collections import defaultdict
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

import torch
import torch.distributed as dist
from lm_eval.api.model import TemplateLM
from torch import Tensor
from torch.distributed.tensor import DTensor
from torchtitan.tools.logging import logger
from tqdm import tqdm
from transformers import PreTrainedTokenizerBase

from pc.errors import UserError

Request = tuple[tuple[str, str], list[int], list[int]]  # texts, context ids, answer ids

# Lengths are rounded up to a multiple of this: few distinct shapes for torch.compile, and divisible for sequence
# parallelism.
_LENGTH_STEP = 16


class LogLikelihoods(TemplateLM):
    """lm-eval's model, with any sharding except pipeline and context parallelism.

    Every rank gets all requests, in the same order. The batches are split over data-parallel ranks. Each rank runs the
    same number of forward passes, because with FSDP every pass has collectives.

    Args:
        model: maps token ids [batch, length] to logits [batch, length, vocabulary], causally.
        max_length: the model's maximum number of tokens; longer requests are truncated on the left, answers too.
        batch_size: sequences per rank and forward pass.
        data_group: process group of the data-parallel ranks; None for one.
        precision: context of the forward pass, such as autocast.
        quiet: no progress bar.
    """

    def __init__(
        self,
        model: Callable[[Tensor], Tensor],
        tokenizer: PreTrainedTokenizerBase,
        *,
        max_length: int,
        batch_size: int,
        device: torch.device | str = "cpu",
        data_group: dist.ProcessGroup | None = None,
        precision: AbstractContextManager | None = None,
        quiet: bool = False,
    ) -> None:
        super().__init__()  # one rank for lm-eval: this class splits the requests
        self.model = model
        self.tokenizer = tokenizer
        self._adds_end = tokenizer.encode("a")[-1:] == [tokenizer.eos_token_id]
        self.max_length = max_length
        self.batch_size = batch_size
        self._device = torch.device(device)
        self.data_group = data_group
        self.precision = precision or nullcontext()
        self.quiet = quiet

    @property
    def eot_token_id(self) -> int:
        return self.tokenizer.eos_token_id

    @property
    def prefix_token_id(self) -> int:
        bos = self.tokenizer.bos_token_id
        return self.eot_token_id if bos is None else bos

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **kwargs) -> list[int]:
        ids = self.tokenizer.encode(string, add_special_tokens=add_special_tokens is not False)
        # some tokenizers end each text, which a context is not
        return ids[:-1] if self._adds_end and add_special_tokens is not False else ids

    def loglikelihood(self, requests, disable_tqdm: bool = True) -> list[tuple[float, bool]]:
        return super().loglikelihood(requests, disable_tqdm=True)

    @torch.no_grad()
    def _loglikelihood_tokens(self, requests: list[Request], **kwargs) -> list[tuple[float, bool]]:
        if cut := sum(len(answer) > self.max_length for _, _, answer in requests):
            logger.warning(
                f"{cut} answers have more tokens than the model's maximum of {self.max_length}: only their ends are scored"
            )
        # Requests with the same input, such as answers of one token each to one question, share a row of a batch.
        requests_by_input = defaultdict(list)
        for index, (_, context, answer) in enumerate(requests):
            ids = tuple((context + answer)[-self.max_length - 1 : -1])
            requests_by_input[ids].append((index, answer[-self.max_length :]))
        # Group similar lengths; the stable sort is the same on every rank.
        rows = sorted(requests_by_input, key=len, reverse=True)
        batches = [rows[start : start + self.batch_size] for start in range(0, len(rows), self.batch_size)]
        world_size = dist.get_world_size(self.data_group) if self.data_group else 1
        rank = dist.get_rank(self.data_group) if self.data_group else 0
        scores = torch.zeros(len(requests), 2, dtype=torch.float64, device=self._device)
        for first in tqdm(range(0, len(batches), world_size), unit="batch", disable=self.quiet):
            # In the last round, a rank without a batch repeats that round's first one.
            own = first + rank if first + rank < len(batches) else first
            logits = self._logits(batches[own])
            if own == first + rank:
                for row, ids in enumerate(batches[own]):
                    for index, answer in requests_by_input[ids]:
                        scores[index] = _score(logits[row, len(ids) - len(answer) : len(ids)], answer)
        if self.data_group:
            dist.all_reduce(scores, group=self.data_group)
        return [(value, bool(greedy)) for value, greedy in scores.tolist()]

    def _logits(self, batch: list[tuple[int, ...]]) -> Tensor:
        """[batch, length, vocabulary]"""
        longest = max(map(len, batch))
        length = min(self.max_length, -(-longest // _LENGTH_STEP) * _LENGTH_STEP)
        tokens = torch.zeros(len(batch), length, dtype=torch.long)
        for row, ids in enumerate(batch):
            # Padding is on the right: attention is causal, so it does not affect earlier tokens.
            tokens[row, : len(ids)] = torch.tensor(ids)
        with self.precision:
            logits = self.model(tokens.to(self._device))
        # tensor parallelism may leave the vocabulary sharded
        return logits.full_tensor() if isinstance(logits, DTensor) else logits

    def generate_until(self, requests, disable_tqdm: bool = False):
        raise UserError(
            "only tasks that ask for log-likelihoods of answers can be scored here; export the model for others"
        )

    loglikelihood_rolling = generate_until


def _score(logits: Tensor, answer: list[int]) -> Tensor:
    """[2]: log-likelihood of the answer, and 1 if every token is the most likely one; from logits [answer, vocabulary]."""
    expected = torch.tensor(answer, device=logits.device)
    log_p = logits.float().log_softmax(-1)
    value = log_p.gather(1, expected[:, None]).double().sum()
    return torch.stack([value, (log_p.argmax(-1) == expected).all().double()])
