"""`manifest.json`: describes a folder of token shards.

It is written last, so a folder with a manifest is complete.
"""

import hashlib
import json
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, TypeAdapter
from typing_extensions import NotRequired, TypedDict  # pydantic rejects those of Python 3.11

from pc.errors import UserError
from pc_recipe.data.tokenizers import Tokenizer, load_tokenizer
from pc_recipe.files import look
from pc_recipe.files.atomic import write_atomically
from pc_recipe.files.errors import WriteFailed

FORMAT = 2
"""Folders of format 1 keep their tokenizer's files as the user gave them."""
SPLITS = ("train", "validation")
TOKENIZER_FOLDER = "tokenizer"
Size = Annotated[int, Field(ge=0, le=2**50)]  # sums of them are offsets in files


class SourceFile(TypedDict):
    """One of the files that shards were made of."""

    name: str
    size: Size


class Source(TypedDict):
    """What shards were made of. Keys that format 1 lacks are optional."""

    input: str
    subset: str | None
    files: list[SourceFile]
    text_key: NotRequired[str]
    max_documents: NotRequired[Size | None]
    left_out: NotRequired[dict[str, Size]]
    """{reason: number of files or documents}"""
    replaced: NotRequired[dict[str, Size]]
    """{file: bytes that were not UTF-8}"""


@dataclass(frozen=True)
class TokenShard:
    """A file of tokens."""

    tokens_file: str
    """Its path, relative to the data folder."""
    tokens: Annotated[Size, Field(ge=1)]
    documents: Size
    tokens_bytes: Size
    """The size of the file."""
    tokens_sha256: str


@dataclass(frozen=True)
class TokenizerRecord:
    """The tokenizer that made the shards; its files are in `tokenizer/` in the data folder."""

    name: str
    kind: str
    sha256: str
    """`Tokenizer.sha256`; in format 1, of the files as given."""
    vocab_size: Size
    bos_id: Size | None
    eos_id: Size

    @staticmethod
    def of(tokenizer: Tokenizer) -> "TokenizerRecord":
        return TokenizerRecord(**{field.name: getattr(tokenizer, field.name) for field in fields(TokenizerRecord)})


@dataclass(frozen=True)
class Manifest:
    """What a folder of token shards holds."""

    folder: Path
    """The folder that it was read from."""
    format: Literal[1, 2]
    dtype: Literal["uint16", "uint32"]
    """The type of a token, little-endian."""
    source: Source
    split_rule: str
    """How documents were split, in words."""
    tokenizer: TokenizerRecord
    shards: dict[str, list[TokenShard]]
    """{split: its shards in order}."""
    configuration_sha256: str = ""
    """In format 1 the checksum of all settings that made the shards, by which older runs know them."""

    @property
    def content_sha256(self) -> str:
        """The checksum of the shards' checksums."""
        sums = {split: [shard.tokens_sha256 for shard in shards] for split, shards in self.shards.items()}
        return hashlib.sha256(json.dumps(sums, sort_keys=True).encode()).hexdigest()

    @property
    def identity(self) -> str:
        """The checksum by which runs know these data."""
        return self.configuration_sha256 or self.content_sha256

    def tokens(self, split: str) -> int:
        return sum(shard.tokens for shard in self.shards[split])

    def documents(self, split: str) -> int:
        return sum(shard.documents for shard in self.shards[split])

    def load_tokenizer(self) -> Tokenizer:
        """The tokenizer that made these shards, verified by its SHA-256."""
        folder = self.folder / TOKENIZER_FOLDER
        tokenizer = load_tokenizer(folder)
        if self.tokenizer.sha256 != (tokenizer.sha256 if self.format == FORMAT else self._sha256_of_given_files()):
            raise UserError(f"the tokenizer in {folder} is not the one that made the shards")
        tokenizer.name = self.tokenizer.name
        return tokenizer

    def tokenizer_sha256(self) -> str:
        """`Tokenizer.sha256`, also in format 1; if it cannot be converted, the checksum of the files as given."""
        try:
            return self.tokenizer.sha256 if self.format == FORMAT else self.load_tokenizer().sha256
        except UserError:
            return self.tokenizer.sha256

    def _sha256_of_given_files(self) -> str:
        made_with = self.tokenizer
        digest = hashlib.sha256(f"{made_with.kind} bos={made_with.bos_id} eos={made_with.eos_id}".encode())
        folder = self.folder / TOKENIZER_FOLDER
        for file in (folder / name for name in look.names(folder) if look.is_file(folder / name)):
            digest.update(f"\n{file.name} {file.stat().st_size}\n".encode() + file.read_bytes())
        return digest.hexdigest()

    def write(self) -> None:
        content = {k: v for k, v in asdict(self).items() if k not in ("folder", "shards") and v != ""}
        content["content_sha256"] = self.content_sha256
        content["splits"] = {
            split: {
                "documents": self.documents(split),
                "tokens": self.tokens(split),
                "shards": [asdict(shard) for shard in shards],
            }
            for split, shards in self.shards.items()
        }
        write_atomically(self.folder / "manifest.json", json.dumps(content, indent=1) + "\n")

    def pin(self) -> None:
        """Write the checksum of the shards' checksums to a manifest of format 1, which lacks it, if it can be written."""
        if self.configuration_sha256:
            with suppress(WriteFailed):
                self.write()

    @staticmethod
    def read(folder: str | Path) -> "Manifest":
        folder = Path(folder)
        path = folder / "manifest.json"
        text = look.read(path)
        if text is None:
            raise UserError(_why_no_manifest(folder))
        try:
            content = json.loads(text)
            if content["format"] not in (1, FORMAT):
                raise ValueError(f"format {content['format']}; this version reads formats 1 and {FORMAT}")
            content |= {"folder": folder, "shards": {split: content["splits"][split]["shards"] for split in SPLITS}}
            manifest = TypeAdapter(Manifest).validate_python(content)
            # format 1 has it from the first start on (`pin`)
            if content.get("content_sha256", manifest.content_sha256) != manifest.content_sha256:
                raise ValueError("its shards are not those that it was written with")
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            reason = " ".join(str(error).split())[:200]
            raise UserError(f"{path} is damaged ({reason}); repeat the tokenising command to rewrite it") from error
        return manifest


def require_same_tokenizer(one: Manifest, other: Manifest) -> None:
    """Raise if two data folders (such as training and validation) were made with different tokenizers."""
    same = one.tokenizer.sha256 == other.tokenizer.sha256 or one.tokenizer_sha256() == other.tokenizer_sha256()
    if not same:
        raise UserError(
            f"{one.folder} was tokenised with {one.tokenizer.name!r} and {other.folder} with "
            f"{other.tokenizer.name!r}; one run needs one tokenizer"
        )


def require_different(manifests: Sequence[Manifest]) -> None:
    """Raise if two folders of a mixture have the same shards."""
    known: dict[str, Manifest] = {}
    for manifest in manifests:
        if (other := known.setdefault(manifest.content_sha256, manifest)) is not manifest:
            raise UserError(
                f"data.path: {manifest.folder} and {other.folder} are the same data; name one, with the sum of both weights"
            )


def _why_no_manifest(folder: Path) -> str:
    if not look.is_folder(folder):
        return f"data folder {folder} does not exist; make it with scripts/tokenize_text.py"
    if look.is_file(folder / "tokenizing.json"):
        return f"{folder} is not finished; repeat the tokenising command, which continues where it stopped"
    return f"{folder} has no manifest.json, so it is not a folder of token shards"
