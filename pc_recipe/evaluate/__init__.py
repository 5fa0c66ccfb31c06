"""Export to Hugging Face, the nine zero-shot tasks, tables of scores."""

import logging

# transformers imports torchao, which warns of kernels that are not used here, and of its own use of torch; lm-eval warns
# of what its own tasks do not say, of a model that is in memory, and of each context that is cut to the model's length.
for _name in ("torchao", "torch.utils._pytree", "lm_eval.api.task", "lm_eval.models.huggingface"):
    logging.getLogger(_name).setLevel(logging.ERROR)
