"""Export to Hugging Face, the nine zero-shot tasks, tables of scores."""

import logging

# transformers imports torchao, which warns about kernels not used here and about its own use of torch. lm-eval warns about
# settings that its own tasks leave out, a model given in memory, and each context cut to the model's length.
for _name in ("torchao", "torch.utils._pytree", "lm_eval.api.task", "lm_eval.models.huggingface"):
    logging.getLogger(_name).setLevel(logging.ERROR)
