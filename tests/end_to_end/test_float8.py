"""PC with float8 layers (torchao, emulated on a CPU): layers multiply PC(W) in float8; the rest does not change."""

import pytest
import torch

import pc
from helpers import tiny
from helpers.ranks import run_ranks
from pc_recipe.config.rules import FLOAT8

QUICK = [
    *("--model.flavor", "tiny32", "--model.vocab_size", "208", "--training.local_batch_size", "3"),
    *("--validation.enable", "false", "--checkpoint.enable", "false"),
]
EMULATED = ["--model.converters", FLOAT8, "--quantize.linear.float8.emulate", "true"]
GATHERED = ["--quantize.linear.float8.enable_fsdp_float8_all_gather", "true"]
CASES = {
    1: {"without": [], "FSDP": EMULATED, "baseline": [*EMULATED, "--pc.enable", "false"]},
    2: {
        "FSDP2": EMULATED,
        "FSDP2, gathered in float8": [*EMULATED, *GATHERED],
        "FSDP2, gathered in float8 with scales made at the step": [
            *(*EMULATED, *GATHERED, "--quantize.linear.float8.precompute_float8_dynamic_scale_for_fsdp", "true")
        ],
        "TP2": [*EMULATED, "--parallelism.tensor_parallel_degree", "2"],
    },
}


def _train_all(rank, config, cases) -> list[dict[str, torch.Tensor]]:
    from pc_recipe.config.model_sizes import FLAVORS, Flavor

    FLAVORS["tiny32"] = Flavor(dim=32, n_layers=2, n_heads=2, multiple_of=16)  # torchao converts multiples of 16
    return [tiny.train(rank, config, overrides) for overrides in cases]


@pytest.mark.soak
def test_runs_in_float8(tiny_config, tmp_path):
    config, _ = tiny_config
    losses, weights = {}, {}
    for ranks, cases in CASES.items():
        overrides = [[*QUICK, *case, "--job.dump_folder", str(tmp_path / name)] for name, case in cases.items()]
        for name, *states in zip(cases, *run_ranks(ranks, _train_all, config, overrides), strict=True):
            losses[name] = tiny.metrics(tmp_path / name)
            weights[name] = {key: tensor for state in states for key, tensor in state.items()}
    plain, float8 = losses.pop("without"), losses.pop("FSDP")
    assert plain[-1] < plain[0] - 0.2 and float8[-1] < float8[0] - 0.2  # both learn
    # float8 has 3 mantissa bits: each factor is off by up to 6 %, which averages out in each product
    assert float8 == pytest.approx(plain, rel=1e-3)
    assert max(abs(a / b - 1) for a, b in zip(float8, plain, strict=True)) > 1e-4  # control: float8 was in use
    assert max(abs(a / b - 1) for a, b in zip(losses.pop("baseline"), float8, strict=True)) > 2.5e-3  # so was PC
    for name, values in losses.items():
        # each rank scales by the largest entry of its own batch, so two ranks round differently
        assert values == pytest.approx(float8, rel=1e-3), name
    # it does not matter whether values are rounded before or after they are gathered
    for name in CASES[2]:
        if "gathered" in name:
            assert losses[name] == losses["FSDP2"], name
    # W stays in float32, the checkpoint's format
    layer = "layers.0.attention.wo"
    for tensors in weights.values():
        assert all(tensor.dtype == torch.float32 for tensor in tensors.values())
    tensors = (weights["FSDP2"][f"{layer}.weight_{key}"] for key in ("orig", "gamma", "u", "v"))
    effective = pc.effective_weight(*tensors, pc.PCConfig(level=4))
    torch.testing.assert_close(weights["FSDP2"][f"{layer}.weight"], effective)
