"""Log-likelihoods of answers by lm-eval's own class for Hugging Face models, also where that fails."""

from lm_eval.models.huggingface import HFLM
from torchtitan.tools.logging import logger
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from pc_recipe.evaluate.generate import ends_texts

Request = tuple[tuple[str, str], list[int], list[int]]  # texts, context ids, answer ids


class LogLikelihoods(HFLM):
    """lm-eval's model, with two changes. If an answer has more tokens than the model's maximum, which lm-eval rejects, only
    its end is scored. If a tokenizer ends each text, contexts still get no end token.

    Args:
        model: on the device where it is to compute.
        batch_size: sequences per forward pass.
    """

    def __init__(self, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, batch_size: int) -> None:
        self._ends_texts = ends_texts(tokenizer)
        super().__init__(pretrained=model, tokenizer=tokenizer, batch_size=batch_size, softmax_dtype="float32")

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, *given, **named) -> list[int]:
        ids = super().tok_encode(string, add_special_tokens, *given, **named)
        return ids[:-1] if self._ends_texts and add_special_tokens is not False else ids

    def _loglikelihood_tokens(self, requests: list[Request], *given, **named) -> list[tuple[float, bool]]:
        if cut := sum(len(context) + len(answer) > self.max_length + 1 for _, context, answer in requests):
            logger.warning(
                f"{cut} questions with answers exceed the model's maximum of {self.max_length} tokens: it sees only "
                "their ends"
            )
        # how many tokens of an answer count as context
        given_away = [max(0, len(answer) - self.max_length) for _, _, answer in requests]
        fitting = [
            (texts, context + answer[:first], answer[first:])
            for (texts, context, answer), first in zip(requests, given_away, strict=True)
        ]
        return super()._loglikelihood_tokens(fitting, *given, **named)
