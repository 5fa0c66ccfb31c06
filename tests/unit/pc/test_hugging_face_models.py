"""The model classes in the table of docs/library.md, as unmodified models of transformers at toy size."""

import math
import re
from collections import Counter

import pytest
import torch
import transformers as hf
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_MASKED_LM_MAPPING_NAMES,
)

import pc
from helpers.tiny import ROOT
from pc import maps

pytestmark = pytest.mark.fast

SIZES = {
    "vocab_size": 50, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2,
    "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
GROUPED = {"num_key_value_heads": 1, "head_dim": 8}
MIXTURE = {"num_experts_per_tok": 2, "moe_intermediate_size": 12}
LATENT = {
    "num_key_value_heads": 2, "n_routed_experts": 4, "n_group": 2, "topk_group": 1, "n_shared_experts": 1,
    "first_k_dense_replace": 1, "q_lora_rank": 8, "kv_lora_rank": 8, "qk_rope_head_dim": 4, "qk_nope_head_dim": 4,
    "v_head_dim": 8, "tie_word_embeddings": False,
}  # fmt: skip
GPT2 = {"vocab_size": 50, "n_embd": 16, "n_inner": 24, "n_layer": 2, "n_head": 2, "n_positions": 32}
HYBRID = {
    "layer_types": ["linear_attention", "full_attention"], "linear_num_key_heads": 2, "linear_num_value_heads": 4,
    "linear_key_head_dim": 4, "linear_value_head_dim": 6, "num_experts": 4, "shared_expert_intermediate_size": 12,
}  # fmt: skip
FALCON = SIZES | {"num_attention_heads": 4, "num_kv_heads": 2, "ffn_hidden_size": 24}
MPT = {"vocab_size": 50, "d_model": 16, "expansion_ratio": 2, "n_layers": 2, "n_heads": 2, "max_seq_len": 32}
OPT = SIZES | {"ffn_dim": 24, "word_embed_proj_dim": 16, "max_position_embeddings": 32}

GATED = dict.fromkeys(("o", "gate", "up", "down", "q", "k", "v"), 2)
PLAIN = dict.fromkeys(("o", "up", "down", "q", "k", "v"), 2)
EXPERTS = GATED | {"gate": 8, "up": 8, "down": 8}
SHARED = GATED | {"gate": 10, "up": 10, "down": 10}  # a shared expert beside four
HALF = GATED | {"gate": 6, "up": 6, "down": 6}  # in one of two layers; the other is dense

# Class of the model, perhaps with a variant: (its settings, matrices per block in both layers).
ROWS = {
    "LlamaForCausalLM": (SIZES | GROUPED, GATED),
    "Qwen3ForCausalLM": (SIZES | GROUPED, GATED),
    "Gemma2ForCausalLM": (SIZES | GROUPED, GATED),
    "Olmo2ForCausalLM": (SIZES, GATED),
    "Phi3ForCausalLM": (SIZES | {"num_key_value_heads": 1}, GATED),
    "GPT2LMHeadModel": (GPT2, PLAIN),
    "GPTNeoXForCausalLM": (SIZES, PLAIN),
    "BertForMaskedLM": (SIZES, PLAIN),
    "ViTForImageClassification": (SIZES | {"image_size": 8, "patch_size": 4}, PLAIN),
    "MixtralForCausalLM": (SIZES | {"num_key_value_heads": 1, "num_local_experts": 4}, EXPERTS),
    "Qwen3MoeForCausalLM": (SIZES | GROUPED | MIXTURE | {"num_experts": 4}, EXPERTS),
    # queries in two factors
    "DeepseekV2ForCausalLM": (SIZES | MIXTURE | LATENT, HALF | {"q": 4}),
    "DeepseekV3ForCausalLM": (SIZES | MIXTURE | LATENT, HALF | {"q": 4}),
    "Glm4MoeLiteForCausalLM": (
        SIZES | MIXTURE | LATENT | {"mlp_layer_types": ["dense", "sparse"], "n_group": 1},
        HALF | {"q": 4},
    ),
    "GptOssForCausalLM": (SIZES | GROUPED | {"num_local_experts": 4}, EXPERTS),
    "MistralForCausalLM": (SIZES | GROUPED, GATED),
    "Gemma3ForCausalLM": (SIZES | GROUPED, GATED),
    "CohereForCausalLM": (SIZES | {"num_key_value_heads": 1}, GATED),
    "Glm4ForCausalLM": (SIZES | GROUPED, GATED),
    "Glm4MoeForCausalLM": (
        SIZES | GROUPED | MIXTURE | {"n_routed_experts": 4, "n_shared_experts": 1, "first_k_dense_replace": 1},
        HALF,
    ),
    "Llama4ForCausalLM": (
        SIZES | GROUPED | {"num_local_experts": 4, "intermediate_size_mlp": 32, "interleave_moe_layer_step": 2},
        HALF,
    ),
    "OlmoeForCausalLM": (SIZES | {"num_experts": 4, "num_experts_per_tok": 2}, EXPERTS),
    "Qwen2MoeForCausalLM": (
        SIZES | GROUPED | MIXTURE | {"num_experts": 4, "shared_expert_intermediate_size": 12},
        SHARED,
    ),
    "Qwen3NextForCausalLM": (SIZES | GROUPED | MIXTURE | HYBRID, SHARED),
    "Qwen3_5MoeForCausalLM": (SIZES | GROUPED | MIXTURE | HYBRID, SHARED),
    "HunYuanMoEV1ForCausalLM": (SIZES | GROUPED | {"num_experts": 4, "moe_topk": 2}, SHARED),
    "GraniteMoeSharedForCausalLM": (
        SIZES | {"num_key_value_heads": 1, "num_local_experts": 4, "shared_intermediate_size": 12},
        SHARED,
    ),
    "Lfm2ForCausalLM": (
        SIZES | {"num_key_value_heads": 1, "layer_types": ["conv", "full_attention"]},
        GATED | {"q": 1, "k": 1, "v": 1, "o": 1},
    ),
    "PhiForCausalLM": (SIZES | {"num_key_value_heads": 1}, PLAIN),
    "Starcoder2ForCausalLM": (SIZES | {"num_key_value_heads": 1}, PLAIN),
    "FalconForCausalLM": (FALCON | {"new_decoder_architecture": True}, PLAIN),
    "FalconForCausalLM, one group": (FALCON | {"multi_query": True}, PLAIN),
    "FalconForCausalLM, by head": (FALCON | {"multi_query": False, "num_kv_heads": 4}, PLAIN),
    "OPTForCausalLM": (OPT, PLAIN),
    "MptForCausalLM": (MPT, PLAIN),
    "ModernBertForMaskedLM": (SIZES, GATED),
}

# The parts of fused weights, cut as the forward pass of the class cuts the weight or its product.
PARTS = {
    "Phi3ForCausalLM": {"qkv_proj": lambda w: w.split((16, 8, 8)), "gate_up_proj": lambda w: w.chunk(2)},
    "GPT2LMHeadModel": {"c_attn": lambda w: w.mT.chunk(3)},
    "GPTNeoXForCausalLM": {"query_key_value": lambda w: w.unflatten(0, (2, 3, 8)).unbind(1)},
    "MixtralForCausalLM": {"gate_up_proj": lambda w: w.chunk(2, 1)},
    "Qwen3MoeForCausalLM": {"gate_up_proj": lambda w: w.chunk(2, 1)},
    "DeepseekV3ForCausalLM": {"kv_b_proj": lambda w: w.unflatten(0, (2, 12)).split((4, 8), 1)},
    "GptOssForCausalLM": {"gate_up_proj": lambda w: (w[..., ::2].mT, w[..., 1::2].mT)},
    "Llama4ForCausalLM": {"gate_up_proj": lambda w: w.mT.chunk(2, 1), "experts.down_proj": lambda w: [w.mT]},
    "Glm4ForCausalLM": {"gate_up_proj": lambda w: w.chunk(2)},
    "GraniteMoeSharedForCausalLM": {"input_linear": lambda w: w.chunk(2)},
    "Qwen3NextForCausalLM": {
        "in_proj_qkvz": lambda w: w.unflatten(0, (2, 32)).split((4, 4, 12, 12), 1)[:3],
        "q_proj": lambda w: [w.unflatten(0, (2, 16))[:, :8]],
    },
    "Qwen3_5MoeForCausalLM": {"in_proj_qkv": lambda w: w.split((8, 8, 24))},
    "FalconForCausalLM": {"query_key_value": lambda w: w.view(2, 4, 4, 16).split((2, 1, 1), 1)},
    "FalconForCausalLM, one group": {"query_key_value": lambda w: w.split((16, 4, 4))},
    "FalconForCausalLM, by head": {"query_key_value": lambda w: w.unflatten(0, (4, 3, 4)).unbind(1)},
    "MptForCausalLM": {"Wqkv": lambda w: w.chunk(3)},
    "ModernBertForMaskedLM": {"Wqkv": lambda w: w.view(3, 16, 16).unbind(0), "Wi": lambda w: w.chunk(2)},
}


def make(name):
    kind = getattr(hf, name.partition(",")[0])
    model = kind(kind.config_class(**ROWS[name][0]))
    torch.manual_seed(2)  # with this seed the two largest singular values of each matrix differ by at least 0.8 %
    with torch.no_grad():
        for parameter in model.parameters():  # some classes do not initialise experts and biases
            parameter.copy_(0.1 * torch.randn(parameter.shape))
    return model.eval()


def outputs(model):
    if "pixel_values" in model.main_input_name:
        return model(torch.randn(2, 3, 8, 8, generator=torch.Generator().manual_seed(0))).logits
    return model(torch.randint(3, 50, (2, 6), generator=torch.Generator().manual_seed(0))).logits


@pytest.mark.parametrize("name", ROWS)
def test_a_model_of_transformers(name, tmp_path):
    expected = ROWS[name][1]
    model = make(name)
    plain = outputs(model)
    preconditioner = pc.precondition(pc.attach(model, pc.PCConfig(blocks=tuple(expected), power_iterations=400)))
    splits = [weight.split for weight in preconditioner.weights.values()]
    found = [part.config.blocks[0] for s in splits for part in s.chosen for _ in range(part.count * math.prod(s.stack))]
    assert Counter(found) == expected
    # all parts of all weights against a float64 SVD, with converged vectors
    for weight in preconditioner.weights.values():
        split = weight.split
        orig, effective = (t.detach() if split.stack else t.detach()[None] for t in (weight.orig, weight.effective))
        for before, after in zip(split.split_weight(orig), split.split_weight(effective), strict=True):
            u, sigma, vh = torch.linalg.svd(before.double(), full_matrices=False)
            top = sigma[:, :1]
            wanted = u * (top * maps.evaluate(maps.LEVELS[4], sigma / top))[:, None] @ vh
            assert (after - wanted).norm() < 1e-5 * wanted.norm() * math.sqrt(len(wanted))
    # one step, then back to the plain class
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    preconditioner.follow(optimizer)
    loss = outputs(model).square().mean()
    loss.backward()
    preconditioner.pull_back()
    optimizer.step()
    with torch.no_grad():
        logits = outputs(model)
        assert logits.square().mean() < loss and (logits - plain).abs().max() > 1e-3
        pc.merge(model).save_pretrained(tmp_path)
        torch.testing.assert_close(outputs(type(model).from_pretrained(tmp_path).eval()), logits, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", PARTS)
def test_parts_are_those_of_the_forward_pass(name):
    weights = dict(pc.named_weights(pc.attach(make(name), pc.PCConfig(blocks=("qk", "v", "o", "ffn")))))
    for last, parts in PARTS[name].items():
        weight = next(weight for path, weight in weights.items() if path.endswith(last))
        stored = weight.effective.detach()
        ours = weight.split.split_weight(stored if weight.split.stack else stored[None])
        for mine, theirs in zip(ours, parts(stored), strict=True):
            assert torch.equal(mine.flatten(0, 1), theirs.reshape(-1, theirs.size(-1)))


def make_without_memory(name):
    """A model on the meta device, as small as its class allows; None if no size is allowed."""
    kind = getattr(hf, name)
    experts = dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts"), 4) | MIXTURE
    for sizes in (SIZES | GROUPED | experts, SIZES | experts, SIZES, {"num_hidden_layers": 2}, {}):
        try:
            default = kind.config_class()
            with torch.device("meta"):
                return kind(kind.config_class(**{key: size for key, size in sizes.items() if hasattr(default, key)}))
        except Exception:  # classes fail in many ways: sizes that do not fit, a missing package
            continue
    return None


@pytest.mark.soak
def test_language_models_that_attach_at_once(capsys):
    """All of transformers with default blocks: each attaches, or a line says what to add. docs/library.md has the names."""
    tables = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, MODEL_FOR_MASKED_LM_MAPPING_NAMES
    found = {}
    for name in sorted({name for table in tables for name in table.values() if isinstance(name, str)}):
        if model := make_without_memory(name):
            text = pc.describe(model, pc.PCConfig())
            try:
                pc.attach(model, pc.PCConfig())
                found[name] = "attached"
            except pc.UserError as error:
                found[name] = "splits printed" if "splits={" in f"{text}{error}" else "no such block"
    with capsys.disabled():
        print(Counter(found.values()), "attached:", *(name for name, result in found.items() if result == "attached"))
    document = (ROOT / "docs/library.md").read_text()
    names = re.search(r"attach at once:(.*?)\. Every other", document, re.DOTALL)[1].replace("\n", " ").split(", ")
    short = {
        re.sub("ForCausalLM|ForMaskedLM|LMHeadModel", "", name) for name, how in found.items() if how == "attached"
    }
    assert short.issuperset(name.strip() for name in names) and len(names) > 50
