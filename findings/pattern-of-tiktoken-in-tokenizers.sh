#!/usr/bin/env bash
# tiktoken 0.14.0, tokenizers 0.23.3: the pattern of cl100k_base is accepted by both and splits numbers in one only.
#
# One would guess: the regular expression by which tiktoken cuts a text into words cuts it in the same way as the Split of
# a tokenizer.json.
# What happens: tiktoken's engine reads {1,3}+ as one to three, possessive; that of tokenizers reads it as one to three,
# repeated. "1234567" is 123, 456, 7 in one and a single word in the other. Text without long numbers gives the same words,
# so a short comparison shows nothing.
# Where it matters: a tokenizer.json that is trained or converted with tiktoken's pattern: numbers are not cut into threes, and
# a model trained with tiktoken's ids sees others at inference. (?>\\p{N}{1,3}) means the same in both. The $ of the same pattern
# is the end of the text in one and of any line in the other.
#
# Exit status: 0 as written here, 1 changed, 2 could not install. PACKAGES="..." tries other versions.
set -u
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder" || exit 2
export PIP_DISABLE_PIP_VERSION_CHECK=1 PYTHONWARNINGS=ignore
python3 -m venv . && bin/pip install -q --no-compile ${PACKAGES:-tiktoken==0.14.0 tokenizers==0.23.3} >pip.log 2>&1 ||
    { tail -n 1 pip.log >&2; exit 2; }
cat >observe.py <<'EOF'
import sys
from importlib.metadata import version

import tiktoken
import tiktoken_ext.openai_public as public
from tokenizers import Regex, pre_tokenizers

# a small vocabulary in place of the download: bytes, and entries that would join 1234567 if the pattern left it whole
entries = ["12", "123", "45", "456", "123456", "1234567"]
ranks = {bytes([byte]): byte for byte in range(256)} | {entry.encode(): 256 + i for i, entry in enumerate(entries)}
public.load_tiktoken_bpe = lambda *_, **__: ranks
described = public.cl100k_base()
pattern = described["pat_str"]
encoding = tiktoken.Encoding(**described | {"explicit_n_vocab": None})


def by_tiktoken(text: str) -> list[str]:
    return [encoding.decode([token]) for token in encoding.encode_ordinary(text)]


def by_tokenizers(pattern: str, text: str) -> list[str]:
    return [word for word, _ in pre_tokenizers.Split(Regex(pattern), "isolated").pre_tokenize_str(text)]


print("tiktoken", version("tiktoken"), "tokenizers", version("tokenizers"))
number, rewritten = "1234567", pattern.replace(r"\p{N}{1,3}+", r"(?>\p{N}{1,3})").replace(r"{1,3}+", "{1,3}")
one, other, fixed = by_tiktoken(number), by_tokenizers(pattern, number), by_tokenizers(rewritten, number)
print("the part of the pattern for numbers:", next(part for part in pattern.split("|") if "{1,3}" in part))
print("by tiktoken", one)
print("by the Split of tokenizers", other)
print("the same, without the plus sign", fixed)
text = "No long number here: it's 7 or 42."
print(f"{text!r}:", by_tokenizers(pattern, text) == by_tokenizers(rewritten, text))
sys.exit(not (one == fixed == ["123", "456", "7"] and other == [number]))
EOF
bin/python observe.py || exit 1
