"""Answers that have more tokens than the model's maximum length: their end is scored, with a warning."""

from torchtitan.tools.logging import logger

Request = tuple[tuple[str, str], list[int], list[int]]  # texts, context ids, continuation ids


class CutsLongAnswers:
    """Mixin, before a class of lm-eval's `TemplateLM`, whose `_loglikelihood_tokens` calls `cut` first.

    lm-eval truncates context and answer on the left to `max_length` + 1 tokens, but fails if the answer alone has more
    than `max_length`. Here the truncation goes on into the answer, so one long answer does not end the scoring. Its
    log-likelihood is the sum over its last `max_length` tokens.
    """

    max_length: int

    def loglikelihood(self, requests, disable_tqdm: bool = False) -> list[tuple[float, bool]]:
        self._names = [request.task_name or "a request" for request in requests]
        return super().loglikelihood(requests, disable_tqdm=disable_tqdm)

    def cut(self, requests: list[Request]) -> list[Request]:
        """The requests, in the same order, with at most `max_length` tokens per answer; one warning if any is cut."""
        result, tasks = list(requests), {}
        for index, (texts, context, answer) in enumerate(requests):
            if len(answer) > self.max_length:
                kept = (context + answer)[-self.max_length - 1 :]
                result[index] = texts, kept[:1], kept[1:]
                tasks[self._names[index]] = tasks.get(self._names[index], 0) + 1
        if tasks:
            counts = ", ".join(f"{count} of {name}" for name, count in tasks.items())
            logger.warning(
                f"answers with more tokens than the model's maximum of {self.max_length}: {counts}; "
                f"only their last {self.max_length} tokens are scored"
            )
        return result
