"""Generate text with a checkpoint or an export."""

from pathlib import Path

import torch
from transformers import pipeline

from pc.evaluate import hugging_face


def generate(
    model: str | Path, prompt: str, *, max_new_tokens: int, temperature: float, top_p: float, seed: int
) -> str:
    """The prompt with the model's continuation; the same seed gives the same text.

    Args:
        model: checkpoint of a run or Hugging Face folder.
        max_new_tokens: upper limit; fewer if the model ends the document.
        temperature: 0 always takes the most likely token.
        top_p: sample among the most likely tokens that together have this probability.
    """
    llama, tokenizer = hugging_face.load(model)
    sampling = {"do_sample": True, "temperature": temperature, "top_p": top_p} if temperature else {"do_sample": False}
    torch.manual_seed(seed)
    generator = pipeline("text-generation", llama, tokenizer=tokenizer)
    (continued,) = generator(prompt, max_new_tokens=max_new_tokens, max_length=None, **sampling)
    return continued["generated_text"]
