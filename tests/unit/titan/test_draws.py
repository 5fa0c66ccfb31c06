import math
from statistics import NormalDist

import pytest
import torch

from pc.titan import draws
from pc.titan.llama2 import Llama2, draw_parameter, model_args

MASK = 2**64 - 1


def _splitmix64(seed: int, counter: int) -> int:
    """The published generator in Python's integers."""
    z = (seed + (counter + 1) * 0x9E3779B97F4A7C15) & MASK
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & MASK
    return z ^ (z >> 31)


def _whole(shape, seed=5, **options) -> torch.Tensor:
    block = torch.empty(shape)
    draws.fill_normal_(block, seed, shape[1], (0, 0), **{"std": 1.0, **options})
    return block


def test_bits_are_splitmix64():
    assert _splitmix64(0, 0) == 0xE220A8397B1DCDAF  # the published first output for seed 0
    seed = draws.seed_of("0.layers.0.attention.wq.weight")
    counters = [0, 1, 2, 77, 2**31, 2**40 + 3]
    found = draws.random_bits_(torch.tensor(counters), seed)
    assert [bits & MASK for bits in found.tolist()] == [_splitmix64(seed & MASK, c) for c in counters]


def test_numbers_are_those_of_another_implementation_of_the_normal():
    """A CPU's test of equality between devices: another implementation of the inverse normal distribution (Python's,
    Wichura's algorithm) gives the same float32 numbers."""
    shape, std = (40, 500), 0.02
    drawn = _whole(shape, std=std).flatten().tolist()
    uniforms = (((_splitmix64(5, c) >> 12) + 0.5) / 2**52 for c in range(math.prod(shape)))
    expected = torch.tensor([std * NormalDist().inv_cdf(u) for u in uniforms]).tolist()
    different = [(a, b) for a, b in zip(drawn, expected, strict=True) if a != b]
    # an error of some 1e-15 in float64 changes the float32 rounding once in 10^7 numbers
    assert len(different) <= 1, different[:3]
    # control: computed in float32 throughout, most numbers would differ
    single = [std * math.sqrt(2) * x for x in torch.erfinv(torch.tensor(drawn).div(std * math.sqrt(2)).erf()).tolist()]
    assert sum(a != b for a, b in zip(single, expected, strict=True)) > 1000


def test_any_block_is_its_part_of_the_whole():
    whole = _whole((900, 300))  # drawn in several parts
    for rows in (slice(0, 900), slice(2, 500), slice(899, 900), slice(900, 900)):
        for columns in (slice(0, 300), slice(3, 299), slice(299, 300)):
            block = torch.full_like(whole[rows, columns], math.nan)
            draws.fill_normal_(block, 5, 300, (rows.start, columns.start), 1.0)
            assert torch.equal(block, whole[rows, columns])


def test_distribution():
    n = 1_000_000
    x = _whole((1000, 1000)).double()
    # five standard errors of each
    assert abs(x.mean()) < 5 / n**0.5 and abs(x.var() - 1) < 5 * (2 / n) ** 0.5
    assert abs(x.pow(4).mean() - 3) < 5 * (96 / n) ** 0.5
    for step in (1, 1000):  # neighbours in a row and in a column
        assert abs((x.flatten()[:-step] * x.flatten()[step:]).mean()) < 5 / n**0.5
    assert abs((x * _whole((1000, 1000), seed=6)).mean()) < 5 / n**0.5
    assert 4.2 < x.abs().max() < 6.5
    cut = _whole((1000, 1000), cut=3.0)
    assert 2.99 < cut.abs().max() <= 3.0 and abs(cut.var() - 0.9733) < 0.006  # the variance of a normal cut at 3


def test_parameters_of_llama():
    args = model_args("nano")
    with torch.device("meta"):
        shapes = {name: parameter.shape for name, parameter in Llama2(args).named_parameters()}
    name = "layers.2.feed_forward.w2.weight"
    weight, again, other = (torch.empty(shapes[name]) for _ in range(3))
    draw_parameter(name, weight, args)
    draw_parameter(name, again, args)
    draw_parameter(name.replace("2", "3", 1), other, args)
    assert torch.equal(weight, again) and not torch.equal(weight, other)
    assert weight.std().item() == pytest.approx(0.02 / 6**0.5, rel=0.01)
    head = torch.empty(shapes["output.weight"])
    draw_parameter("output.weight", head, args)
    assert head.abs().max().item() <= 3 * args.dim**-0.5
