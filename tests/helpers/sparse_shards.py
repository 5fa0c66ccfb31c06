"""Token shards of any size on a small disk: sparse files of zeros with a manifest."""

import hashlib
import io
from pathlib import Path

import numpy as np

from pc_recipe.data.manifest import FORMAT, TOKENIZER_FOLDER, Manifest, TokenizerRecord, TokenShard
from pc_recipe.data.tokenizers import load_tokenizer


def make_sparse(folder: Path, *, train: int, validation: int, tokens: int) -> Manifest:
    """A folder of `train` and `validation` shards of `tokens` tokens each; all are 0, and the checksums are right."""
    tokenizer = load_tokenizer("mistral-common")
    header = io.BytesIO()
    np.lib.format.write_array_header_1_0(header, {"descr": "<u2", "fortran_order": False, "shape": (tokens,)})
    size = len(header.getvalue()) + 2 * tokens
    digest = hashlib.sha256(header.getvalue())
    for begin in range(0, 2 * tokens, 2**24):
        digest.update(bytes(min(2**24, 2 * tokens - begin)))
    shards = {
        split: [TokenShard(f"{split}/{i:05d}.tokens.npy", tokens, 1, size, digest.hexdigest()) for i in range(count)]
        for split, count in (("train", train), ("validation", validation))
    }
    for split, some in shards.items():
        (folder / split).mkdir(parents=True)
        for shard in some:
            with open(folder / shard.tokens_file, "wb") as file:
                file.write(header.getvalue())
                file.truncate(size)
    tokenizer.save(folder / TOKENIZER_FOLDER)
    source = {"input": "sparse", "subset": None, "files": []}
    manifest = Manifest(folder, FORMAT, "uint16", source, "none", TokenizerRecord.of(tokenizer), shards)
    manifest.write()
    return manifest
