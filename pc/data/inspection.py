"""Shows what a folder of token shards contains."""

from collections.abc import Iterator

import numpy as np

from pc.data.manifest import SPLITS, Manifest
from pc.data.shards import open_tokens, verify

SHOWN_CHARACTERS = 300  # of each document


def describe(manifest: Manifest) -> str:
    """Source, tokenizer, split rule and size of each split, in lines."""
    tokenizer, source = manifest.tokenizer, manifest.source
    subset = f", subset {source['subset']}" if source["subset"] else ""
    first = f", its first {source['max_documents']:,} documents" if source.get("max_documents") else ""
    lines = [
        f"source       {source['input']}{subset} ({len(source['files'])} files){first}",
        f"tokenizer    {tokenizer.name} ({tokenizer.kind}, {tokenizer.vocab_size:,} entries, "
        f"BOS {tokenizer.bos_id}, EOS {tokenizer.eos_id}, sha256 {tokenizer.sha256[:12]}…)",
        f"split        {manifest.split_rule}",
    ]
    for split in SPLITS:
        lines.append(
            f"{split:12} {len(manifest.shards[split])} shards, {manifest.documents(split):,} documents, "
            f"{manifest.tokens(split):,} tokens ({manifest.dtype})"
        )
        if len(lengths := document_lengths(manifest, split)):
            low, median, high = np.percentile(lengths, [5, 50, 95]).astype(int)
            lines.append(
                f"{'':12} tokens per document: median {median}, 5th to 95th percentile {low} to {high}, "
                f"maximum {lengths.max():,}"
            )
    return "\n".join(lines)


def _documents(manifest: Manifest, split: str) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """For each shard its tokens [tokens], and where its documents begin and the last one ends [documents + 1]."""
    for shard in manifest.shards[split]:
        tokens = open_tokens(manifest.folder, shard)
        yield tokens, np.append(0, np.flatnonzero(tokens == manifest.tokenizer.eos_id) + 1)


def document_lengths(manifest: Manifest, split: str) -> np.ndarray:
    """Tokens of each document, including BOS and EOS [documents]."""
    return np.concatenate([np.zeros(0, np.int64), *(np.diff(offsets) for _, offsets in _documents(manifest, split))])


def read_documents(manifest: Manifest, split: str, count: int) -> list[np.ndarray]:
    """Tokens of `count` documents, evenly spaced over the split."""
    total = manifest.documents(split)
    wanted = sorted({i * total // count for i in range(count)}) if total else []
    documents, first = [], 0
    for tokens, offsets in _documents(manifest, split):
        last = first + len(offsets) - 1
        here = [offsets[i - first : i - first + 2] for i in wanted if first <= i < last]
        documents += [tokens[start:end] for start, end in here]
        first = last
    return documents


def inspect(folder: str, documents: int) -> None:
    """Print what a folder of shards contains and some of its documents, and verify its checksums."""
    manifest = Manifest.read(folder)
    print(describe(manifest))
    verify(manifest)
    print("checksums    correct")
    tokenizer = manifest.load_tokenizer()
    for tokens in read_documents(manifest, "train", documents):
        text = tokenizer.decode(tokens[int(tokenizer.bos_id is not None) : -1].tolist())
        shown = text if len(text) <= SHOWN_CHARACTERS else text[:SHOWN_CHARACTERS] + " …"
        print(f"\n--- document of {len(tokens):,} tokens ---\n{shown}")
