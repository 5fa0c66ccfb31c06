"""The tokenizer of the shards in the format of Hugging Face tools.

It gives the same ids as in training, with BOS before each text as before each document there. Text that looks like a
control token stays text.
"""

import base64
import json
import tempfile
from pathlib import Path

from sentencepiece import sentencepiece_model_pb2
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, processors
from transformers import PreTrainedTokenizerFast
from transformers.convert_slow_tokenizer import TikTokenConverter, generate_merges

import pc_recipe.data.tokenizers as training
from pc.errors import UserError
from pc_recipe.data.manifest import Manifest
from pc_recipe.files.atomic import write_atomically

# Cases in which conversions fail most easily: runs of spaces, line ends, several scripts, compatibility characters,
# bytes without a piece, control tokens as text.
PROBES = (
    "", " ", "Hello world", "  two in front", "a  b   c    d     e", "line\n\nline\ttab\r\n", "trailing   ",
    "naïve café, Ωμέγα, Привет, 漢字, 🙂👩‍👩‍👧", "ﬁ ½ Ａ \u00a0 \u200b", "<s> no control token </s>",
    "3.14159 + 2_000 = x**2; def f(x): return x",
)  # fmt: skip


def load(path: str | Path) -> PreTrainedTokenizerFast:
    """The tokenizer of a folder of token shards."""
    return to_hugging_face(Manifest.read(path).load_tokenizer())


def to_hugging_face(tokenizer: training.Tokenizer) -> PreTrainedTokenizerFast:
    """The same ids from `transformers`.

    Raises:
        UserError: the conversion gives other ids.
    """
    if isinstance(tokenizer, training.TiktokenTokenizer):
        converted = _from_tiktoken(tokenizer.model)
    elif tokenizer.kind == "sentencepiece":
        converted = _from_sentencepiece(tokenizer)
    else:
        converted = Tokenizer.from_str(tokenizer.files["tokenizer.json"].decode())
    eos = converted.id_to_token(tokenizer.eos_id)
    names = {"eos_token": eos, "pad_token": eos}  # padding is never attended to; many tools need a token for it
    if tokenizer.bos_id is not None:
        bos = names["bos_token"] = converted.id_to_token(tokenizer.bos_id)
        converted.post_processor = processors.TemplateProcessing(
            single=f"{bos} $A", pair=f"{bos} $A {bos} $B", special_tokens=[(bos, tokenizer.bos_id)]
        )
    wrapped = PreTrainedTokenizerFast(
        tokenizer_object=converted,
        **names,
        split_special_tokens=True,  # "<s>" in a text is text, as in training
        clean_up_tokenization_spaces=False,
    )
    for text in PROBES:
        if wrapped.encode(text, add_special_tokens=False) != tokenizer.encode(text):
            raise UserError(
                f"tokenizer {tokenizer.name!r}: its Hugging Face form encodes {text!r} differently, so a model that is "
                "trained with it could not be exported"
            )
    return wrapped


def save(tokenizer: PreTrainedTokenizerFast, folder: str | Path) -> None:
    """Write tokenizer.json and tokenizer_config.json into an existing folder."""
    tokenizer.save_pretrained(folder)
    path = Path(folder) / "tokenizer_config.json"
    config = json.loads(path.read_text())
    # The class that reads tokenizer.json unchanged, by the name that old and new transformers know. A class such as
    # LlamaTokenizer would rebuild parts of it and change ids.
    config["tokenizer_class"] = "PreTrainedTokenizerFast"
    config.pop("backend", None)
    write_atomically(path, json.dumps(config, indent=2) + "\n")


def _from_tiktoken(encoding) -> Tokenizer:
    """A `tiktoken.Encoding`, which tells its entries and its pattern in private attributes only."""
    with tempfile.NamedTemporaryFile() as vocabulary:
        for entry, token_id in encoding._mergeable_ranks.items():
            vocabulary.write(base64.b64encode(entry) + f" {token_id}\n".encode())
        vocabulary.flush()
        special = encoding._special_tokens
        return TikTokenConverter(vocabulary.name, encoding._pat_str, extra_special_tokens=special).converted()


def _from_sentencepiece(tokenizer: training.Tokenizer) -> Tokenizer:
    model = sentencepiece_model_pb2.ModelProto.FromString(  # type: ignore[attr-defined]  # made when it is imported
        tokenizer.files["tokenizer.model"]
    )
    pieces = [piece.piece for piece in model.pieces]
    scores = [(piece.piece, piece.score) for piece in model.pieces]
    vocabulary = {piece: index for index, piece in enumerate(pieces)}
    unknown = pieces[model.trainer_spec.unk_id]
    # Merges in order of score: transformers' own order, by id, splits runs of spaces differently.
    merges = generate_merges(vocabulary, scores)
    converted = Tokenizer(
        models.BPE(vocab=vocabulary, merges=merges, unk_token=unknown, fuse_unk=True, byte_fallback=True)
    )
    converted.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    converted.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    controls = [unknown, *(pieces[i] for i in (tokenizer.bos_id, tokenizer.eos_id) if i is not None)]
    converted.add_special_tokens([AddedToken(token, normalized=False, special=True) for token in controls])
    return converted
