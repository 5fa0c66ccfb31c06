"""Weights belong to a tokenizer: a start, an export and a score refuse another one and name both."""

import json
import shutil
from pathlib import Path

import pytest
import torch.distributed.checkpoint as dcp
from tokenizers import Tokenizer
from transformers import AutoTokenizer, LlamaForCausalLM

from helpers.format_1 import make_format_1
from helpers.made_runs import make_run
from helpers.small_tokenizers import SIZE, make_llama, make_tokenizer
from pc.errors import UserError
from pc_recipe.checkpoints import run_tokenizer
from pc_recipe.checkpoints.fingerprint import fingerprint
from pc_recipe.checkpoints.folder import CheckpointFolder
from pc_recipe.checkpoints.run_tokenizer import require_for_start
from pc_recipe.config.model_sizes import Model
from pc_recipe.config.pc_section import PC
from pc_recipe.data.manifest import Manifest
from pc_recipe.data.tokenizers import _mistral_model
from pc_recipe.data.tokenizing import tokenize
from pc_recipe.evaluate import hugging_face

OTHER = r"belongs to tokenizer '.*one' \([0-9a-f]{12}\), .* tokenizer '.*two' \([0-9a-f]{12}\)$"


@pytest.fixture(scope="module")
def data(tmp_path_factory) -> dict[str, Manifest]:
    """The same text, tokenised by two tokenizers with equally many entries."""
    folder = tmp_path_factory.mktemp("data")
    (folder / "in.txt").write_text("The river carries water to the sea. " * 100)
    made = {name: make_tokenizer(folder / name, reverse=name == "two") for name in ("one", "two")}
    return {
        name: tokenize(str(folder / "in.txt"), folder / f"by-{name}", tokenizer=str(path), validation_fraction=0)
        for name, path in made.items()
    }


@pytest.fixture
def run(data, tmp_path):
    """The checkpoint of a run on the first, as the trainer leaves it."""
    return as_trained(tmp_path / "run", data["one"])


def as_trained(folder: Path, manifest: Manifest, *, names: bool = True) -> Path:
    """Make a run; returns its checkpoint. names: with the tokenizer, as this version writes it."""
    checkpoint = make_run(folder, manifest.folder, None, "tiny", vocab_size=SIZE).checkpoint
    environment = {"world_size": 1, "commit": None, "data": {"content of data.path": manifest.identity}}
    (folder / "environment.json").write_text(json.dumps(environment))
    if names:
        tensors = CheckpointFolder(checkpoint)
        saved = tensors.read_tensors([key for key, shape in tensors.shapes().items() if shape is not None])
        shutil.rmtree(checkpoint)
        state = {"method": fingerprint(PC(), Model(flavor="tiny"), run_tokenizer.describe(manifest))}
        dcp.save(saved | state, checkpoint_id=checkpoint, no_dist=True)
        run_tokenizer.keep(folder, manifest)
    return checkpoint


def replace(data: dict[str, Manifest], where: Path) -> Manifest:
    """Overwrite the data folder with that of the other tokenizer."""
    shutil.copytree(data["two"].folder, where, dirs_exist_ok=True)
    return Manifest.read(where)


def test_a_run_keeps_its_tokenizer_whatever_becomes_of_its_data(run, data, tmp_path):
    folder = shutil.copytree(data["one"].folder, tmp_path / "data")
    for place in (data["one"].folder, folder):
        config = (run.parents[1] / "config.toml").read_text().replace(str(data["one"].folder), str(place))
        (run.parents[1] / "config.toml").write_text(config)
    replace(data, folder)
    names = run_tokenizer.describe(data["one"]) | {"name": "one"}  # without its folder
    out = hugging_face.export(run, tmp_path / "out")
    assert (out / "tokenizer.json").read_bytes() == (data["one"].folder / "tokenizer/tokenizer.json").read_bytes()
    assert json.loads((out / "config.json").read_text())["tokenizer"] == names
    card = (out / "README.md").read_text()
    assert f"| tokenizer | {names['name']}, sha256 {names['sha256']} |" in card and "| data | unknown" in card
    text = "The river"
    for loaded in (run, out):
        _, tokenizer = hugging_face.load(loaded)
        assert tokenizer.encode(text) == [256, *data["one"].load_tokenizer().encode(text)]


def test_another_tokenizer_is_refused_at_an_export(run, data, tmp_path):
    with pytest.raises(UserError, match=f"step-7 {OTHER}"):
        hugging_face.export(run, tmp_path / "out", tokenizer=data["two"].tokenizer.name)
    hugging_face.export(run, tmp_path / "out", tokenizer=data["one"].tokenizer.name)
    data["two"].load_tokenizer().save(run.parents[1] / "tokenizer")
    with pytest.raises(UserError, match="belongs to tokenizer '.*one' .*, .*run/tokenizer is tokenizer "):
        hugging_face.load(run)


@pytest.mark.parametrize("names", [True, False], ids=["of this version", "of an older one"])
def test_a_run_that_kept_no_tokenizer_takes_that_of_its_data_if_they_are_the_same(names, data, tmp_path):
    manifest = Manifest.read(shutil.copytree(data["one"].folder, tmp_path / "data"))
    run = as_trained(tmp_path / "run", manifest, names=names)
    shutil.rmtree(tmp_path / "run" / "tokenizer", ignore_errors=True)
    hugging_face.export(run, tmp_path / "out")
    replace(data, tmp_path / "data")
    with pytest.raises(UserError, match="data: has other data than those that .*run was trained on; restore it"):
        hugging_face.export(run, tmp_path / "other")
    hugging_face.export(run, tmp_path / "other", tokenizer=manifest.tokenizer.name)


def test_a_start_from_weights_of_another_tokenizer_is_refused(run, data, tmp_path):
    export = hugging_face.export(run, tmp_path / "out")
    for start in (CheckpointFolder(run), export):
        require_for_start(start, data["one"])
        with pytest.raises(UserError, match=OTHER):
            require_for_start(start, data["two"])
    data["two"].load_tokenizer().save(export)  # the weights still belong to the first
    with pytest.raises(UserError, match=OTHER):
        require_for_start(export, data["two"])
    with pytest.raises(
        UserError,
        match=r"out: by .* config\.json it belongs to tokenizer '.*one' .*, its folder now has tokenizer '.*out'",
    ):
        hugging_face.load(export)


def test_an_export_that_transformers_saved_again_has_the_same_tokenizer(run, tmp_path):
    """As after fine-tuning. It writes the file on many lines, with the padding and truncation of the last call."""
    hugging_face.export(run, tmp_path / "out")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "out")
    tokenizer(["a", "a text"], padding=True, truncation=True, max_length=16)
    LlamaForCausalLM.from_pretrained(tmp_path / "out").save_pretrained(tmp_path / "tuned")
    tokenizer.save_pretrained(tmp_path / "tuned")
    files = [(tmp_path / name / "tokenizer.json").read_bytes() for name in ("out", "tuned")]
    assert files[0] != files[1]  # control
    _, again = hugging_face.load(tmp_path / "tuned")
    assert again.encode("The river</s>") == hugging_face.load(run)[1].encode("The river</s>")


def test_a_start_from_a_folder_of_another_origin(data, tmp_path):
    make_llama(tmp_path / "llama")
    with pytest.raises(UserError, match="its tokenizer is not known .*initial_load_tokenizer_is_the_same = true$"):
        require_for_start(tmp_path / "llama", data["one"])
    make_tokenizer(tmp_path / "llama")
    # the same ids, written in another way
    model = Tokenizer.from_file(str(tmp_path / "llama" / "tokenizer.json"))
    model.save(str(tmp_path / "llama" / "tokenizer.json"), pretty=False)
    state = json.loads((tmp_path / "llama" / "tokenizer.json").read_text())
    state["model"]["fuse_unk"] = True
    (tmp_path / "llama" / "tokenizer.json").write_text(json.dumps(state))
    require_for_start(tmp_path / "llama", data["one"])
    with pytest.raises(
        UserError, match=r"llama belongs to tokenizer '.*llama' .*, .*by-two was made with tokenizer '.*two'"
    ):
        require_for_start(tmp_path / "llama", data["two"])


def test_weights_of_an_older_version_belong_to_the_tokenizer_of_their_data(data, tmp_path):
    files = {file.name: file.read_bytes() for file in Path(data["one"].tokenizer.name).iterdir()}
    folder = make_format_1(shutil.copytree(data["one"].folder, tmp_path / "data"), files, "huggingface")
    run = CheckpointFolder(as_trained(tmp_path / "run", Manifest.read(folder), names=False))
    for same in (Manifest.read(folder), data["one"]):
        require_for_start(run, same)
    with pytest.raises(UserError, match=OTHER):
        require_for_start(run, data["two"])
    shutil.rmtree(folder)
    with pytest.raises(UserError, match="its tokenizer is not known .*initial_load_tokenizer_is_the_same = true$"):
        require_for_start(run, data["one"])


def test_a_run_on_data_with_a_damaged_tokenizer_says_what_an_export_will_miss(data, tmp_path, caplog):
    folder = shutil.copytree(data["one"].folder, tmp_path / "data")
    shutil.copy(data["two"].folder / "tokenizer" / "tokenizer.json", folder / "tokenizer")
    run_tokenizer.keep(tmp_path / "run", Manifest.read(folder))
    assert "is not the one that made the shards; no tokenizer is written to" in caplog.text
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("config", ["[]", "{", "[" * 100_000, '{"tokenizer": "mine"}', '{"tokenizer": {"name": "x"}}'])
def test_a_config_that_names_no_tokenizer_is_ignored(config, data, tmp_path):
    """The folder's own tokenizer counts."""
    make_tokenizer(tmp_path / "llama")
    (tmp_path / "llama" / "config.json").write_text(config)
    require_for_start(tmp_path / "llama", data["one"])
    with pytest.raises(UserError, match="llama belongs to tokenizer"):
        require_for_start(tmp_path / "llama", data["two"])


def test_weights_with_both_forms_of_a_tokenizer_belong_to_either(tmp_path):
    """As in Llama 2's folders, whose two forms differ in runs of spaces."""
    (tmp_path / "in.txt").write_text("The river.")
    folder = make_tokenizer(tmp_path / "llama")
    shutil.copy(_mistral_model(), folder / "tokenizer.model")
    manifest = tokenize(str(tmp_path / "in.txt"), tmp_path / "data", validation_fraction=0)
    require_for_start(folder, manifest)
    (folder / "tokenizer.model").unlink()
    with pytest.raises(UserError, match="llama belongs to tokenizer"):
        require_for_start(folder, manifest)
