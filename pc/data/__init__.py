"""Text to token shards to batches; `docs/data.md` explains the whole path."""

from pc.data.loader import GlobalOrderLoader, build_dataloader
from pc.data.manifest import Manifest, require_same_tokenizer
from pc.data.streaming import build_streaming_dataloader
from pc.data.tokenizers import Tokenizer, load_tokenizer

__all__ = [
    "GlobalOrderLoader",
    "Manifest",
    "Tokenizer",
    "build_dataloader",
    "build_streaming_dataloader",
    "load_tokenizer",
    "require_same_tokenizer",
]
