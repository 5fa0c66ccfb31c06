"""Export to Hugging Face, the nine zero-shot tasks, tables of scores."""

from pc.common.errors import require_extra

require_extra("evaluate", "lm_eval", "transformers")
