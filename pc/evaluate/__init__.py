"""From a checkpoint to a score: export to Hugging Face, the nine zero-shot tasks, tables."""
