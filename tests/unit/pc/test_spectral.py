import pytest
import torch

from pc.spectral import EPSILON, initial_vectors, power_iteration, spectral_norm_estimate

pytestmark = pytest.mark.fast


def _start(weights):
    pairs = [initial_vectors(f"layer.{i}", weights.shape[-2:]) for i in range(weights.size(0))]
    return torch.stack([u for u, _ in pairs]).double(), torch.stack([v for _, v in pairs]).double()


def test_power_iteration_finds_the_spectral_norm():
    weights = torch.randn(3, 12, 20, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    exact = torch.linalg.svdvals(weights)[:, 0]
    few = spectral_norm_estimate(weights, *power_iteration(weights, *_start(weights), 3))
    many = spectral_norm_estimate(weights, *power_iteration(weights, *_start(weights), 2000))
    torch.testing.assert_close(many, exact + EPSILON, rtol=1e-10, atol=0)
    assert ((exact - few) / exact).min() > 1e-4  # control: three steps do not suffice
    assert (few <= exact + EPSILON).all()  # a Rayleigh quotient never overshoots


def test_initial_vectors_depend_on_the_name_alone():
    torch.manual_seed(1)
    u, v = initial_vectors("layers.0.attention.wo", (5, 7))
    torch.manual_seed(2)
    again = initial_vectors("layers.0.attention.wo", (5, 7))
    other = initial_vectors("layers.1.attention.wo", (5, 7))
    assert torch.equal(u, again[0]) and torch.equal(v, again[1])
    assert not torch.equal(u, other[0])
    assert u.norm().item() == pytest.approx(1.0, abs=1e-6)


def test_initial_vectors_are_drawn_on_the_cpu_whatever_the_default_device():
    with torch.device("meta"):
        assert initial_vectors("a", (3, 4))[0].device.type == "cpu"
