"""The loss in chunks of tokens against the loss of whole logits: same training, less memory."""

import pytest
import torch
import torch.nn.functional as F
from torch.profiler import ProfilerActivity, profile

import pc.titan.loss
import tiny
from pc.titan.loss import DeferredHead, chunked_cross_entropy
from ranks import run_ranks

pytestmark = pytest.mark.skipif(torch.__version__ < (2, 13), reason="torch has linear_cross_entropy since 2.13")

CHUNKED = ["--training.chunked_loss", "true"]
COMPILED = ["--compile.enable", "true", "--compile.backend", "aot_eager"]
CASES = {
    1: {"whole": [], "chunked": CHUNKED, "chunked, compiled, recomputed": [
        *CHUNKED, *COMPILED, "--activation_checkpoint.mode", "full"]},
    2: {"FSDP2": CHUNKED, "FSDP2, baseline": [*CHUNKED, "--pc.enable", "false"], "baseline": ["--pc.enable", "false"]},
}  # fmt: skip


def _train_all(rank, config, cases):
    calls = []
    original = pc.titan.loss.chunked_cross_entropy
    pc.titan.loss.chunked_cross_entropy = lambda *args: calls.append(1) or original(*args)
    states, counts = [], []
    for overrides in cases:
        calls.clear()
        states.append(tiny.train(rank, config, overrides))
        counts.append(len(calls))
    return states, counts


def test_training_is_the_same(tiny_config, tmp_path):
    config, _ = tiny_config
    losses, validations, weights, calls = {}, {}, {}, {}
    for ranks, cases in CASES.items():
        overrides = [[*case, "--job.dump_folder", str(tmp_path / name)] for name, case in cases.items()]
        states, counts = run_ranks(ranks, _train_all, config, overrides)[0]
        for name, state, count in zip(cases, states, counts, strict=True):
            losses[name], validations[name] = (
                tiny.metrics(tmp_path / name, key) for key in ("loss", "validation_loss")
            )
            weights[name], calls[name] = state, count
    # six steps of 12 micro-batches, or of 6 on each of two ranks; validation makes logits
    assert calls == {
        "whole": 0, "chunked": 72, "chunked, compiled, recomputed": 72, "FSDP2": 36, "FSDP2, baseline": 36, "baseline": 0,
    }  # fmt: skip
    for name in CASES[1] | CASES[2]:
        reference = "baseline" if "baseline" in name else "whole"
        # float32 sums in another order, through six optimizer steps
        assert losses[name] == pytest.approx(losses[reference], rel=5e-5), name
        assert validations[name] == pytest.approx(validations[reference], rel=5e-5), name
        for key, tensor in weights[reference].items():
            torch.testing.assert_close(weights[name][key], tensor, rtol=0, atol=2e-3, msg=f"{name}: {key}")
    assert losses["whole"][-1] != pytest.approx(losses["baseline"][-1], rel=1e-4)  # control


@pytest.mark.parametrize("dtype, tolerance", [(torch.float64, 1e-12), (torch.bfloat16, 1e-2)])
def test_value_and_gradients(dtype, tolerance):
    """In bfloat16 against float64 of the same numbers: roundings of 2^-9 to gradients."""
    generator = torch.Generator().manual_seed(0)
    head = DeferredHead(16, 50, bias=False, dtype=dtype)
    states = torch.randn(2, 40, 16, generator=generator, dtype=dtype, requires_grad=True)
    labels = torch.randint(0, 50, (2, 40), generator=generator)
    labels[0, :7] = -100  # left out of the sum
    loss = chunked_cross_entropy(head(states), labels)
    gradients = torch.autograd.grad(loss, [states, head.weight])
    exact = [tensor.detach().double().requires_grad_() for tensor in (states, head.weight)]
    expected = F.cross_entropy(F.linear(*exact).flatten(0, 1), labels.flatten(), reduction="sum", ignore_index=-100)
    assert loss.item() == pytest.approx(expected.item(), rel=tolerance)
    for actual, reference in zip(gradients, torch.autograd.grad(expected, exact), strict=True):
        assert (actual - reference).norm() < tolerance * reference.norm()
    # without gradients, and in evaluation, it is a head like any other
    with torch.no_grad():
        logits = head(states)
    assert torch.equal(head.eval()(states), logits) and torch.equal(logits, F.linear(states, head.weight))


def _peak_bytes(function) -> int:
    """By torch's own record of its allocations, those inside its operations included."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as record:
        function()
    held = peak = 0
    for event in sorted(record.profiler.kineto_results.events(), key=lambda event: event.start_ns()):
        if event.name() == "[memory]":
            held += event.nbytes()
            peak = max(peak, held)
    return peak


def test_logits_are_never_whole():
    tokens, vocabulary = 4096, 4000
    head = DeferredHead(8, vocabulary, bias=False)
    states, labels = torch.randn(1, tokens, 8, requires_grad=True), torch.zeros(1, tokens, dtype=torch.long)
    chunked = _peak_bytes(lambda: chunked_cross_entropy(head(states), labels).backward())
    logits = 4 * tokens * vocabulary
    assert chunked < 0.3 * logits
    whole = _peak_bytes(
        lambda: F.cross_entropy(F.linear(states, head.weight)[0], labels[0], reduction="sum").backward()
    )
    assert whole == pytest.approx(3 * logits, rel=0.02)  # as pc.launch.memory counts
