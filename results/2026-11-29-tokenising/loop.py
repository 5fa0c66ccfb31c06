"""The loop from texts to tokens, with `tokenizers` and with fastokens in turns: python loop.py SECONDS FILE.parquet"""

import os
import sys
import time
from functools import partial

os.environ |= {"TOKENIZERS_PARALLELISM": "false", "RAYON_NUM_THREADS": "1", "OMP_NUM_THREADS": "1"}
import numpy as np  # noqa: E402
import pyarrow.parquet as pq  # noqa: E402

from pc_recipe.data.fast_encoding import FastEncoder  # noqa: E402
from pc_recipe.data.tokenizers import load_tokenizer  # noqa: E402
from pc_recipe.data.tokenizing import _encode  # noqa: E402

CHUNK = 300  # documents
tokenizer = load_tokenizer("mistral-common")
fast = FastEncoder(tokenizer)
documents = {"tokenizers": tokenizer.documents, "fastokens": partial(tokenizer.documents, encode=fast.encode_batch)}
settings = {"shard_megabytes": 256, "validation_share": 0.0005}
texts = pq.read_table(sys.argv[2])["text"].to_pylist()
seconds, ratios, size, start = dict.fromkeys(documents, 0.0), [], 0, time.time()
for turn, first in enumerate(range(0, len(texts), CHUNK)):
    some, made, took = texts[first : first + CHUNK], {}, {}
    for name in list(documents)[:: 1 if turn % 2 else -1]:
        before = time.process_time()
        splits = _encode(iter(some), documents[name], settings, lambda characters: None).values()
        took[name] = time.process_time() - before
        seconds[name] += took[name]
        made[name] = np.concatenate([array for arrays in splits for array in arrays])
    assert np.array_equal(made["tokenizers"], made["fastokens"])
    ratios.append(took["tokenizers"] / took["fastokens"])
    size += sum(len(text.encode()) for text in some)
    if time.time() - start > float(sys.argv[1]):
        break
for name, took in seconds.items():
    print(f"{name:12} {size / took / 1e6:6.2f} MB per CPU second")
print(f"{size / 1e6:.1f} MB, equal tokens; ratio of chunks {min(ratios):.2f} to {max(ratios):.2f}")
