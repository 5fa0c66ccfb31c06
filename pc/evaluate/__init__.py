"""From a checkpoint to a score: export to Hugging Face, the nine zero-shot tasks, tables."""

from pc.errors import require_extra

require_extra("evaluate", "lm_eval", "transformers")
