"""The machines of a run: their ranks, and the network interface between them."""

import pytest

from pc.errors import UserError
from pc_recipe.runs.nodes import Nodes, find_gloo_interface


@pytest.mark.parametrize(
    "given, complaint",
    [
        ({"NNODES": "2"}, "NNODES=2 needs NODE_RANK, which starts at 0, and MASTER_ADDR"),
        ({"NNODES": "2", "NODE_RANK": "2", "MASTER_ADDR": "a"}, "NODE_RANK below NNODES"),
        ({"NNODES": "two"}, "should be numbers"),
    ],
)
def test_incomplete_places_are_one_line(monkeypatch, given, complaint):
    for name in ("NNODES", "NODE_RANK", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    assert Nodes.from_environment() == Nodes()
    for name, value in given.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(UserError, match=complaint):
        Nodes.from_environment()


def test_gloo_is_told_the_interface_that_reaches_the_other_node():
    assert find_gloo_interface("127.0.0.1") == {"GLOO_SOCKET_IFNAME": "lo"}
    assert find_gloo_interface("node.invalid") == {}
