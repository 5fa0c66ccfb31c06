import pytest
import torch

from pc.spectral import initial_vectors

pytestmark = pytest.mark.fast


def test_initial_vectors_depend_on_the_name_alone():
    torch.manual_seed(1)
    u, v = initial_vectors("layers.0.attention.wo", (3, 5, 7))
    torch.manual_seed(2)
    again = initial_vectors("layers.0.attention.wo", (3, 5, 7))
    other = initial_vectors("layers.1.attention.wo", (3, 5, 7))
    assert torch.equal(u, again[0]) and torch.equal(v, again[1])
    assert not torch.equal(u, other[0])
    for vectors in (u, v):
        assert vectors.norm(dim=-1).tolist() == pytest.approx([1.0] * 3, abs=1e-6)


def test_initial_vectors_are_drawn_on_the_cpu_whatever_the_default_device():
    with torch.device("meta"):
        assert initial_vectors("a", (3, 4))[0].device.type == "cpu"
