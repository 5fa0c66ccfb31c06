#!/usr/bin/env bash
# tokenizers 0.23.3: a special token does not keep the id that tokenizer.json gives it.
#
# One would guess: a file that says {"id": 7, "content": "</s>"} gives id 7, or is refused.
# What happens: an added token whose id does not follow the vocabulary without a gap gets the next free id, in silence; saved
# again, the file has the new id. With an entry of the vocabulary of that name, that entry's id counts.
# Where it matters: vocabularies with rows kept free for later (a gap before the special tokens, to pad the embedding or to
# match a model whose special ids are fixed): texts are then tokenised with ids of rows that the model never trained as such, and
# another library that reads the same file gives others.
#
# Exit status: 0 as written here, 1 changed, 2 could not install. PACKAGES="..." tries other versions.
set -u
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder" || exit 2
export PIP_DISABLE_PIP_VERSION_CHECK=1 PYTHONWARNINGS=ignore
python3 -m venv . && bin/pip install -q --no-compile ${PACKAGES:-tokenizers==0.23.3} >pip.log 2>&1 ||
    { tail -n 1 pip.log >&2; exit 2; }
cat >observe.py <<'EOF'
import json
import sys

import tokenizers
from tokenizers import Tokenizer, models

made = Tokenizer(models.BPE({"a": 0, "b": 1}, []))
made.add_special_tokens(["</s>"])
file = json.loads(made.to_str())
file["added_tokens"][0]["id"] = 7
read = Tokenizer.from_str(json.dumps(file))
saved = json.loads(read.to_str())["added_tokens"][0]["id"]
print("tokenizers", tokenizers.__version__)
print(f"tokenizer.json gives </s> the id 7; 'a</s>' becomes {read.encode('a</s>').ids}, and the file saved again has {saved}")
sys.exit(not (read.encode("a</s>").ids == [0, 2] and saved == 2))
EOF
bin/python observe.py || exit 1
