"""`pc.report`: what it reads, what it measures, what it shows."""

import json
import math
import os
import re
import stat

import pytest
import torch
import transformers as hf
from safetensors.torch import save_file
from torch import nn

import pc
from experiments.evidence import read_experiments, without_tuning_seeds
from experiments.numbers import studies
from helpers.tiny import ROOT
from pc import maps, polynomial
from pc.blocks import BLOCK_SUFFIXES
from pc.measure import exact_singular_values, gaussian_singular_values
from pc.report import page, words
from pc.report.read import of_tensors, read
from pc.spectral import modified_condition_number
from unit.pc.test_hugging_face_models import ROWS, SIZES

T5 = {"vocab_size": 50, "d_model": 16, "d_kv": 8, "d_ff": 24, "num_layers": 2, "num_heads": 2}
MODELS = ROWS | {"T5ForConditionalGeneration": (T5, {})}
USUAL = (
    "LlamaForCausalLM", "Qwen3ForCausalLM", "GPT2LMHeadModel", "GPTNeoXForCausalLM", "Phi3ForCausalLM", "BertForMaskedLM",
    "MixtralForCausalLM", "GptOssForCausalLM", "DeepseekV3ForCausalLM", "FalconForCausalLM, one group",
    "ViTForImageClassification", "T5ForConditionalGeneration",
)  # fmt: skip


def made(row, **settings):
    """A model of transformers at toy size, with larger weights than initial ones, so that no two matrices are alike."""
    model_class = getattr(hf, row.partition(",")[0])
    model = model_class(model_class.config_class(**MODELS[row][0], **settings))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_()
    return model


def measured(path, **settings):
    checkpoint = read(path, **settings)
    return pc.conditioning(checkpoint.model, checkpoint.load)


def conditions(found):
    """Sorted condition numbers of each block; not by name, because routers have other names in a file."""
    blocks = {block: matrices for block, matrices in found.by_block(True).items() if block in BLOCK_SUFFIXES}
    return {block: sorted(m.figures.condition for m in matrices) for block, matrices in blocks.items()}


@pytest.mark.parametrize(
    "row", [name if name in USUAL else pytest.param(name, marks=pytest.mark.soak) for name in MODELS]
)
def test_a_folder_of_transformers_has_the_matrices_of_its_model(tmp_path, row):
    model = made(row)
    model.save_pretrained(tmp_path)
    found, expected = conditions(measured(tmp_path)), conditions(pc.conditioning(model))
    assert {block: len(matrices) for block, matrices in found.items()} == MODELS[row][1]
    assert found.keys() == expected.keys()
    for block, values in expected.items():
        assert found[block] == pytest.approx(values, rel=1e-6)


def test_shards_pickles_and_plain_files_are_the_same_model(tmp_path):
    model = made("LlamaForCausalLM")
    expected = conditions(pc.conditioning(model))
    for size in ("1GB", "4KB"):
        model.save_pretrained(tmp_path / size, max_shard_size=size)
    assert len([*(tmp_path / "4KB").glob("*.safetensors")]) > 2
    torch.save({"model": model.state_dict()}, tmp_path / "new.pt")
    torch.save(model.state_dict(), tmp_path / "old.bin", _use_new_zipfile_serialization=False)
    for path in ("1GB", "4KB", "new.pt", "old.bin"):
        assert conditions(measured(tmp_path / path)) == expected


def with_singular_values(rows, columns, sigma):
    left, right = (torch.linalg.qr(torch.randn(n, len(sigma), dtype=torch.float64))[0] for n in (rows, columns))
    return left * sigma @ right.mT


@pytest.mark.parametrize("condition", [1.1e1, 1.1e3, 1.1e5, 1e6])
@pytest.mark.parametrize("shape", [(60, 60), (60, 90), (90, 40)])
def test_figures_are_those_of_a_float64_decomposition(shape, condition):
    torch.manual_seed(0)
    count = min(shape)
    spread = with_singular_values(*shape, torch.logspace(0, -math.log10(condition), count, dtype=torch.float64))
    steps = with_singular_values(*shape, torch.where(torch.arange(count) < count * 0.9, 1.0, 1 / condition).double())
    for matrix in (spread, steps):
        model = of_tensors("one", {"layers.0.mlp.up_proj.weight": matrix})
        (found,) = pc.conditioning(model.model, model.load).matrices
        sigma = torch.linalg.svdvals(matrix)
        assert found.figures.condition == pytest.approx(modified_condition_number(sigma).item(), rel=1e-8)
        assert found.figures.stable_rank == pytest.approx((sigma / sigma[0]).square().sum().item(), rel=1e-8)
        share = sigma / sigma.sum()
        assert found.figures.effective_rank == pytest.approx((-(share * share.log()).sum()).exp().item(), rel=1e-8)
        assert found.figures.small == (sigma < sigma[0] / 100).double().mean()
        for level, value in found.condition_at.items():
            preconditioned = torch.linalg.svdvals(polynomial.apply(maps.LEVELS[level], matrix / sigma[0]))
            assert value == pytest.approx(modified_condition_number(preconditioned).item(), rel=1e-8)
        if found.by == "svd":
            torch.testing.assert_close(found.sigma.flip(0), sigma, rtol=1e-8, atol=0)
    assert exact_singular_values(steps)[1] == ("gram" if condition < 1e3 else "svd")


@pytest.mark.parametrize("shape", [(128, 128), (256, 256), (128, 344), (512, 128), (256, 1024)])
def test_gaussian_matrices_have_the_figures_of_the_reference(shape):
    """The mean of 20 is within 4 % for square matrices, whose condition numbers deviate by 5 %, and 1 % for others."""
    torch.manual_seed(1)
    drawn = [torch.linalg.svdvals(torch.randn(*shape, dtype=torch.float64)) for _ in range(20)]
    reference = gaussian_singular_values(*shape)
    mean = sum(modified_condition_number(sigma).item() for sigma in drawn) / len(drawn)
    assert mean == pytest.approx(
        modified_condition_number(reference).item(), rel=0.04 if shape[0] == shape[1] else 0.01
    )
    norm = sum(sigma.square().sum().item() for sigma in drawn) / len(drawn)
    assert norm == pytest.approx(reference.square().sum().item(), rel=5e-3)
    # control: another initialisation differs
    orthogonal = torch.linalg.svdvals(nn.init.orthogonal_(torch.empty(*shape, dtype=torch.float64)))
    assert modified_condition_number(orthogonal) < 0.5 * modified_condition_number(reference)


WIDE = SIZES | {"hidden_size": 256, "intermediate_size": 640}
FRESH = {
    "LlamaForCausalLM": WIDE, "BertForMaskedLM": WIDE, "GPTNeoXForCausalLM": WIDE,
    "GPT2LMHeadModel": {"vocab_size": 50, "n_embd": 256, "n_layer": 2, "n_head": 4},
    "T5ForConditionalGeneration": T5 | {"d_model": 256, "d_kv": 64, "d_ff": 640, "num_heads": 4},
}  # fmt: skip


@pytest.mark.parametrize("name", FRESH)
def test_first_weights_are_as_random_ones(name):
    """At a width of 256 one square matrix deviates by 3 %; the reference is 1 % low."""
    torch.manual_seed(0)
    model_class = getattr(hf, name)
    found = pc.conditioning(model_class(model_class.config_class(**FRESH[name])))
    assert words.times(found.in_layers) == pytest.approx(1.01, abs=0.03)
    for block, matrices in found.by_block(of_layers=True).items():
        if block != "relative_attention_bias":  # of T5, with 4 columns
            assert words.times(matrices) == pytest.approx(1.01, abs=0.1), block


def one_linear():
    return nn.ModuleDict({"layers": nn.ModuleList([nn.ModuleDict({"up": nn.Linear(24, 40)})])})


@pytest.mark.parametrize("level", [1, 4])
def test_pc_of_a_measured_matrix_is_that_of_the_layer(level):
    torch.manual_seed(0)
    model = one_linear()
    (before,) = pc.conditioning(model).matrices
    attached = pc.attach(one_linear(), pc.PCConfig(level=level, blocks=("layers.*.up",), power_iterations=300))
    attached.load_state_dict(model.state_dict())
    pc.precondition(attached, torch.optim.SGD(attached.parameters(), lr=0.1)).write_pc()
    (after,) = pc.conditioning(attached).matrices  # PC(W) is measured; W, u and v are not
    assert after.figures.condition == pytest.approx(before.condition_at[level], rel=1e-5)


INSERTED = ("_orig_mod.", "module._orig_mod.", "_orig_mod.module.", "model._orig_mod.", "_fsdp_wrapped_module.")


@pytest.mark.parametrize("prefix", INSERTED)
def test_names_of_a_wrapped_model_are_those_of_the_model(prefix, tmp_path):
    """torch.compile inserts a word, also in one layer, as does activation checkpointing."""
    tensors = {
        f"layers.{i}.mlp.{name}.weight": torch.randn(8, 8) for i in range(2) for name in ("up_proj", "down_proj")
    }
    plain = of_tensors("plain", tensors)
    expected = conditions(pc.conditioning(plain.model, plain.load))
    inside = {key.replace(".mlp.", "._orig_mod.mlp._checkpoint_wrapped_module."): tensors[key] for key in tensors}
    for state in (tensors, inside):
        wrapped = {prefix + key: tensor for key, tensor in state.items()}
        torch.save({"model": wrapped, "iter_num": 3}, tmp_path / "state.pt")
        save_file(wrapped, tmp_path / "state.safetensors")
        for name in ("state.pt", "state.safetensors"):
            assert conditions(measured(tmp_path / name)) == expected


def test_a_tensor_under_both_names_is_refused(tmp_path):
    save_file({"a.weight": torch.ones(4, 4), "_orig_mod.a.weight": torch.ones(4, 4)}, tmp_path / "both.safetensors")
    with pytest.raises(pc.UserError, match=r"has a\.weight twice, once as of a compiled model"):
        read(tmp_path / "both.safetensors")


def test_a_compiled_module_is_measured():
    model = made("LlamaForCausalLM")
    assert conditions(pc.conditioning(torch.compile(model))) == conditions(pc.conditioning(model))


LORA = {"peft_type": "LORA", "r": 4, "lora_alpha": 8, "base_model_name_or_path": "nowhere"}
ADAPTERS = {
    "factors": ({"target_modules": ["q_proj", "down_proj"]}, ("q", "down")),
    "whole weights beside them": (
        {"target_modules": ["q_proj"], "modules_to_save": ["lm_head", "down_proj"]},
        ("q", "down"),
    ),
    "biases": ({"target_modules": ["q_proj"], "bias": "all"}, ("q",)),
    "another scale": ({"target_modules": ["q_proj"], "use_rslora": True}, ("q",)),
}


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("kind", ADAPTERS)
def test_an_adapter_is_merged_with_its_base(kind, tied, tmp_path):
    peft = pytest.importorskip("peft")
    options, changed = ADAPTERS[kind]
    torch.manual_seed(0)
    model = made("LlamaForCausalLM", tie_word_embeddings=tied)
    model.save_pretrained(tmp_path / "base")
    adapted = peft.get_peft_model(model, peft.LoraConfig(r=4, lora_alpha=8, **options))
    with torch.no_grad():
        for name, parameter in adapted.named_parameters():
            if "lora" in name or "modules_to_save" in name:
                parameter.normal_()
    adapted.save_pretrained(tmp_path / "adapter")
    found, base = measured(tmp_path / "adapter", base=tmp_path / "base"), conditions(measured(tmp_path / "base"))
    for name, tensor in adapted.merge_and_unload().state_dict().items():
        for matrix in found.matrices:
            if matrix.name == name:
                largest = torch.linalg.matrix_norm(tensor.double(), 2).item()
                assert matrix.figures.largest == pytest.approx(largest, rel=1e-5), name
    for block, values in conditions(found).items():
        assert (values == base[block]) == (block not in changed), block


UNKNOWN = {
    "embedding": "base_model.model.model.embed_tokens.lora_embedding_A",
    "magnitude": "base_model.model.model.layers.0.self_attn.o_proj.lora_magnitude_vector.weight",
    "added rows": "base_model.model.model.embed_tokens.token_adapter.trainable_tokens_delta",
    "factor of another's": "base_model.model.model.layers.9.self_attn.o_proj.lora_A.weight",
    "second factor alone": "base_model.model.model.layers.0.self_attn.o_proj.lora_B.weight",
    "factors of other shapes": "base_model.model.model.layers.0.self_attn.o_proj.lora_A.weight",
    "another base's": "base_model.model.transformer.h.0.attn.weight",
}


@pytest.mark.parametrize("kind", UNKNOWN)
def test_a_tensor_of_an_adapter_that_is_not_used_is_named(kind, tmp_path):
    made("LlamaForCausalLM").save_pretrained(tmp_path / "base")
    (tmp_path / "adapter").mkdir()
    (tmp_path / "adapter" / "adapter_config.json").write_text(json.dumps(LORA))
    tensors = {UNKNOWN[kind]: torch.ones(4, 4)}
    if kind == "factors of other shapes":
        tensors[UNKNOWN[kind].replace("lora_A", "lora_B")] = torch.ones(4, 4)
    save_file(tensors, tmp_path / "adapter" / "adapter_model.safetensors")
    with pytest.raises(pc.UserError, match=re.escape(UNKNOWN[kind].removeprefix("base_model.model."))):
        measured(tmp_path / "adapter", base=tmp_path / "base")


def test_of_two_files_of_an_adapter_the_one_that_peft_reads_counts(tmp_path):
    save_file({"layers.0.mlp.up_proj.weight": torch.ones(4, 4)}, tmp_path / "base.safetensors")
    (tmp_path / "adapter").mkdir()
    (tmp_path / "adapter" / "adapter_config.json").write_text(json.dumps(LORA | {"modules_to_save": ["up_proj"]}))
    key = "base_model.model.layers.0.mlp.up_proj.weight"
    save_file({key: 3 * torch.ones(4, 4)}, tmp_path / "adapter" / "adapter_model.safetensors")
    torch.save({key: 2 * torch.ones(4, 4)}, tmp_path / "adapter" / "adapter_model.bin")
    found = read(tmp_path / "adapter", base=tmp_path)
    assert found.load("layers.0.mlp.up_proj.weight").max() == 3


OTHERS = [
    {"use_dora": True}, {"rank_pattern": {"q_proj": 2}}, {"init_lora_weights": "pissa"}, {"init_lora_weights": "olora"},
    {"layer_replication": [[0, 1], [0, 1]]}, {"peft_type": "IA3"}, {"r": 0},
]  # fmt: skip


@pytest.mark.parametrize("config", OTHERS, ids=str)
def test_an_adapter_that_is_more_than_its_factors_is_refused(config, tmp_path):
    """PiSSA and OLoRA change the base's weights too."""
    (tmp_path / "adapter_config.json").write_text(json.dumps(LORA | config))
    with pytest.raises(
        pc.UserError, match=r"an adapter other than plain LoRA; save the model after .*merge_and_unload"
    ):
        read(tmp_path, base=tmp_path)


def broken(folder):
    """{what is wrong: (path, pattern of the error)}"""
    weights = {"a.weight": torch.randn(4, 4), "b.weight": torch.randn(4, 4)}
    save_file(weights, folder / "whole.safetensors")
    (folder / "cut.safetensors").write_bytes((folder / "whole.safetensors").read_bytes()[:-20])
    (folder / "text.safetensors").write_text("not tensors at all")
    save_file({"x.weight": torch.ones(4, 4).to(torch.float8_e4m3fn)}, folder / "float8.safetensors")
    save_file({"x.qweight": torch.ones(4, 4, dtype=torch.int32)}, folder / "packed.safetensors")
    torch.save(nn.Linear(2, 2), folder / "code.pt")
    torch.save(weights, folder / "cut.pt")
    (folder / "cut.pt").write_bytes((folder / "cut.pt").read_bytes()[:-200])
    torch.save([1, 2], folder / "list.pt")
    torch.save({"a.weight": torch.ones(1).expand(1, 2)}, folder / "one_number.pt")
    folders = {}
    for name in "empty twice no_file no_tensor gptq lora bad_json distributed sockets deep".split():
        folders[name] = folder / name
        folders[name].mkdir()
    for name in ("one", "two"):
        save_file(weights, folder / "twice" / f"{name}.safetensors")
    for name, file in (("no_file", "gone.safetensors"), ("no_tensor", "model-1.safetensors")):
        save_file(weights, folder / name / "model-1.safetensors")
        index = {"weight_map": {"a.weight": "model-1.safetensors", "c.weight": file}}
        (folder / name / "model.safetensors.index.json").write_text(json.dumps(index))
    (folder / "gptq" / "config.json").write_text(json.dumps({"quantization_config": {"quant_method": "gptq"}}))
    (folder / "lora" / "adapter_config.json").write_text(json.dumps(LORA))
    (folder / "bad_json" / "config.json").write_text("{")
    (folder / "distributed" / ".metadata").touch()
    for name in ("config.json", "model.safetensors"):
        os.mknod(folder / "sockets" / name, stat.S_IFSOCK)
    (folder / "deep" / "config.json").write_text("[" * 10_000)
    return {
        "absent": (folder / "absent", "not there"),
        "cut": (folder / "cut.safetensors", "cut.safetensors: not a safetensors file, or cut off"),
        "text": (folder / "text.safetensors", "not a safetensors file"),
        "float8": (folder / "float8.safetensors", "float8.safetensors: x.weight is quantised"),
        "packed": (folder / "packed.safetensors", "x.qweight is quantised"),
        "code": (folder / "code.pt", "could run code"),
        "cut pickle": (folder / "cut.pt", "cut.pt: not a torch file, or cut off"),
        "list": (folder / "list.pt", "no tensors by name"),
        "one number": (folder / "one_number.pt", "a.weight .* has more values than are stored"),
        "empty": (folders["empty"], "no weights in it"),
        "sockets": (folders["sockets"], "no weights in it"),
        "deep": (folders["deep"], "cannot be read .RecursionError"),
        "twice": (folders["twice"], "two.safetensors: a.weight is in another file"),
        "no_file": (folders["no_file"], "gone.safetensors: not there, but model.safetensors.index.json names it"),
        "no_tensor": (folders["no_tensor"], "index names c.weight"),
        "gptq": (folders["gptq"], "quantised .gptq."),
        "lora": (folders["lora"], "an adapter without its base model; .* --base"),
        "bad_json": (folders["bad_json"], "config.json: not JSON"),
        "distributed": (folders["distributed"], "scripts/spectra.py"),
    }  # fmt: skip


def test_a_whole_file_counts_and_not_what_an_earlier_save_left(tmp_path):
    """`save_pretrained` leaves the index of earlier shards, and beside new shards an earlier whole file."""
    save_file({"a.weight": torch.full((4, 4), 2.0)}, tmp_path / "model.safetensors")
    index = {"weight_map": {"a.weight": "model-1.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    assert read(tmp_path).load("a.weight")[0, 0] == 2.0
    save_file({"a.weight": torch.full((4, 4), 1.0)}, tmp_path / "model-1.safetensors")
    with pytest.raises(pc.UserError, match="both model.safetensors and model-1.safetensors, .*; remove what is older"):
        read(tmp_path)


def test_what_cannot_be_read_is_one_line(tmp_path, command):
    for name, (path, expected) in broken(tmp_path).items():
        status, _, said = command("pc.report", path, "--output", tmp_path / "report.html")
        assert status == 2 and said.startswith("error: ") and said.count("\n") <= 2, (name, said)
        assert re.search(expected, said), (name, said)
    assert not (tmp_path / "report.html").exists()


def test_a_tensor_that_cannot_be_measured_is_named_and_the_rest_goes_on(tmp_path, command):
    tensors = {
        "layers.0.mlp.up_proj.weight": torch.randn(8, 8),
        "layers.1.mlp.up_proj.weight": torch.full((8, 8), math.nan),
        "layers.2.mlp.up_proj.weight": torch.zeros(8, 8),
        "layers.3.mlp.up_proj.weight": torch.empty(0, 8),
        "layers.4.mlp.up_proj.weight": torch.randn(8, 8, dtype=torch.complex64),
        "layers.5.mlp.up_proj.weight": torch.randn(1, 8),
        "layers.6.mlp.up_proj.weight": torch.randn(2, 2, 3, 3),
        "layers.7.mlp.up_proj.weight_orig": torch.randn(8, 8),
        "layers.8.mlp.up_proj.parametrizations.weight.original1": torch.randn(8, 8),
        "layers.9.mlp.up_proj.weight_v": torch.randn(8, 8),
        "ids": torch.arange(8)[None],
        "layers.0.norm.weight": torch.randn(8),
    }
    save_file(tensors, tmp_path / "odd.safetensors")
    arguments = ("pc.report", tmp_path / "odd.safetensors", "--output", tmp_path / "report.html", "--json")
    status, said, _ = command(*arguments)
    (found,) = json.loads(said).values()
    assert status == 0 and [m["name"] for m in found["matrices"]] == ["layers.0.mlp.up_proj.weight"]
    reasons = " ".join(sorted(found["left_out"]))
    said = (
        "NaN",
        "all zeros",
        "empty",
        "complex64",
        "a vector",
        "4 dimensions",
        *["computed from it"] * 3,
    )
    for number, reason in enumerate(said, start=1):
        assert re.search(rf"layers\.{number}\.mlp\.up_proj\.[^:]*weight[^:]*: [^:]*{reason}", reasons), (number, reason)


def test_a_matrix_without_full_rank_and_a_model_without_blocks():
    matrix = torch.eye(8)
    matrix[7, 7] = 0
    checkpoint = of_tensors("m", {"h.0.w.weight": matrix})
    found = pc.conditioning(checkpoint.model, checkpoint.load)
    assert found.matrices[0].figures.condition == math.inf and "×inf" in words.block_row("w", found.matrices)[4]
    assert "Infinity" not in json.dumps(found.as_dict())
    assert "We do not know" in words.advice(found) and "nothing can be said" in words.summary(found)
    assert "<svg" in page.page({"m": found})


def test_a_page_is_not_written_through_a_link(tmp_path, command):
    """Such as report.html in the current folder, which may be another person's model."""
    (tmp_path / "own").write_text("kept")
    (tmp_path / "report.html").symlink_to("own")
    save_file({"a.weight": torch.randn(4, 4)}, tmp_path / "model.safetensors")
    status, _, said = command("pc.report", tmp_path / "model.safetensors", "--output", tmp_path / "report.html")
    assert status == 2 and "report.html is a link; give another --output" in said
    assert (tmp_path / "own").read_text() == "kept"


def test_the_page_and_the_tables(tmp_path, command):
    torch.manual_seed(0)
    size = SIZES | {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 12}
    for name in ("first", "<second>"):
        model = hf.LlamaForCausalLM(hf.LlamaConfig(**size))
        model.save_pretrained(tmp_path / name)
    file = tmp_path / "pages" / "report.html"
    status, said, err = command("pc.report", tmp_path / "first", tmp_path / "<second>", "--output", file)
    assert status == 0 and "model.layers.11" in said and "Condition numbers side by side" in said
    assert said.index("model.layers.2 ") < said.index("model.layers.10 ")
    assert "We do not know" in said or "we do not know" in said
    text = file.read_text()
    assert len(text) < 300_000 and "<script" not in text and "<second>" not in text and "&lt;second&gt;" in text
    assert "prefers-color-scheme: dark" in text and "width=device-width" in text
    assert not re.findall(r'(?:src|href)="?(?!#)[^"]', text)  # the page loads nothing
    assert [*file.parent.iterdir()] == [file]

    status, said, _ = command("pc.report", tmp_path / "first", "--output", file, "--sample", "3", "--json")
    layers = {matrix["layer"] for matrix in json.loads(said)["first"]["matrices"]}
    assert status == 0 and layers == {"", "model.layers.0", "model.layers.6", "model.layers.11"}


def test_the_runs_that_the_advice_rests_on():
    """Condition numbers are means over the baselines that were compared with PC, from the logs of the runs."""
    of = {label: float(value) for value, label, *_ in words.EVIDENCE[1:]}
    runs = [json.loads(line) for line in (ROOT / "experiments/small/runs.jsonl").read_text().splitlines()]

    def mean(study, name):
        chosen = [run for run in runs if run["study"] == study and re.fullmatch(rf"{name}/seed-[123]", run["name"])]
        last = [[line["spectra/gmcn/pc"] for line in run["log"] if line.get("spectra/gmcn/pc")][-1] for run in chosen]
        assert len(last) == 3
        return sum(last) / 3

    long = "lr-0.008485_enable-false_steps-1200_warmup_steps-60"
    for label, study, name in (
        ("micro, AdamW, 0.96 tokens per parameter", "micro_adamw_lr", "lr-0.006_enable-false"),
        ("micro, AdamW, at another rate of the baseline", "micro_adamw_lr", "lr-0.004243_enable-false"),
        ("nano, AdamW, 1.5 tokens per parameter", "nano_adamw", "lr-0.008485_enable-false"),
        ("nano, AdamW, four times the tokens", "nano_adamw_long", long),
        ("micro, Muon, 0.96 tokens per parameter", "micro_muon_lr", "lr-0.01697_enable-false"),
    ):
        assert of[label] == pytest.approx(mean(study, name), abs=0.06), label
    for label, study in (
        ("regime, AdamW, 157 tokens per parameter", "regime"),
        ("conditioning, AdamW, 20 tokens per parameter", "conditioning"),
    ):
        baseline = read_experiments(ROOT / "experiments" / study)[0].reference
        logs = without_tuning_seeds(baseline[baseline.best]).log
        last = [log["spectra/gmcn/pc"].dropna().iloc[-1] for log in logs]
        assert of[label] == pytest.approx(sum(last) / len(last), abs=0.06), label
    for optimizer, base, arm, tokens in (
        ("AdamW", "baseline", "level-4", 5),
        ("AdamW", "baseline", "level-4", 20),
        ("Muon", "muon", "muon-level-2", 20),
        ("MuonH", "MuonH", "MuonH-level-2", 20),
    ):
        study = studies()[f"verdict-{tokens}"]
        change = study[f"{arm} - {base}"]
        interval = f"{change.interval.low:+.3f} to {change.interval.high:+.3f}"
        label = f"verdict, {optimizer}, {tokens} tokens per parameter"
        assert (f"{study[base].condition:.1f}", label, f"{change.mean:+.3f} per byte", interval) in words.EVIDENCE
