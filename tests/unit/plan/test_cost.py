from pathlib import Path

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode
from torchtitan.models.llama3.model.model import Transformer

from pc import PCConfig, effective_weight
from pc.errors import UserError
from pc.passes import materialise, pull_back
from pc.plan.cost import Matrix, Plan, model_flops_per_token, table
from pc.titan.llama2 import model_args

CONFIGS = Path(__file__).parents[3] / "train_configs"


def _counted(function):
    with FlopCounterMode(display=False) as counter:
        function()
    return counter.get_total_flops()


def test_model_agrees_with_torch_on_60m():
    args, seq_len = model_args("60M"), 512
    with torch.device("meta"):
        model = Transformer(args)
        tokens = torch.zeros(2, seq_len, dtype=torch.long)

    def step():
        with sdpa_kernel(SDPBackend.MATH):  # as separate products, each of which torch counts
            model(tokens).sum().backward()

    ours = tokens.numel() * model_flops_per_token(args, seq_len, causal=False)
    assert _counted(step) == pytest.approx(ours, rel=0.01)
    # control: with attention counted causally it would be off by more
    assert abs(tokens.numel() * model_flops_per_token(args, seq_len, causal=True) / ours - 1) > 0.01


@pytest.mark.parametrize("shape", [(512, 512), (1408, 512), (512, 1408)])
@pytest.mark.parametrize("level", [1, 2, 4, "polar_express"])
def test_pc_agrees_with_torch(shape, level):
    config = PCConfig(level=level, power_iterations=7)
    matrix = Matrix(*shape, config)
    weight, gradient = torch.empty(2, 1, *shape, device="meta")
    gamma, u, v = (torch.empty(1, size, device="meta") for size in (1, *shape))
    # Products with a vector: torch counts some as elementwise work.
    assert _counted(lambda: materialise(config, weight, gamma, u, v)) == pytest.approx(
        matrix.materialise_flops(), rel=1e-2
    )
    assert _counted(lambda: pull_back(config, weight, gradient, gamma, u, v)) == pytest.approx(
        matrix.pull_back_flops(), rel=1e-2
    )
    # control: autograd would take more
    variables = [weight.requires_grad_(), gamma.requires_grad_()]
    by_autograd = _counted(lambda: torch.autograd.grad(effective_weight(*variables, u, v, config), variables, gradient))
    assert by_autograd > matrix.pull_back_flops()


@pytest.mark.parametrize("level", [1, 4, "polar_express"])
def test_what_the_graph_keeps(level):
    config = PCConfig(level=level)
    weight = torch.randn(96, 64, requires_grad=True)
    gamma, u, v = torch.ones(1, requires_grad=True), torch.randn(96), torch.randn(64)
    inputs = {tensor.data_ptr() for tensor in (weight, gamma, u, v)}
    kept = {}

    def pack(tensor):
        if tensor.untyped_storage().data_ptr() not in inputs and tensor.numel() >= 64 * 64:
            kept[tensor.untyped_storage().data_ptr()] = tensor  # holding it keeps its address its own
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        (effective_weight(weight, gamma, u, v, config) @ torch.randn(64, 3, requires_grad=True)).sum()
    assert sum(tensor.numel() for tensor in kept.values()) == Matrix(96, 64, config).kept_elements()


def test_figures_of_the_paper():
    plan = Plan(CONFIGS / "1b_adamw_pc.toml", [], 8)
    cost = plan.step_cost()
    assert cost.tokens == 2_621_440 and cost.micro_batches == 10
    assert cost.model / cost.tokens == pytest.approx(7.75e9, rel=1e-3)
    assert cost.model_full_square / cost.tokens == pytest.approx(9.57e9, rel=1e-3)
    assert cost.paper_bound == pytest.approx(3.92e-3, rel=5e-3)
    assert Plan(CONFIGS / "1b_muon_pc.toml", [], 8).step_cost().paper_bound == pytest.approx(2.35e-3, rel=5e-3)
    # 80 evaluations per step, each a tenth of its micro-batch (11 % by Horner's rule)
    assert cost.pc_forward / cost.model == pytest.approx(0.0968, rel=0.01)
    assert cost.pc_step < cost.paper_bound * cost.model  # the paper's claim holds in schedule "step"
    assert cost.pc_step / 8 <= cost.pc_step_busiest < 1.1 * cost.pc_step / 8
    # what the paper measured the graph to keep: 72.20 - 65.90 GiB
    assert plan.memory_by_part("forward")["PC in the graph"] == pytest.approx(6.30, rel=0.1)


def test_any_number_of_ranks_costs_the_same_in_schedule_step():
    costs = [Plan(CONFIGS / "271m_adamw_pc.toml", [], ranks).step_cost() for ranks in (1, 2, 4, 8)]
    assert len({cost.pc_step for cost in costs}) == 1
    assert [cost.pc_step_busiest for cost in costs] == sorted((c.pc_step_busiest for c in costs), reverse=True)
    assert costs[3].pc_forward > costs[0].pc_forward * 0.99  # evaluations per step depend on micro-batches alone


def test_tables_and_bad_input():
    text = table(Plan(CONFIGS / "debug.toml", [], 1))
    assert "paper's bound" in text and "raw W" in text
    with pytest.raises(UserError, match="global_batch_size"):
        Plan(CONFIGS / "1b_adamw_pc.toml", [], 7)
    with pytest.raises(UserError, match="flavor"):
        Plan(CONFIGS / "debug.toml", ["--model.flavor", "3B"], 1)
