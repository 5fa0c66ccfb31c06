"""Generate text with a checkpoint or an export."""

from pathlib import Path

import torch

from pc.errors import UserError
from pc.evaluate import hugging_face


@torch.no_grad()
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
    device = "cuda" if torch.cuda.is_available() else "cpu"
    llama, tokenizer = hugging_face.load(model)
    tokens = tokenizer(prompt, return_tensors="pt").to(device)
    given, longest = tokens.input_ids.shape[1], llama.config.max_position_embeddings
    if given >= longest:
        raise UserError(f"the prompt has {given} tokens, the model takes {longest}")
    torch.manual_seed(seed)
    sampling = {"do_sample": True, "temperature": temperature, "top_p": top_p} if temperature else {"do_sample": False}
    output = llama.to(device).generate(
        input_ids=tokens.input_ids,
        attention_mask=tokens.attention_mask,
        max_new_tokens=min(max_new_tokens, longest - given),
        pad_token_id=tokenizer.eos_token_id,
        **sampling,
    )
    return tokenizer.decode(output[0], skip_special_tokens=True)
