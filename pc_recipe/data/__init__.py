"""Tokenises text into shards and loads batches from them; see `docs/data.md`."""

from pc_recipe.data.loader import GlobalOrderLoader
from pc_recipe.data.manifest import Manifest, require_same_tokenizer
from pc_recipe.data.tokenizers import Tokenizer, load_tokenizer

__all__ = [
    "GlobalOrderLoader",
    "Manifest",
    "Tokenizer",
    "load_tokenizer",
    "require_same_tokenizer",
]
