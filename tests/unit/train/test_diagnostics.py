import math
from types import SimpleNamespace

import pytest
import torch
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torchtitan.models.llama3 import Transformer, TransformerModelArgs
from torchtitan.models.llama3.model.args import RoPEScalingArgs

import pc
from pc_recipe.config import Config, schema
from pc_recipe.train.activations import COUNT
from pc_recipe.train.diagnostics import Diagnostics
from pc_recipe.train.rank_sums import RankNumbers

pytestmark = pytest.mark.usefixtures("one_process")


# Sums of a few thousand float32 squares in a different order.
FLOAT32 = 1e-5


def transformer() -> Transformer:
    """Two layers, width 48, vocabulary 64; weights large enough that layers and inputs differ visibly."""
    args = TransformerModelArgs(
        dim=48, n_layers=2, n_heads=4, vocab_size=64, multiple_of=16, max_seq_len=32,
        rope_scaling_args=RoPEScalingArgs(scaling_factor=1.0),
    )  # fmt: skip
    model = Transformer(args)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" not in name:
                parameter.copy_(0.1 * torch.randn(parameter.shape, generator=generator))
            else:
                parameter.fill_(1.0)
    return model


def inputs(index: int) -> torch.Tensor:
    """Token ids [2, 16], the same for the same index."""
    return torch.randint(0, 64, (2, 16), generator=torch.Generator().manual_seed(index))


def config_of(freq: int, spectra_freq: int) -> Config:
    return Config(diagnostics=schema.Diagnostics(freq=freq, spectra_freq=spectra_freq))


def one_rank() -> SimpleNamespace:
    return SimpleNamespace(world_size=1, pp=1, dp_replicate=1)


def collect(diagnostics: Diagnostics, step: int) -> dict[str, float]:
    """The metrics of a step on one rank."""
    numbers = RankNumbers(diagnostics.factors, torch.device("cpu"))
    return diagnostics.collect(step, numbers.gather(diagnostics.measure(step)))


def _sizes_by_hand(model, batches):
    """RMS and largest magnitude of the measured outputs of a plain model, by the test's own hook."""
    seen = {}
    for layer, block in model.layers.items():
        for part, module in (("attention", block.attention), ("ffn", block.feed_forward)):
            outputs = seen.setdefault((layer, part), [])
            module.register_forward_hook(
                lambda _, __, output, outputs=outputs: outputs.append(output.detach().double())
            )
    for batch in batches:
        model(batch)
    return {
        key: (torch.stack(outputs).square().mean().sqrt().item(), torch.stack(outputs).abs().max().item())
        for key, outputs in seen.items()
    }


@pytest.mark.parametrize("compile", [False, True])
def test_output_sizes_equal_a_hand_written_hook(compile):
    """With activation checkpointing."""
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    model = transformer()
    for name, block in model.layers.named_children():
        block = checkpoint_wrapper(block, preserve_rng_state=False)
        if compile:
            block = torch.compile(block, backend="aot_eager_decomp_partition", fullgraph=True)
        model.layers.register_module(name, block)
    config = config_of(freq=3, spectra_freq=0)
    config.training.steps = 5
    diagnostics = Diagnostics(config, [model], None, one_rank())
    collected = {}
    for step in range(1, 7):
        diagnostics.begin_step(step)
        for micro_batch in range(2):
            model(inputs(10 * step + micro_batch)).square().mean().backward()
        if step in (1, 3, 5, 6):  # counted once, although activation checkpointing ran every forward pass twice
            sizes = model.get_buffer(next(name for name, _ in model.named_buffers() if "output_sizes" in name))
            assert sizes[COUNT] == 2 * inputs(0).numel() * 48
        with torch.no_grad():  # the forward pass is like a validation between steps
            collected[step] = collect(diagnostics, step)
            model(inputs(999))
    assert [step for step, metrics in collected.items() if metrics] == [1, 3, 5, 6]
    for step in (1, 3, 5, 6):
        expected = _sizes_by_hand(transformer(), [inputs(10 * step), inputs(10 * step + 1)])
        for (layer, part), (rms, largest) in expected.items():
            assert collected[step][f"signal/{part}/rms/{layer}"] == pytest.approx(rms, rel=FLOAT32)
            assert collected[step][f"signal/{part}/absmax/{layer}"] == pytest.approx(largest, rel=FLOAT32)
    # control: other micro-batches give sizes far outside the tolerance
    other = _sizes_by_hand(transformer(), [inputs(10)])
    assert abs(collected[1]["signal/ffn/rms/0"] / other["0", "ffn"][0] - 1) > 100 * FLOAT32
    if compile:
        # measured or not, with gradients or not: all blocks share these graphs
        assert torch._dynamo.utils.counters["stats"]["unique_graphs"] <= 3
        assert not torch._dynamo.utils.counters["graph_break"]


@pytest.mark.parametrize(
    "enable, blocks", [(True, ["o", "ffn"]), (False, ["o", "ffn"]), (False, ["layers.*.attention.wo.weight", "ffn"])]
)
def test_spectra_equal_a_float64_svd(enable, blocks):
    sections = {"diagnostics": schema.Diagnostics(freq=0, spectra_freq=5), "pc": {"enable": enable, "blocks": blocks}}
    config = Config(**sections)
    model = transformer()
    preconditioner = None
    if enable:
        model = pc.attach(model, pc.PCConfig(power_iterations=3))
        preconditioner = pc.precondition(model)
    diagnostics = Diagnostics(config, [model], preconditioner, one_rank())
    metrics = collect(diagnostics, 5)
    assert len(diagnostics._update._weights) == 4 * len(model.layers)

    conditions = {}
    for name, module in model.named_modules():
        if isinstance(module, torch.nn.Linear) and name != "output":
            sigma = torch.linalg.svdvals(module.weight.detach().double())
            tenth = math.ceil(len(sigma) / 10)
            conditions[name] = (sigma[0] / sigma[-tenth:].mean()).item()
            # Float32 results; the Gram matrix in float64 loses nothing at these condition numbers.
            assert metrics[f"spectra/condition/{name}"] == pytest.approx(conditions[name], rel=1e-5)
    product = math.prod(conditions.values())
    assert metrics["spectra/gmcn/all"] == pytest.approx(product ** (1 / len(conditions)), rel=1e-5)
    pc_blocks = [k for n, k in conditions.items() if n.endswith(("wo", "w1", "w2", "w3"))]
    assert metrics["spectra/gmcn/pc"] == pytest.approx(math.prod(pc_blocks) ** (1 / len(pc_blocks)), rel=1e-5)

    if not enable:
        assert not any("estimate_error" in key for key in metrics)
    if enable:
        errors = []
        for name, weight in preconditioner.weights.items():
            if name.endswith("wo"):
                orig, u, v = (tensor.detach().double() for tensor in (weight.orig, weight.u, weight.v))
                norm = torch.linalg.matrix_norm(orig, 2)
                errors.append(((u @ orig @ v - norm).abs() / norm).item())
        # s itself is rounded to float32 and includes an epsilon of 1e-7
        assert metrics["spectra/estimate_error/o/max"] == pytest.approx(max(errors), abs=2e-6)
        assert max(errors) > 1e-3  # three iterations from a random start leave a visible error


def test_weights_that_are_not_finite_do_not_end_the_run():
    model = transformer()
    with torch.no_grad():
        model.layers["1"].attention.wo.weight[0, 0] = math.inf
    metrics = collect(Diagnostics(config_of(freq=0, spectra_freq=1), [model], None, one_rank()), 1)
    assert math.isnan(metrics["spectra/condition/layers.1.attention.wo"])
    assert math.isfinite(metrics["spectra/condition/layers.0.attention.wo"])


def test_gamma_and_norm():
    model = pc.attach(transformer(), pc.PCConfig())
    # on a CPU torch's float32 norm of millions of numbers is 1e-4 too small
    model.tok_embeddings = torch.nn.Embedding(100_000, 48)
    model.tok_embeddings.weight.data *= 0.01  # so that the other weights matter
    preconditioner = pc.precondition(model)
    with torch.no_grad():
        for i, weight in enumerate(preconditioner.weights.values()):
            weight.gamma.fill_(1 + 0.25 * i)
    preconditioner.write_pc()
    effective = {id(weight.effective) for weight in preconditioner.weights.values()}
    trained = [p for p in model.parameters() if id(p) not in effective]
    orig_norm = math.sqrt(sum(p.double().square().sum().item() for p in trained))
    diagnostics = Diagnostics(config_of(freq=1, spectra_freq=0), [model], preconditioner, one_rank())
    diagnostics.begin_step(1)
    model(inputs(0))
    metrics = collect(diagnostics, 1)
    assert metrics["norm/weight"] == pytest.approx(orig_norm, rel=FLOAT32)
    all_norm = math.sqrt(sum(p.double().square().sum().item() for p in model.parameters()))
    assert abs(all_norm / orig_norm - 1) > 1e-2  # control: counting PC(W) as well would show
    assert [v for k, v in sorted(metrics.items()) if k.startswith("pc/gamma/")][:3] == [1.0, 1.25, 1.5]
    assert len([k for k in metrics if k.startswith("pc/gamma/")]) == 8


@pytest.mark.parametrize("enable", [True, False])
def test_effective_norm_and_relative_step(enable):
    """Of the weights of o and ffn that the forward pass uses, with PC and without."""
    model = transformer()
    preconditioner = pc.precondition(pc.attach(model, pc.PCConfig())) if enable else None
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3)
    if preconditioner is not None:
        preconditioner.follow(optimizer)
    weights = {
        n: p for n, p in model.named_parameters() if n.endswith(("wo.weight", "w1.weight", "w2.weight", "w3.weight"))
    }
    before = {name: weight.detach().double().clone() for name, weight in weights.items()}
    diagnostics = Diagnostics(config_of(freq=0, spectra_freq=1), [model], preconditioner, one_rank())
    model(inputs(0)).square().mean().backward()
    diagnostics.begin_update(1)
    if preconditioner is not None:
        preconditioner.pull_back()
    optimizer.step()
    metrics = collect(diagnostics, 1)
    norm = math.sqrt(sum(weight.square().sum().item() for weight in before.values()))
    change = math.sqrt(sum((weights[name].double() - before[name]).square().sum().item() for name in weights))
    assert metrics["norm/effective"] == pytest.approx(norm, rel=1e-12)
    assert change > 1e-4 * norm  # control: float32 rounding would be 1e-7
    assert metrics["norm/relative_step"] == pytest.approx(change / norm, rel=FLOAT32)
