"""Export: the same function as the trainer's model, in a self-contained folder."""

import json
import subprocess
import sys
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file, save_file
from torchtitan.models.llama3.model.state_dict_adapter import Llama3StateDictAdapter

from helpers.made_runs import make_run
from pc import PCConfig, UserError
from pc.evaluate import hugging_face, plain_weights
from pc.titan.llama2 import FLAVORS

# Both models sum the same float32 products, in other orders (attention heads are permuted for the two RoPE
# layouts), through up to 8 layers. Each is within 4 roundings at the largest logit of a float64 evaluation
# (measured); 32 leaves room for other kernels. Unpermuted heads are off by 10^5 times as much.
ROUNDINGS = 32

STEP_2, STEP_4 = PCConfig(level=2, schedule="step"), PCConfig(level=4, schedule="step")
FORWARD_4 = PCConfig(level=4, blocks=("o", "gate"), schedule="forward")
NO_GAMMA = PCConfig(level={"o": 2, "ffn": 4}, learnable_gamma=False, norm_recovery=False, schedule="forward")


@torch.no_grad()
def logits_of(trainers, llama, tokens):
    return trainers(tokens), llama(tokens).logits


def distance_in_roundings(ours, theirs):
    return ((ours - theirs).abs().max() / (ours.abs().max() * torch.finfo(torch.float32).eps)).item()


@pytest.fixture
def tokens():
    return torch.randint(0, 32_000, (2, 192), generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize(
    ("flavor", "config"),
    [
        ("debug", None), ("debug", STEP_2), ("debug", STEP_4), ("debug", FORWARD_4), ("debug", NO_GAMMA),
        *(pytest.param("60M", config, marks=pytest.mark.soak) for config in (None, STEP_2, STEP_4)),
    ],
)  # fmt: skip
def test_logits_equal_the_trainers(tmp_path, data_folder, tokens, flavor, config):
    run = make_run(tmp_path / "run", data_folder, config, flavor)
    llama, _ = hugging_face.load(run.checkpoint)
    assert distance_in_roundings(*logits_of(run.model, llama, tokens)) < ROUNDINGS


def test_logits_of_the_folder_are_bitwise_those_in_memory(pc_run, pc_export, tokens):
    in_memory, _ = hugging_face.load(pc_run.checkpoint)
    from_disk, _ = hugging_face.load(pc_export)
    with torch.no_grad():
        assert torch.equal(in_memory(tokens).logits, from_disk(tokens).logits)


def test_control_an_unpermuted_head_is_seen(pc_run, tokens, monkeypatch):
    monkeypatch.setattr(Llama3StateDictAdapter, "_permute", lambda self, weight, *_: weight)
    llama, _ = hugging_face.load(pc_run.checkpoint)
    assert distance_in_roundings(*logits_of(pc_run.model, llama, tokens)) > 1000 * ROUNDINGS


def test_control_raw_weights_are_seen(tmp_path, data_folder, tokens):
    run = make_run(tmp_path / "run", data_folder, STEP_4)
    state = plain_weights.load(run.checkpoint)
    raw = plain_weights.CheckpointFolder(run.checkpoint).read_tensors(["pc.layers.0.attention.wo.raw"])
    state.weights["layers.0.attention.wo.weight"] = raw["pc.layers.0.attention.wo.raw"]
    llama = hugging_face.to_llama(state.weights, state.model_args)
    assert distance_in_roundings(*logits_of(run.model, llama, tokens)) > 1000 * ROUNDINGS


def test_folder_loads_with_transformers_alone(pc_export, tmp_path):
    program = (
        "import sys, torch; from transformers import AutoModelForCausalLM, AutoTokenizer;"
        f"m = AutoModelForCausalLM.from_pretrained({str(pc_export)!r});"
        f"t = AutoTokenizer.from_pretrained({str(pc_export)!r});"
        "assert not [n for n in sys.modules if n == 'pc' or n.startswith(('pc.', 'torchtitan'))];"
        "print(type(m).__name__, m.dtype, len(t), t.encode('Hello'), m.config.bos_token_id, m.config.eos_token_id)"
    )
    done = subprocess.run([sys.executable, "-c", program], cwd=tmp_path, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "LlamaForCausalLM torch.float32 32000 [1, 22557] 1 2"


def test_another_dtype(tmp_path, pc_run):
    out = hugging_face.export(pc_run.checkpoint, tmp_path / "out", dtype="bfloat16")
    llama, _ = hugging_face.load(out)
    assert {parameter.dtype for parameter in llama.parameters()} == {torch.bfloat16}
    assert torch.equal(llama.lm_head.weight, pc_run.model.output.weight.bfloat16())


def test_a_model_may_have_more_rows_than_its_tokenizer_has_entries(tmp_path, data_folder):
    """Rows padded to a round number are kept; a given tokenizer must still fit."""
    run = make_run(tmp_path / "more", data_folder, None, vocab_size=32_064)
    llama, tokenizer = hugging_face.load(run.checkpoint)
    assert (llama.config.vocab_size, len(tokenizer)) == (32_064, 32_000)
    with pytest.raises(UserError, match="32064 tokens, its tokenizer 32000"):
        hugging_face.load(run.checkpoint, tokenizer="mistral-common")
    run = make_run(tmp_path / "fewer", data_folder, None, vocab_size=31_000)
    with pytest.raises(UserError, match="the model has 31000 tokens, its tokenizer 32000"):
        hugging_face.export(run.checkpoint, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_data_that_moved_away(tmp_path, data_folder):
    run = make_run(tmp_path / "run", tmp_path / "nowhere", None)
    with pytest.raises(UserError, match=r"nowhere.*restore it, or export .* scripts/export_hf\.py --tokenizer"):
        hugging_face.load(run.checkpoint)
    assert len(hugging_face.load(run.checkpoint, tokenizer="mistral-common")[1]) == 32_000


def test_an_export_is_written_whole_or_not_at_all(tmp_path, pc_run, monkeypatch):
    (tmp_path / "thesis.txt").write_text("dear to me")
    with pytest.raises(UserError, match="exists already"):
        hugging_face.export(pc_run.checkpoint, tmp_path)

    def crash(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(hugging_face.hf_tokenizer, "save", crash)
    with pytest.raises(KeyboardInterrupt):
        hugging_face.export(pc_run.checkpoint, tmp_path / "new" / "out")
    assert list((tmp_path / "new").iterdir()) == []


def tampered(pc_export, folder, change_tensors=lambda tensors: None, change_config=lambda config: None):
    folder.mkdir()
    for path in pc_export.iterdir():
        (folder / path.name).write_bytes(path.read_bytes())
    tensors = load_file(folder / "model.safetensors")
    change_tensors(tensors)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    change_config(config)
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def drop(tensors):
    del tensors["model.layers.2.mlp.up_proj.weight"]


def add(tensors):
    tensors["model.layers.4.mlp.up_proj.weight"] = torch.zeros(2)


def reshape(tensors):
    tensors["model.norm.weight"] = torch.zeros(3)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (drop, r"tensor model\.layers\.2\.mlp\.up_proj\.weight is missing"),
        (add, r"tensor model\.layers\.4\.mlp\.up_proj\.weight is unexpected"),
        (reshape, r"tensor model\.norm\.weight has shape \[3\], the model of config\.json \[256\]"),
    ],
)
def test_folder_with_wrong_tensors_is_refused(tmp_path, pc_export, change, message):
    with pytest.raises(UserError, match=message):
        hugging_face.load(tampered(pc_export, tmp_path / "bad", change))


def test_folder_with_foreign_code_is_not_executed(tmp_path, pc_export):
    """A folder that requires its own Python file is refused, and the file does not run."""
    marker = tmp_path / "executed"

    def ask_for_code(config):
        config |= {
            "model_type": "mine",
            "auto_map": {"AutoConfig": "mine.C", "AutoModelForCausalLM": "mine.M"},
        }

    folder = tampered(pc_export, tmp_path / "bad", change_config=ask_for_code)
    (folder / "mine.py").write_text(f"open({str(marker)!r}, 'w')\n")
    with pytest.raises(UserError):
        hugging_face.load(folder)
    assert not marker.exists()


def test_pickled_weights_are_not_loaded(tmp_path, pc_export):
    folder = tampered(pc_export, tmp_path / "bad")
    torch.save(load_file(folder / "model.safetensors"), folder / "pytorch_model.bin")
    (folder / "model.safetensors").unlink()
    with pytest.raises(UserError, match="safetensors"):
        hugging_face.load(folder)


DEBUG = replace(FLAVORS["debug"], max_seq_len=256)


def set_theta(config):
    config["rope_parameters"]["rope_theta"] = 500_000.0


def tie(config):
    config["tie_word_embeddings"] = True


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"change_tensors": drop}, r"tensor model\.layers\.2\.mlp\.up_proj\.weight is missing"),
        ({"change_tensors": add}, r"tensor model\.layers\.4\.mlp\.up_proj\.weight does not belong"),
        ({"change_tensors": reshape}, r"tensor model\.norm\.weight has shape \[3\], the model \[256\]"),
        ({"change_config": set_theta}, "rope_parameters"),
        ({"change_config": tie}, "tie_word_embeddings True, the run's model False"),
        ({"change_config": lambda config: config.update(num_attention_heads=8)}, "num_attention_heads 8"),
        ({"change_config": lambda config: config.update(model_type="qwen3")}, "model_type 'qwen3'"),
    ],
)
def test_folder_that_cannot_start_a_run(tmp_path, pc_export, change, message):
    with pytest.raises(UserError, match=message):
        hugging_face.require_start_folder(tampered(pc_export, tmp_path / "bad", **change), DEBUG)


def test_folder_that_can_start_a_run(pc_export):
    hugging_face.require_start_folder(pc_export, DEBUG)
    with pytest.raises(UserError, match="hidden_size 256, the run's model 512"):
        hugging_face.require_start_folder(pc_export, FLAVORS["60M"])
