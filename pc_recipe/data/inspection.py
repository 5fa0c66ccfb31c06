"""Shows what a folder of token shards contains."""

from collections import Counter
from collections.abc import Iterator, Sequence
from functools import lru_cache
from itertools import islice
from pathlib import Path

import numpy as np

from pc_recipe.data.manifest import SPLITS, Manifest
from pc_recipe.data.sources import ending_of
from pc_recipe.data.token_files import read_tokens, require_files
from pc_recipe.files.progress import byte_bar

SHOWN_CHARACTERS = 300  # of each document
LOOKED_AT = 100_000  # documents, in a second


def describe(manifest: Manifest) -> str:
    """Source, tokenizer, split rule and size of each split, in lines."""
    tokenizer, source = manifest.tokenizer, manifest.source
    subset = f", subset {source['subset']}" if source["subset"] else ""
    first = f", at most {source['max_documents']:,} documents" if source.get("max_documents") else ""
    endings = Counter(ending_of(file["name"]) for file in source["files"])
    kinds = ", ".join(f"{number:,} {ending}" for ending, number in endings.most_common())
    lines = [
        f"source       {source['input']}{subset} ({kinds}){first}",
        f"tokenizer    {tokenizer.name} ({tokenizer.kind}, {tokenizer.vocab_size:,} entries, "
        f"BOS {tokenizer.bos_id}, EOS {tokenizer.eos_id}, sha256 {tokenizer.sha256[:12]}…)",
        f"split        {manifest.split_rule}",
    ]
    for split in SPLITS:
        lines.append(
            f"{split:12} {len(manifest.shards[split])} shards, {manifest.documents(split):,} documents, "
            f"{manifest.tokens(split):,} tokens ({manifest.dtype})"
        )
    # unknown for folders of format 1
    left_out = [f"{number:,} {reason}" for reason, number in source.get("left_out", {}).items()]
    lines.append(f"left out     {'; '.join(left_out) or 'nothing'}")
    if replaced := source.get("replaced"):
        count = sum(replaced.values())
        lines.append(f"not UTF-8    {count:,} bytes became U+FFFD, in {len(replaced):,} files that manifest.json names")
    return "\n".join(lines)


def verify(manifest: Manifest) -> None:
    """Raise a `UserError` that names a shard whose size or checksum is not the manifest's, after reading every byte."""
    shards = [shard for split in SPLITS for shard in manifest.shards[split]]
    with byte_bar(sum(shard.tokens_bytes for shard in shards), "verifying") as bar:
        require_files(manifest.folder, shards, bar.update)


def read_documents(manifest: Manifest, split: str) -> Iterator[np.ndarray]:
    """Tokens of each document, including BOS and EOS [tokens]."""
    for shard in manifest.shards[split]:
        tokens = read_tokens(manifest, shard)
        yield from np.split(tokens, np.flatnonzero(tokens == manifest.tokenizer.eos_id) + 1)[:-1]


def list_repeated(training: Sequence[Manifest], validation: Sequence[Manifest]) -> list[str]:
    """A line for each folder whose validation documents are training documents of another folder.

    Within one folder they never are: a text's hash decides its split (`tokenizing.split_by_hash`). The first `LOOKED_AT`
    of each split are compared.
    """
    lines = []
    for one in validation:
        others = [other for other in training if other.content_sha256 != one.content_sha256]
        asked = _hashes(one.folder, one.content_sha256, "validation", LOOKED_AT) if others else set()
        for other in others:
            if repeated := len(asked & _hashes(other.folder, other.content_sha256, "train", LOOKED_AT)):
                lines.append(
                    f"{repeated:,} of {len(asked):,} validation documents of {one.folder} are training documents of "
                    f"{other.folder} (of the first {LOOKED_AT:,} of each)"
                )
    return lines


@lru_cache(maxsize=8)  # the runs of a sweep read the same folders
def _hashes(folder: Path, content: str, split: str, most: int) -> set[int]:
    """Hashes of the first documents, at most so many, of a folder with this content."""
    return {hash(tokens.tobytes()) for tokens in islice(read_documents(Manifest.read(folder), split), most)}


def inspect(folder: str, documents: int) -> None:
    """Print what a folder of shards contains and its first documents, and verify its checksums."""
    manifest = Manifest.read(folder)
    print(describe(manifest))
    verify(manifest)
    print("checksums    correct")
    tokenizer = manifest.load_tokenizer()
    for tokens in islice(read_documents(manifest, "train"), documents):
        text = tokenizer.decode(tokens[int(tokenizer.bos_id is not None) : -1].tolist())
        shown = text if len(text) <= SHOWN_CHARACTERS else text[:SHOWN_CHARACTERS] + " …"
        print(f"\n--- document of {len(tokens):,} tokens ---\n{shown}")
