"""Text that a model writes after a prompt."""

from typing import Any

import torch


def ends_texts(tokenizer: Any) -> bool:
    """Whether a tokenizer puts an end-of-text token behind each text, as T5's does. A prompt must have none."""
    return tokenizer.encode("a")[-1:] == [tokenizer.eos_token_id]


def continue_text(
    model: Any, tokenizer: Any, prompt: str, tokens: int, temperature: float = 0.8, top_p: float = 0.95, seed: int = 0
) -> str:
    """The prompt and what follows, decoded together: a token alone does not say whether a space stands before it.

    Args:
        tokens: at most this many; fewer if the model ends the document.
        temperature: 0 always takes the most likely token.
        top_p: sample from the likeliest tokens of this total probability.
    """
    sampling: dict[str, Any] = {"do_sample": False}
    if temperature:
        sampling = {"do_sample": True, "temperature": temperature, "top_p": top_p, "top_k": 0}
    ids = tokenizer.encode(prompt)
    ids = ids[:-1] if ends_texts(tokenizer) else ids
    given = torch.tensor([ids or [tokenizer.eos_token_id]], device=model.device)  # documents begin after another's end
    torch.manual_seed(seed)
    mask = torch.ones_like(given)
    (ids,) = model.generate(given, attention_mask=mask, max_new_tokens=tokens, max_length=None, **sampling)
    return tokenizer.decode(ids, skip_special_tokens=True)
