"""The chunked loss against the loss of full logits: the same training with less memory."""

import pytest
import torch
import torch.nn.functional as F
from torchtitan.components.loss import cross_entropy_loss

import pc.titan.loss
from helpers import tiny
from helpers.peak_memory import peak_bytes
from helpers.ranks import run_ranks
from pc.titan.loss import DeferredHead, chunked_cross_entropy, loss_and_gradient

CHUNKED = ["--training.chunked_loss", "true"]
QUICK = ["--training.steps", "3", "--checkpoint.enable", "false"]
COMPILED = ["--compile.enable", "true", "--compile.backend", "aot_eager"]
CASES = {
    1: {"whole": [], "chunked": CHUNKED, "chunked, compiled, recomputed": [
        *CHUNKED, *COMPILED, "--activation_checkpoint.mode", "full"]},
    2: {"FSDP2": CHUNKED},
}  # fmt: skip


def _train_all(rank, config, cases):
    calls = []
    original = pc.titan.loss.chunked_cross_entropy
    few = 12 * tiny.VOCAB_SIZE  # of 32 tokens in a micro-batch
    pc.titan.loss.chunked_cross_entropy = lambda *args, **more: (
        calls.append(1) or original(*args, **more, chunk_logits=few)
    )
    states, counts = [], []
    for overrides in cases:
        calls.clear()
        states.append(tiny.train(rank, config, overrides))
        counts.append(len(calls))
    return states, counts


def test_training_is_the_same(tiny_config, tmp_path):
    config, _ = tiny_config
    weights, calls = {}, {}
    for ranks, cases in CASES.items():
        overrides = [[*QUICK, *case, "--job.dump_folder", str(tmp_path / name)] for name, case in cases.items()]
        states, counts = run_ranks(ranks, _train_all, config, overrides)[0]
        for name, state, count in zip(cases, states, counts, strict=True):
            weights[name], calls[name] = state, count
    # three steps of 6 micro-batches, or of 3 on each of two ranks; validation computes full logits
    assert calls == {"whole": 0, "chunked": 18, "chunked, compiled, recomputed": 18, "FSDP2": 9}
    for name in CASES[1] | CASES[2]:
        for key in ("loss", "validation_loss"):
            losses, expected = (tiny.metrics(tmp_path / run, key) for run in (name, "whole"))
            # float32 sums in another order, through three optimizer steps; a step changes the loss by more than 1e-2
            assert losses == pytest.approx(expected, rel=5e-5), name
        for key, tensor in weights["whole"].items():
            torch.testing.assert_close(weights[name][key], tensor, rtol=0, atol=2e-3, msg=f"{name}: {key}")


def _relative(actual, expected) -> float:
    return float((actual - expected).norm() / expected.norm())


@pytest.mark.parametrize(
    "dtype, chunks, of_chunk",
    [
        (torch.float64, 7, loss_and_gradient),
        (torch.bfloat16, 32, loss_and_gradient),
        pytest.param(torch.bfloat16, 32, torch.compile(loss_and_gradient), marks=pytest.mark.soak),
    ],
    ids=["float64", "bfloat16", "bfloat16, compiled"],
)
def test_value_and_gradients(dtype, chunks, of_chunk):
    """Against float64 of the same numbers; in bfloat16 hardly worse than a loss of full logits is."""
    tokens, vocabulary, dim = 2048, 500, 32
    torch.manual_seed(0)
    head = DeferredHead(dim, vocabulary, bias=False, dtype=dtype)
    states = torch.randn(2, tokens // 2, dim, dtype=dtype, requires_grad=True)
    labels = torch.randint(0, vocabulary, (2, tokens // 2))
    labels[0, :700] = -100  # left out of the sum, including complete chunks
    exact = [tensor.detach().double().requires_grad_() for tensor in (states, head.weight)]
    expected = F.cross_entropy(F.linear(*exact).flatten(0, 1), labels.flatten(), reduction="sum", ignore_index=-100)
    expected_gradients = torch.autograd.grad(expected / 1348, exact)
    logits = F.linear(states, head.weight).double()  # as both losses see them: rounded to `dtype`
    of_rounded = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum", ignore_index=-100)
    found = {}
    for name, loss in (
        ("whole", cross_entropy_loss(F.linear(states, head.weight), labels)),
        ("chunked", chunked_cross_entropy(
            head(states), labels, chunk_logits=tokens * vocabulary // chunks, of_chunk=of_chunk)),
    ):  # fmt: skip
        gradients = torch.autograd.grad(loss / 1348, [states, head.weight])
        assert loss.dtype == torch.promote_types(dtype, torch.float32) or name == "whole"
        assert [g.dtype for g in gradients] == [dtype, dtype]
        errors = [_relative(a, b) for a, b in zip(gradients, expected_gradients, strict=True)]
        # sums of 1348 numbers, in float32 unless the loss itself is float64: at most 1e-7 was seen
        assert loss.item() == pytest.approx(of_rounded.item(), rel=1e-12 if loss.dtype == torch.float64 else 1e-6)
        found[name] = errors
    if dtype == torch.float64:
        assert max(found["chunked"]) < 1e-12
    else:
        for mine, whole in zip(found["chunked"], found["whole"], strict=True):
            # each chunk's part of the head's gradient is rounded to bfloat16, where full logits round the sum once
            assert mine < 1.5 * whole < 1e-2


def test_a_second_backward_pass_is_an_error():
    loss = chunked_cross_entropy(DeferredHead(4, 9, bias=False)(torch.randn(1, 3, 4)), torch.zeros(1, 3).long())
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_without_gradients_it_is_a_head():
    head, states = DeferredHead(4, 9, bias=False), torch.randn(1, 3, 4)
    logits = F.linear(states, head.weight)
    with torch.no_grad():
        assert torch.equal(head(states), logits)
    assert torch.equal(head.eval()(states), logits)


def test_logits_are_never_whole():
    tokens, vocabulary = 8192, 4000
    head = DeferredHead(8, vocabulary, bias=False)
    states, labels = torch.randn(1, tokens, 8, requires_grad=True), torch.zeros(1, tokens, dtype=torch.long)
    logits = 4 * tokens * vocabulary
    chunked = peak_bytes(
        lambda: chunked_cross_entropy(head(states), labels, chunk_logits=tokens * vocabulary // 64).backward()
    )
    assert chunked < 0.15 * logits
    # as pc.titan.memory counts
    whole = peak_bytes(lambda: cross_entropy_loss(F.linear(states, head.weight), labels).backward())
    assert whole == pytest.approx(3 * logits, rel=0.02)
