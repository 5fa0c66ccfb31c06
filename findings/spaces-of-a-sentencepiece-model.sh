#!/usr/bin/env bash
# transformers 5.23.0, sentencepiece 0.2.3: a tokenizer.model is converted to other ids for runs of spaces.
#
# One would guess: AutoTokenizer on a folder with a SentencePiece model of the kind of Llama 2 gives SentencePiece's ids.
# What happens: the converted tokenizer merges the spaces of a run with each other where SentencePiece joins the last one to the
# word behind it. Prose is the same; Python source has almost a percent fewer tokens, and half of all lengths of runs
# become other ids. The model here is Mistral's first, which mistral-common brings (32,000 entries).
# Where it matters: shards made with sentencepiece and a model that is scored or served with transformers, or the reverse: code
# and tables are encoded in a way that the model has never seen. A folder with a tokenizer.json made from the
# model should be compared on such text first.
#
# Exit status: 0 as written here, 1 changed, 2 could not install. PACKAGES="..." tries other versions.
set -u
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder" || exit 2
export PIP_DISABLE_PIP_VERSION_CHECK=1 PYTHONWARNINGS=ignore
python3 -m venv . && bin/pip install -q --no-compile ${PACKAGES:-transformers==5.23.0 sentencepiece==0.2.3 mistral-common==1.13.1 protobuf} >pip.log 2>&1 ||
    { tail -n 1 pip.log >&2; exit 2; }
cat >observe.py <<'EOF'
import inspect
import json
import logging
import sys
from pathlib import Path

import mistral_common
import sentencepiece
import transformers

logging.disable(logging.WARNING)
model = Path(mistral_common.__file__).parent / "data" / "tokenizer.model.v1"
folder = Path("model")
folder.mkdir()
(folder / "tokenizer.model").write_bytes(model.read_bytes())
(folder / "config.json").write_text('{"model_type": "llama"}')
names = {"tokenizer_class": "LlamaTokenizer", "bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
(folder / "tokenizer_config.json").write_text(json.dumps(names))
original = sentencepiece.SentencePieceProcessor(str(model))
converted = transformers.AutoTokenizer.from_pretrained(folder)


def both(text: str) -> tuple[list[int], list[int]]:
    return original.encode(text), converted.encode(text, add_special_tokens=False)


print("transformers", transformers.__version__, "sentencepiece", sentencepiece.__version__)
prose, code = "It was the best of times, it was the worst of times.", inspect.getsource(inspect)
differ = sum(len(set(map(tuple, both("a" + " " * n + "b")))) > 1 for n in range(1, 41))
print("prose: the same ids", both(prose)[0] == both(prose)[1])
print(f"'a', 1 to 40 spaces, 'b': other ids for {differ} of 40")
print("'a  b':", *(sequence for sequence in both("a  b")))
lengths = [len(sequence) for sequence in both(code)]
print(f"the source of a module: {lengths[0]} tokens by sentencepiece, {lengths[1]} by transformers")
sys.exit(not (both(prose)[0] == both(prose)[1] and differ > 10 and lengths[0] > lengths[1]))
EOF
bin/python observe.py || exit 1
