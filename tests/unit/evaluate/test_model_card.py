"""An export's README.md says what the model is and how it was made, with the metadata header of the Hub."""

import json
import re
import shutil
import tomllib

import pytest
import tomli_w
import yaml
from huggingface_hub import ModelCard

from helpers.made_runs import make_run
from helpers.small_tokenizers import make_sentencepiece, make_tokenizer
from pc import PCConfig
from pc_recipe.data.tokenizers import load_tokenizer
from pc_recipe.evaluate import hugging_face
from pc_recipe.evaluate.model_card import without_folders

HUB_FILES = [{"name": f"hf://datasets/owner/books@abc/{part}.parquet", "size": 9} for part in (0, 1)]
HUB_FILES += [{"name": "local/folder/a.parquet", "size": 9}]


@pytest.fixture
def run(tmp_path, data_folder):
    """A run at step 7, as the trainer leaves it."""
    made = make_run(tmp_path / "run", data_folder, PCConfig(level=4))
    lines = [
        {"step": 6, "tokens": 6000, "validation_loss": 4.5},
        {"step": 7, "tokens": 7000, "loss": 4.25, "max_loss": 4.75},
        {"step": 8, "tokens": 8000, "loss": 1.0},  # after the exported checkpoint
    ]
    (tmp_path / "run" / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    environment = {"world_size": 8, "commit": "abc"}
    (tmp_path / "run" / "environment.json").write_text(json.dumps(environment))
    return made.checkpoint


def test_the_card_of_a_run(run, tmp_path):
    (tmp_path / "table.md").write_text("the table of score.py")
    card = (hugging_face.export(run, tmp_path / "out", scores=tmp_path / "table.md") / "README.md").read_text()
    header = ModelCard(card).data  # as `hf upload` parses it; the Hub alone can tell whether it takes a value
    assert header.library_name == "transformers" and "llama" in header.tags
    assert header.license == "unknown" and header.pipeline_tag == "text-generation"
    for expected in (
        "# run, step 7",
        "none: pre-trained from scratch",
        "4 layers, width 256",
        r'blocks = \["o", "ffn"\]',
        "level = 4",
        "| trained on | 7 k tokens |",
        "| loss | 4.2500 |",
        "| validation loss | 4.5000 (step 6) |",
        "`./run_llama_train.sh config.toml` with the configuration below (world size 8, commit abc)",
        "`python scripts/export_hf.py RUN/checkpoint/step-7 FOLDER`",
        "## Scores\n\nthe table of score.py",
        'flavor = "debug"',
    ):
        assert expected in card
    assert "4.75" not in card


@pytest.mark.parametrize(
    "kind", ["the default", "another SentencePiece", "no BOS", "SentencePiece without its file", "byte-level"]
)
def test_a_card_says_what_llama_cpp_makes_of_the_tokenizer(kind, tmp_path):
    given = "mistral-common"
    if kind == "byte-level":
        given = make_tokenizer(tmp_path / "given")
    elif kind != "the default":
        options = {"bos_id": -1} if kind == "no BOS" else {}
        load_tokenizer(make_sentencepiece(tmp_path / "given.model", **options)).save(given := tmp_path / "given")
        if "without" in kind:
            (given / "tokenizer.model").unlink()
    run = make_run(tmp_path / "run", tmp_path / "gone", None, "tiny", vocab_size=32_000)
    card = (hugging_face.export(run.checkpoint, tmp_path / "out", tokenizer=str(given)) / "README.md").read_text()
    has_file = kind in ("the default", "another SentencePiece", "no BOS")
    assert ("llama.cpp then puts a BOS in front" in card) == (kind == "no BOS")
    assert has_file == (tmp_path / "out" / "tokenizer.model").exists() == ("takes `tokenizer.model`" in card)
    assert ("copyright 2024 Mistral AI, under the [Apache License 2.0]" in card) == (kind == "the default")
    assert ("gives other ids, as to two spaces" in card) == (kind == "SentencePiece without its file")
    assert ("pre-tokenizer was not recognized" in card) == (kind == "byte-level")


def test_the_base_is_what_the_run_began_with(run, tmp_path):
    """A resume ignores `initial_load_path`, but its config.toml may still name one."""
    config = tmp_path / "run" / "config.toml"
    began = config.read_text()
    for first, said in (
        ("", "none: pre-trained from scratch"),
        ('initial_load_path = "weights/a"', "from weights/a"),
    ):
        (tmp_path / "run" / "config.1.toml").write_text(f"{began}\n[checkpoint]\n{first}\n")
        config.write_text(f'{began}\n[checkpoint]\ninitial_load_path = "weights/b"\n')
        out = hugging_face.export(run, tmp_path / f"out-{len(first)}")
        assert f"| base | {'continued ' * bool(first)}{said} |" in (out / "README.md").read_text()


def test_the_card_has_the_settings_of_all_parts(run, tmp_path):
    """The checkpoint may be of an earlier one than the last, and its weights are of all."""
    config = tmp_path / "run" / "config.toml"
    for number, rate in ((1, 1e-3), (2, 2e-3)):
        config.with_name(f"config.{number}.toml").write_text(f"{config.read_text()}\n[optimizer]\nlr = {rate}\n")
    card = (hugging_face.export(run, tmp_path / "out") / "README.md").read_text()
    assert "with the configurations below, one after another, the last perhaps after this step" in card
    titles = re.findall(r"^### .*", card, flags=re.MULTILINE)
    assert titles == ["### config.1.toml, the first part", "### config.2.toml", "### config.toml, the last part"]
    assert card.index("lr = 0.001") < card.index("### config.2.toml") < card.index("lr = 0.002") < card.index(titles[2])
    config.with_name("config.1.toml").write_text("damaged")
    card = (hugging_face.export(run, tmp_path / "again") / "README.md").read_text()
    assert "### config.1.toml, the first part\n\nIt cannot be read" in card


def test_the_card_names_all_data_of_a_mixture(run, tmp_path, data_folder):
    other = shutil.copytree(data_folder, tmp_path / "other")
    manifest = json.loads((other / "manifest.json").read_text())
    manifest["source"] |= {"input": "owner/books local/folder", "files": HUB_FILES}
    (other / "manifest.json").write_text(json.dumps(manifest))
    config = tmp_path / "run" / "config.toml"
    content = tomllib.loads(config.read_text())
    content["data"]["path"] = {str(folder): 1.0 for folder in (data_folder, other, tmp_path / "gone")}
    config.write_text(tomli_w.dumps(content))
    card = (hugging_face.export(run, tmp_path / "out") / "README.md").read_text()
    assert ", owner/books local/folder, unknown, since gone was not there at the export |" in card
    assert yaml.safe_load(card.split("---\n")[1])["datasets"] == ["owner/books"]


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("/home/me/data", "data"), ("/home/Ann Lee/my data", "my data"), ("file:///home/me/x", "x"), ("~/data x", "data x"), ("~me/data", "data"), ("../me/data", "data"), ("./data", "data"),
        ("a=/home/me/x /srv/me/y", "a=x y"), ("name:/home/me/x", "name:x"), ("owner/name", "owner/name"),
        ("outputs/debug", "outputs/debug"), ("hf://datasets/a/b", "hf://datasets/a/b"), ("https://a.b/c", "https://a.b/c"),
        ("8/3 dim", "8/3 dim"), ("~8 tokens, as https://a.b/c", "~8 tokens, as https://a.b/c"), ({"/home/me/x": ["/home/me/y", 1.5, None]}, {"x": ["y", 1.5, None]}),
        ({"/a/me/x": 0.7, "/b/me/x": 0.2, "/c/x": 0.1}, {"x": 0.7, "x (2)": 0.2, "x (3)": 0.1}),
    ],
)  # fmt: skip
def test_only_the_last_part_of_a_local_path_stays(text, shown):
    assert without_folders(text) == shown


def test_an_export_does_not_say_where_it_was_made(run, tmp_path):
    """No file names the folder of the run, of its data or of their tokenizer."""
    config = tmp_path / "run" / "config.toml"
    assert str(tmp_path.parent.parent) in config.read_text()
    out = hugging_face.export(run, tmp_path / "out")
    assert [file.name for file in out.iterdir() if str(tmp_path.parent.parent).encode() in file.read_bytes()] == []


def test_a_card_shows_markup_of_others_as_text(tmp_path, data_folder):
    blocks = ("*feed_forward.w[<img src=x>1]",)
    run = make_run(tmp_path / "run", data_folder, PCConfig(level=4, blocks=blocks)).checkpoint
    hostile = "\n# Official\n<img src=x onerror=1>\n[free](http://a.b) `x` | y\n```\n---"
    folder = shutil.copytree(data_folder, tmp_path / "data")
    manifest = json.loads((folder / "manifest.json").read_text())
    manifest["source"]["input"] = manifest["tokenizer"]["name"] = hostile
    (folder / "manifest.json").write_text(json.dumps(manifest))
    config = tmp_path / "run" / "config.toml"
    content = tomllib.loads(config.read_text())
    content["data"] = {"path": str(folder)}
    content["optimizer"] = {"name": hostile}
    content["checkpoint"] = {"initial_load_path": hostile}
    config.write_text(tomli_w.dumps(content))
    (tmp_path / "run" / "environment.json").write_text(json.dumps({"commit": hostile}))
    lines = [{"step": 7, "tokens": 7000, "loss": hostile}]
    (tmp_path / "run" / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    card = (hugging_face.export(run, tmp_path / "out") / "README.md").read_text()
    before, code, after = card.partition("\n```toml\n")
    assert "Official" in before and "Official" in code + after
    assert "\n# Official" not in card and card.count("\n---") == 1
    assert "\\<img" in before and not re.search(r"(?<!\\)(<img|\[free\]|`x`)", before)
    assert card.endswith("```\n") and after.count("\n```\n") == 1
    assert all(line.count(" | ") == 1 for line in before.splitlines() if line.startswith("| "))
