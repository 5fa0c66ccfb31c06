"""PC on unmodified Hugging Face models."""

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM, Qwen3Config, Qwen3ForCausalLM

import pc

SIZES = {
    "vocab_size": 50,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 8,
}
MODELS = [(LlamaForCausalLM, LlamaConfig), (Qwen3ForCausalLM, Qwen3Config)]


@pytest.mark.parametrize("model_class, config_class", MODELS)
@pytest.mark.parametrize("schedule", ["forward", "step"])
def test_train_and_merge(model_class, config_class, schedule, tmp_path):
    torch.manual_seed(0)
    model = model_class(config_class(**SIZES))
    pc.attach(model, pc.PCConfig(level=4, blocks=("qk", "o", "ffn"), schedule=schedule))
    assert len(list(pc.named_pc_linears(model))) == 2 * 6
    tokens = torch.randint(50, (4, 12), generator=torch.Generator().manual_seed(0))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    step_schedule = pc.StepSchedule(model) if schedule == "step" else None
    if step_schedule:
        step_schedule.materialise()
    losses = []
    for _ in range(10):
        loss = model(input_ids=tokens, labels=tokens).loss
        losses.append(loss.item())
        loss.backward()
        if step_schedule:
            step_schedule.pull_back()
            step_schedule.restore_raw()
        optimizer.step()
        optimizer.zero_grad()
        if step_schedule:
            step_schedule.materialise()
    assert losses[-1] < losses[0] - 0.5
    model.eval()
    with torch.no_grad():
        expected = model(input_ids=tokens).logits
        pc.merge(model).save_pretrained(tmp_path)
        plain = model_class.from_pretrained(tmp_path).eval()
        # the same float32 weights through the same kernels
        torch.testing.assert_close(plain(input_ids=tokens).logits, expected, rtol=0, atol=1e-6)
