"""A folder of weights is read as transformers reads it, or refused in a line that names the tensor or the file."""

import json
import shutil
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file, save_file
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader
from transformers import AutoModelForCausalLM

from helpers.small_tokenizers import SIZE, make_llama, make_tokenizer
from pc.errors import UserError
from pc_recipe.checkpoints import hf_folder
from pc_recipe.evaluate import hugging_face
from pc_recipe.train.llama2 import Llama2Args

NORM, FREQUENCIES = "model.norm.weight", "model.layers.{}.self_attn.rotary_emb.inv_freq"


@pytest.fixture(scope="module")
def saved(tmp_path_factory) -> dict[str, Path]:
    """One model in a single file and in five, and an older one in a single file and in five."""
    folder = tmp_path_factory.mktemp("saved")
    for name, seed, size in (("one", 0, "1GB"), ("five", 0, "40KB"), ("old", 1, "1GB"), ("old-five", 1, "40KB")):
        make_llama(folder / name, seed, max_shard_size=size)
        make_tokenizer(folder / name)
    return {path.name: path for path in folder.iterdir()}


def start(folder: Path) -> None:
    args = dict(dim=32, n_layers=2, n_heads=4, n_kv_heads=2, vocab_size=SIZE, max_seq_len=64)
    hf_folder.require_initial_load(folder, Llama2Args(**args, multiple_of=96, ffn_dim_multiplier=0.5 / 32))


def change(file: Path, **tensors: torch.Tensor) -> None:
    save_file(load_file(file) | tensors, file, metadata={"format": "pt"})


def add_frequencies(folder: Path, base: float = 10_000, dtype=torch.float32) -> None:
    frequencies = 1 / base ** (torch.arange(0, 8, 2).float() / 8)
    change(folder / "model.safetensors", **{FREQUENCIES.format(i): frequencies.to(dtype).clone() for i in range(2)})


def shards(folder: Path) -> list[Path]:
    return sorted(folder.glob("model-*.safetensors"))


TAKEN = {
    "one file": ("one", lambda folder: None),
    "five files": ("five", lambda folder: None),
    "Llama 2's frequencies": ("one", add_frequencies),
    "in half precision": ("one", lambda folder: add_frequencies(folder, dtype=torch.float16)),
    "in bfloat16": ("one", lambda folder: add_frequencies(folder, dtype=torch.bfloat16)),
    "another index's file": (
        "one", lambda folder: (folder / "model.safetensors.index.json").write_text('{"weight_map": {"x": "gone"}}'),
    ),
    "its first publisher's names": (
        "five", lambda folder: save_file({"layers.0.attention.wq.weight": torch.ones(2)}, folder / "consolidated.safetensors"),
    ),
    "a pickle beside it": ("five", lambda folder: torch.save({}, folder / "pytorch_model.bin")),
}  # fmt: skip


@pytest.mark.parametrize("what", TAKEN)
def test_a_folder_of_one_model_is_read(what, saved, tmp_path):
    folder = shutil.copytree(saved[TAKEN[what][0]], tmp_path / "hf")
    TAKEN[what][1](folder)
    start(folder)
    theirs = AutoModelForCausalLM.from_pretrained(saved["one"])
    ours, _ = hugging_face.load(folder)
    tokens = torch.arange(40)[None]
    with torch.no_grad():
        assert torch.equal(ours(tokens).logits, theirs(tokens).logits)
    expected = theirs.state_dict()
    read = {name: torch.empty_like(tensor) for name, tensor in expected.items()}
    dcp.load(read, storage_reader=HuggingFaceStorageReader(str(folder)), no_dist=True)  # as the trainer does
    assert all(torch.equal(tensor, expected[name]) for name, tensor in read.items())


def copy(*files: Path, to: Path) -> None:
    for file in files:
        shutil.copy(file, to / file.name)


BOTH = r"hf: tensor {} is in {} and in {}: remove the wrong file$"
REFUSED = {
    "an older save in five files": (
        "one", lambda f, old: copy(*shards(old["old-five"]), to=f),
        BOTH.format(r"\S+", r"model\.safetensors", r"model-00001-of-0000\d\.safetensors"),
    ),
    "an older save in one file": (
        "one", lambda f, old: shutil.copy(old["old"] / "model.safetensors", f / "model.fp16.safetensors"),
        BOTH.format(r"\S+", r"model\.safetensors", r"model\.fp16\.safetensors"),
    ),
    "a stray single file": (
        "five", lambda f, old: copy(old["old"] / "model.safetensors", to=f),
        BOTH.format(r"\S+", r"model\.safetensors", r"model-00001-of-0000\d\.safetensors"),
    ),
    "another number of files": (
        "five", lambda f, old: shutil.copy(shards(old["old-five"])[0], f / "model-00001-of-00003.safetensors"),
        BOTH.format(r"\S+", r"model-00001-of-0000\d\.safetensors", r"model-00001-of-00003\.safetensors"),
    ),
    "a file copied by a browser": (
        "five", lambda f, old: shutil.copy(shards(f)[1], f / "model-00002-of-00005 (1).safetensors"),
        BOTH.format(r"\S+", r"model-00002-of-0000\d\.safetensors", r"model-00002-of-00005 \(1\)\.safetensors"),
    ),
    "a tensor in two files of the index": (
        "five", lambda f, old: change(shards(f)[0], **{NORM: torch.ones(32)}),
        BOTH.format(r"model\.norm\.weight", r"\S+", r"\S+"),
    ),
    "a file of the index is gone": ("five", lambda f, old: shards(f)[2].unlink(), r"hf: .*model-00003-of-0000\d\.safetensors"),
    "no weights": ("one", lambda f, old: (f / "model.safetensors").unlink(), r"hf: .*model\.safetensors"),
    "half a file": (
        "one", lambda f, old: (f / "model.safetensors").write_bytes((f / "model.safetensors").read_bytes()[:5000]), "hf: ",
    ),
    "an index of something else": ("five", lambda f, old: (f / "model.safetensors.index.json").write_text("[]"), "hf: "),
    "an index that names a file elsewhere": (
        "five", lambda f, old: (f / "model.safetensors.index.json").write_text(
            json.dumps({"weight_map": {NORM: str(old["one"] / "model.safetensors")}})
        ), "hf names '/.*', which is a file outside of it$",
    ),
    "a link to weights elsewhere": (
        "one", lambda f, old: (
            (f / "model.safetensors").unlink(), (f / "model.safetensors").symlink_to(old["one"] / "model.safetensors"),
        ), "hf/model.safetensors is a link that leads out of .*/hf; move it away$",
    ),
    "an adapter": (
        "one", lambda f, old: (f / "adapter_config.json").write_text(json.dumps({"base_model_name_or_path": "/"})),
        "hf: it has an adapter, adapter_config.json: `merge_and_unload` it",
    ),
    "only a pickle": (
        "one", lambda f, old: (torch.save({}, f / "pytorch_model.bin"), (f / "model.safetensors").unlink()),
        r"hf/pytorch_model\.bin is not a safetensors file: load it with transformers and `save_pretrained` it$",
    ),
}  # fmt: skip


@pytest.mark.parametrize("what", REFUSED)
def test_a_folder_that_is_not_one_model_is_refused_by_name(what, saved, tmp_path):
    make, spoil, message = REFUSED[what]
    folder = shutil.copytree(saved[make], tmp_path / "hf")
    spoil(folder, saved)
    for use in (start, hugging_face.load):
        with pytest.raises(UserError, match=message) as raised:
            use(folder)
        assert "\n" not in str(raised.value)


def test_frequencies_of_another_base_are_refused(saved, tmp_path):
    folder = shutil.copytree(saved["one"], tmp_path / "hf")
    add_frequencies(folder, base=500_000)
    with pytest.raises(UserError, match="rotary_emb.inv_freq is not what the run's model has, rope_theta 10000"):
        start(folder)
