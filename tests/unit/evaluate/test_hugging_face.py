"""Export: the same function as the trainer's model, in a self-contained folder."""

import json
import resource
import shutil
import signal
import subprocess
import sys
from contextlib import nullcontext
from unittest.mock import Mock

import pytest
import torch
from safetensors.torch import load_file, save_file
from torchtitan.models.llama3.model.state_dict_adapter import Llama3StateDictAdapter
from transformers import AutoTokenizer, GenerationConfig, LlamaConfig

from helpers.made_runs import make_run
from helpers.tiny import ROOT, model_args
from pc import PCConfig, UserError
from pc_recipe.checkpoints import hf_folder
from pc_recipe.evaluate import hugging_face
from pc_recipe.evaluate.generate import continue_text

# Both models sum the same float32 products in different orders (attention heads are permuted for the two RoPE
# layouts), through up to 8 layers. Measured in roundings of the largest logit, each is within 4 of a float64
# evaluation; 32 leaves room for other kernels. Unpermuted heads are off by 10^5 times as much.
ROUNDINGS = 32

TWO_LEVELS = PCConfig(level={"o": 2, "ffn": 4}, learnable_gamma=False, norm_recovery=False)


@pytest.fixture
def tokens():
    return torch.randint(0, 32_000, (2, 192), generator=torch.Generator().manual_seed(0))


@torch.no_grad()
def distance_in_roundings(run, tokens):
    """Largest difference between the logits of the trainer's model and those of its checkpoint."""
    llama, _ = hugging_face.load(run.checkpoint)
    ours, theirs = run.model(tokens), llama(tokens).logits
    return ((ours - theirs).abs().max() / (ours.abs().max() * torch.finfo(torch.float32).eps)).item()


@pytest.mark.parametrize(
    ("flavor", "config"),
    [
        ("debug", None), ("debug", TWO_LEVELS),
        *(pytest.param("60M", config, marks=pytest.mark.soak) for config in (None, PCConfig())),
    ],
)  # fmt: skip
def test_logits_equal_the_trainers(tmp_path, data_folder, tokens, flavor, config):
    run = make_run(tmp_path / "run", data_folder, config, flavor)
    assert distance_in_roundings(run, tokens) < ROUNDINGS


def test_an_unpermuted_head_or_raw_weights_would_be_seen(pc_run, pc_export, tokens, monkeypatch):
    assert distance_in_roundings(pc_run, tokens) < ROUNDINGS
    with torch.no_grad():
        exported, in_memory = (hugging_face.load(path)[0](tokens).logits for path in (pc_export, pc_run.checkpoint))
    assert torch.equal(exported, in_memory)
    with monkeypatch.context() as changed:
        changed.setattr(Llama3StateDictAdapter, "_permute", lambda self, weight, *_: weight)
        assert distance_in_roundings(pc_run, tokens) > 1000 * ROUNDINGS
    load = hugging_face.plain_weights.load

    def load_raw(path):
        run = load(path)
        key = "layers.0.attention.wo.weight_orig"
        raw = hugging_face.plain_weights.CheckpointFolder(path).read_tensors([key])
        run.weights["layers.0.attention.wo.weight"] = raw[key]
        return run

    monkeypatch.setattr(hugging_face.plain_weights, "load", load_raw)
    assert distance_in_roundings(pc_run, tokens) > 1000 * ROUNDINGS


def test_a_model_may_have_more_rows_than_its_tokenizer_has_entries(tmp_path, data_folder):
    """Rows padded to a round number are kept."""
    run = make_run(tmp_path / "more", data_folder, None, vocab_size=32_064)
    llama, tokenizer = hugging_face.load(run.checkpoint)
    assert (llama.config.vocab_size, len(tokenizer)) == (32_064, 32_000)
    run = make_run(tmp_path / "fewer", data_folder, None, vocab_size=31_000)
    with pytest.raises(UserError, match="the model has 31000 tokens, its tokenizer 32000"):
        hugging_face.load(run.checkpoint)


def test_data_that_moved_away(tmp_path):
    run = make_run(tmp_path / "run", tmp_path / "nowhere", None)
    with pytest.raises(UserError, match=r"nowhere.*restore it, or export .* scripts/export_hf\.py --tokenizer"):
        hugging_face.load(run.checkpoint)
    out = hugging_face.export(run.checkpoint, tmp_path / "out", dtype="bfloat16", tokenizer="mistral-common")
    llama, tokenizer = hugging_face.load(out)
    assert tokenizer.pad_token == tokenizer.eos_token
    assert llama.generation_config.pad_token_id == tokenizer.eos_token_id
    assert llama.model.embed_tokens.padding_idx is None  # else the end of a text would have no gradient
    assert tokenizer.model_max_length == llama.config.max_position_embeddings == 256  # training.seq_len
    assert len(tokenizer) == 32_000 and {parameter.dtype for parameter in llama.parameters()} == {torch.bfloat16}
    assert torch.equal(llama.lm_head.weight, run.model.output.weight.bfloat16())


@pytest.mark.parametrize("exists", [True, False])
def test_an_export_to_a_link_is_written_where_it_leads(tmp_path, pc_run, exists):
    link, target = tmp_path / "link", tmp_path / "big_disk" / "export"
    if exists:
        target.mkdir(parents=True)
    link.symlink_to(target)
    hugging_face.export(pc_run.checkpoint, link)
    assert link.is_symlink() and (target / "config.json").is_file()


def test_an_export_is_written_whole_or_not_at_all(tmp_path, pc_run, monkeypatch):
    (tmp_path / "thesis.txt").write_text("dear to me")
    with pytest.raises(UserError, match="exists already"):
        hugging_face.export(pc_run.checkpoint, tmp_path)

    def crash(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(hugging_face.Tokenizer, "save", crash)
    with pytest.raises(KeyboardInterrupt):
        hugging_face.export(pc_run.checkpoint, tmp_path / "new" / "out")
    assert list((tmp_path / "new").iterdir()) == []


EXPORT = """
import sys
from pc_recipe.evaluate import hugging_face
def stop(*_):
    print("writing", flush=True)
    sys.stdin.read()
hugging_face.Tokenizer.save = stop
sys.path[:0] = ["scripts"]
import export_hf
export_hf.main()
"""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_a_killed_export_leaves_nothing_for_long(tmp_path, pc_run, number):
    words = [sys.executable, "-c", EXPORT, str(pc_run.checkpoint), str(tmp_path / "out")]
    with subprocess.Popen(words, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout.readline() == b"writing\n"
        with pytest.raises(UserError, match="out: another process is exporting to it"):
            hugging_face.export(pc_run.checkpoint, tmp_path / "out")
        process.send_signal(number)
    assert process.returncode == (128 + number if number == signal.SIGTERM else -number)
    assert len([*tmp_path.iterdir()]) == (number == signal.SIGKILL)
    hugging_face.export(pc_run.checkpoint, tmp_path / "out")
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


@pytest.mark.parametrize("file, most", [("config.json", 100), ("model.safetensors", 9999), ("tokenizer.json", 9999)])
def test_a_full_disk_is_a_one_line_error(tmp_path, pc_run, command, monkeypatch, file, most):
    if file == "tokenizer.json":  # without the longer model file
        monkeypatch.setattr(hugging_face.LlamaForCausalLM, "save_pretrained", lambda *_: None)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (most, hard))
    try:
        status, _, said = command("export_hf.py", pc_run.checkpoint, tmp_path / "out")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    last = said.splitlines()[-1]  # below the progress bar
    assert last.startswith(f"failed: could not write {tmp_path}/out: ") and "File too large" in last
    assert status == 1 and "Traceback" not in said and list(tmp_path.iterdir()) == []


def tampered(pc_export, folder, change_tensors=lambda tensors: None, **config):
    """A copy of the export with changed tensors and settings."""
    shutil.copytree(pc_export, folder)
    tensors = load_file(folder / "model.safetensors")
    change_tensors(tensors)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    settings = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(settings | config))
    return folder


UP = "model.layers.{}.mlp.up_proj.weight"


@pytest.mark.parametrize(
    ("change", "loading", "starting"),
    [
        (lambda t: t.pop(UP.format(2)), r"up_proj\.weight is missing", r"up_proj\.weight is missing"),
        (lambda t: t.update({UP.format(4): torch.zeros(2)}), "4.* is unexpected", "4.* does not belong"),
        (
            lambda t: t.update({"model.norm.weight": torch.zeros(3)}),
            r"norm\.weight'.*\[3\].*\[256\].* is mismatched",
            r"norm\.weight has shape \[3\], the model \[256\]",
        ),
    ],
)
def test_wrong_tensors_are_refused(tmp_path, pc_export, change, loading, starting):
    """transformers, or TorchTitan at the start of a run, would silently fill, drop or cut them."""
    folder = tampered(pc_export, tmp_path / "bad", change)
    with pytest.raises(UserError, match=loading):
        hugging_face.load(folder)
    with pytest.raises(UserError, match=starting):
        hf_folder.require_initial_load(folder, model_args("debug", max_seq_len=256))


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({}, ""),
        ({"rope_parameters": {"rope_type": "default", "rope_theta": 5e5}}, "rope_parameters"),
        ({"tie_word_embeddings": True}, "tie_word_embeddings True, the run's model False"),
        ({"hidden_size": 512}, "hidden_size 512, the run's model 256"),
        ({"model_type": "qwen3"}, "model_type 'qwen3'"),
    ],
)
def test_a_start_needs_a_folder_of_the_same_architecture(tmp_path, pc_export, config, message):
    folder, args = tampered(pc_export, tmp_path / "folder", **config), model_args("debug", max_seq_len=256)
    if not message:
        return hf_folder.require_initial_load(folder, args)
    with pytest.raises(UserError, match=message):
        hf_folder.require_initial_load(folder, args)


def test_a_config_has_the_base_where_each_version_of_transformers_looks(tmp_path):
    """Readers of transformers 4's key, also mlx-lm, take 10,000 without it; transformers 5 moved it."""
    args = model_args("debug", max_seq_len=256, rope_theta=500_000)
    hf_folder.to_llama_config(args, 704).save_pretrained(tmp_path)
    settings = json.loads((tmp_path / "config.json").read_text())
    assert settings["rope_theta"] == settings["rope_parameters"]["rope_theta"] == 500_000
    assert LlamaConfig.from_pretrained(tmp_path).rope_parameters == settings["rope_parameters"]


def test_a_python_file_in_a_folder_is_not_executed(tmp_path, pc_export):
    code = {"AutoConfig": "mine.C", "AutoModelForCausalLM": "mine.M"}
    folder = tampered(pc_export, tmp_path / "code", model_type="mine", auto_map=code)
    (folder / "mine.py").write_text(f"open({str(tmp_path / 'executed')!r}, 'w')\n")
    with pytest.raises(UserError):
        hugging_face.load(folder)
    assert not (tmp_path / "executed").exists()


@pytest.mark.parametrize("nested", [False, True])
@pytest.mark.parametrize(
    "name",
    [
        "num_labels", "n_positions", "num_hidden_layers", "hidden_size", "intermediate_size", "vocab_size",
        "num_attention_heads", "num_key_value_heads", "head_dim",
    ],
)  # fmt: skip
def test_a_number_may_not_exceed_the_weights(tmp_path, pc_export, name, nested):
    tensors = hf_folder.find_tensors(pc_export)
    most = len(tensors) if "layer" in name else 32_000
    for beyond in (0, 1):
        number = {name: most + beyond}
        (tmp_path / "config.json").write_text(json.dumps({"text_config": number} if nested else number))
        wrong = pytest.raises(UserError, match=f"has {name} = {most + 1}, but its weights allow at most {most}")
        with wrong if beyond else nullcontext():
            hf_folder.read_settings(tmp_path, tensors)


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ({"num_labels": 32_001}, "weights allow at most"),  # nothing else would complain
        ({"hidden_size": "wide"}, "hidden_size"), ({"num_hidden_layers": -1}, "folder"),
        ({"rope_parameters": {"rope_type": "mine", "rope_theta": 1}}, "folder"),
    ],
)  # fmt: skip
def test_a_config_of_impossible_sizes_is_refused(tmp_path, pc_export, sizes, message):
    folder, args = tampered(pc_export, tmp_path / "folder", **sizes), model_args("debug", max_seq_len=256)
    for use in (hugging_face.load, lambda given: hf_folder.require_initial_load(given, args)):
        with pytest.raises(UserError, match=message) as raised:
            use(folder)
        assert str(raised.value).count("\n") == 0


def test_a_failure_of_the_tokenizers_library_is_a_one_line_error(pc_export, monkeypatch):
    error = type(
        "PanicException", (BaseException,), {}
    )  # of the name and base by which one in Rust code reaches Python
    monkeypatch.setattr(hugging_face.AutoTokenizer, "from_pretrained", Mock(side_effect=error("made by the test")))
    with pytest.raises(UserError, match=r"its library fails \(made by the test\)\)$"):
        hugging_face.load(pc_export)


@pytest.mark.parametrize("content", ["", "[]", "{", "null", "[" * 10_000])
def test_what_is_not_a_config_is_refused(tmp_path, pc_export, content):
    folder, args = tampered(pc_export, tmp_path / "folder"), model_args("debug", max_seq_len=256)
    (folder / "config.json").write_text(content)
    for use in (hugging_face.load, lambda given: hf_folder.require_initial_load(given, args)):
        with pytest.raises(UserError):
            use(folder)


def test_sampling_settings_of_a_folder_are_not_used(tmp_path, pc_export):
    folder = tampered(pc_export, tmp_path / "folder", attn_implementation="eager")
    settings = json.loads((folder / "generation_config.json").read_text())
    more = {"num_beams": 4, "num_return_sequences": 2, "max_new_tokens": 7, "prompt_lookup_num_tokens": 9}
    (folder / "generation_config.json").write_text(json.dumps(settings | more))
    model, _ = hugging_face.load(folder)
    assert {key: getattr(model.generation_config, key) for key in more} == {
        key: getattr(GenerationConfig(), key) for key in more
    }
    assert model.generation_config.eos_token_id == settings["eos_token_id"]
    assert model.config._attn_implementation == "sdpa"


def test_text_that_spells_an_entry_is_text_to_a_run_and_its_export(tmp_path, pc_run, pc_export):
    """To other programs it is the entry, as in any other folder."""
    (ids, exported), others = (
        [hugging_face.load(path)[1].encode("A</s>") for path in (pc_run.checkpoint, pc_export)],
        AutoTokenizer.from_pretrained(pc_export).encode("A</s>"),
    )
    assert ids == exported and 2 not in ids and others[-1] == 2
    folder = tampered(pc_export, tmp_path / "foreign", tokenizer=None)
    assert hugging_face.load(folder)[1].encode("A</s>") == others


def test_an_empty_prompt_begins_a_document(plain_run):
    """Also if the tokenizer puts nothing before a text."""
    model, tokenizer = hugging_face.load(plain_run.checkpoint)
    ids = model.generate(torch.tensor([[tokenizer.eos_token_id]]), max_new_tokens=4, max_length=None, do_sample=False)
    tokenizer.add_bos_token = False
    assert tokenizer.encode("") == []
    assert continue_text(model, tokenizer, "", 4, temperature=0) == tokenizer.decode(ids[0], skip_special_tokens=True)


def test_text_is_drawn_from_all_tokens(plain_run):
    """transformers' own default is the 50 likeliest tokens; here all 32,000 are nearly equally likely."""
    model, tokenizer = hugging_face.load(plain_run.checkpoint)
    model.lm_head.weight.data.mul_(1e-4)
    drawn = {continue_text(model, tokenizer, "a", 1, temperature=1.0, top_p=1.0, seed=seed) for seed in range(80)}
    assert len(drawn) > 70
