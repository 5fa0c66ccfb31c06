"""Export to Hugging Face, the nine zero-shot tasks, tables of scores."""
