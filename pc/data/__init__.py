"""Tokenises text into shards and loads batches from them; see `docs/data.md`."""

from pc.common.errors import require_extra

require_extra("data", "numpy", "pyarrow", "sentencepiece")

from pc.data.loader import GlobalOrderLoader  # noqa: E402
from pc.data.manifest import Manifest, require_same_tokenizer  # noqa: E402
from pc.data.tokenizers import Tokenizer, load_tokenizer  # noqa: E402

__all__ = [
    "GlobalOrderLoader",
    "Manifest",
    "Tokenizer",
    "load_tokenizer",
    "require_same_tokenizer",
]
