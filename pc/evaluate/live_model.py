"""The trainer's own model for lm-eval, on one rank or many, without conversion."""

from contextlib import AbstractContextManager, nullcontext

import torch
import torch.distributed as dist
from lm_eval.api.model import TemplateLM
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from transformers import PreTrainedTokenizerFast

from pc.evaluate.long_answers import CutsLongAnswers, Request

# Lengths are rounded up to a multiple of this: few distinct shapes for torch.compile, and divisible for sequence
# parallelism.
_LENGTH_STEP = 16


class LiveModel(CutsLongAnswers, TemplateLM):
    """Log-likelihoods from a TorchTitan model, with any sharding except pipeline and context parallelism.

    Every rank gets all requests, in the same order. The batches are split over data-parallel ranks. Each rank runs the
    same number of forward passes, because with FSDP every pass has collectives.

    Args:
        model: maps token ids [batch, length] to logits [batch, length, vocabulary].
        max_length: the model's maximum number of tokens; longer requests are truncated on the left, answers too.
        batch_size: requests per rank and forward pass.
        data_group: process group of the data-parallel ranks; None for one.
        precision: context of the forward pass, such as autocast.
    """

    def __init__(
        self,
        model: nn.Module,
        tokenizer: PreTrainedTokenizerFast,
        *,
        max_length: int,
        batch_size: int,
        device: torch.device | str = "cpu",
        data_group: dist.ProcessGroup | None = None,
        precision: AbstractContextManager | None = None,
    ) -> None:
        super().__init__()  # one rank for lm-eval: this class splits the requests
        self.model = model
        self.tokenizer = tokenizer
        self.max_length = max_length
        self.batch_size = batch_size
        self._device = torch.device(device)
        self.data_group = data_group
        self.precision = precision or nullcontext()

    @property
    def eot_token_id(self) -> int:
        return self.tokenizer.eos_token_id

    @property
    def prefix_token_id(self) -> int:
        bos = self.tokenizer.bos_token_id
        return self.eot_token_id if bos is None else bos

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **kwargs) -> list[int]:
        return self.tokenizer.encode(string, add_special_tokens=add_special_tokens is not False)

    def loglikelihood(self, requests, disable_tqdm: bool = True) -> list[tuple[float, bool]]:
        return super().loglikelihood(requests, disable_tqdm=disable_tqdm)

    @torch.no_grad()
    def _loglikelihood_tokens(self, requests: list[Request], **kwargs) -> list[tuple[float, bool]]:
        requests = self.cut(requests)
        world_size = dist.get_world_size(self.data_group) if self.data_group else 1
        rank = dist.get_rank(self.data_group) if self.data_group else 0
        # Group similar lengths; the stable sort is the same on every rank.
        order = sorted(range(len(requests)), key=lambda i: -len(requests[i][1]) - len(requests[i][2]))
        batches = [order[start : start + self.batch_size] for start in range(0, len(order), self.batch_size)]
        answers = torch.zeros(len(requests), 2, dtype=torch.float64, device=self._device)
        was_training = self.model.training
        self.model.eval()
        try:
            for first in range(0, len(batches), world_size):
                # In the last round, a rank without a batch repeats that round's first one.
                mine = first + rank if first + rank < len(batches) else first
                batch = batches[mine]
                scored = self._score_batch([requests[i] for i in batch])
                if mine == first + rank:
                    answers[batch] = scored
        finally:
            self.model.train(was_training)
        if self.data_group:
            dist.all_reduce(answers, group=self.data_group)
        return [(value, bool(greedy)) for value, greedy in answers.tolist()]

    def _score_batch(self, batch: list[Request]) -> Tensor:
        """[batch, 2] in float64: log-likelihood of the continuation, and 1 if every token is the most likely one."""
        inputs = [(context + continuation)[-self.max_length - 1 : -1] for _, context, continuation in batch]
        longest = max(map(len, inputs))
        length = min(self.max_length, -(-longest // _LENGTH_STEP) * _LENGTH_STEP)
        tokens = torch.zeros(len(batch), length, dtype=torch.long)
        for row, ids in enumerate(inputs):
            # Padding is on the right: attention is causal, so it does not affect earlier tokens.
            tokens[row, : len(ids)] = torch.tensor(ids)
        with self.precision:
            logits = self.model(tokens.to(self._device))  # [batch, length, vocabulary]
        if isinstance(logits, DTensor):
            logits = logits.full_tensor()  # tensor parallelism may leave the vocabulary sharded
        scored = torch.zeros(len(batch), 2, dtype=torch.float64, device=self._device)
        for row, (ids, (_, _, continuation)) in enumerate(zip(inputs, batch, strict=True)):
            answer = torch.tensor(continuation, device=self._device)
            log_p = logits[row, len(ids) - len(continuation) : len(ids)].float().log_softmax(-1)  # [answer, vocabulary]
            scored[row, 0] = log_p.gather(1, answer[:, None]).sum()
            scored[row, 1] = (log_p.argmax(-1) == answer).all()
        return scored

    def loglikelihood_rolling(self, requests, disable_tqdm: bool = False) -> list[float]:
        raise NotImplementedError("the nine tasks ask for log-likelihoods of answers only")

    def generate_until(self, requests, disable_tqdm: bool = False) -> list[str]:
        raise NotImplementedError("the nine tasks ask for log-likelihoods of answers only")
