"""One rank: PC on matrices sharded over all ranks against one CPU in float64, Muon against torch's own.

Ends with an error if they differ. `torchrun --nproc-per-node N tests/gpu/exchange.py DEVICE`
"""

import os
import sys
from copy import deepcopy

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import Shard, distribute_tensor, init_device_mesh

import pc
from helpers.toy import toy_model
from pc.optim.muon import Muon

TOLERANCE = 2e-5  # float32 products in another order, through a polynomial of degree 9
STEPS = 2


def train(model: nn.Module, change) -> dict[str, torch.Tensor]:
    """Steps on synthetic gradients; `change` converts a full float64 CPU tensor to the model's layout."""
    generator = torch.Generator().manual_seed(1)
    preconditioner = pc.precondition(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(STEPS):
        optimizer.zero_grad()
        for name, parameter in model.named_parameters():
            if not name.endswith(("orig", "gamma")):  # pull_back sets their gradients
                parameter.grad = change(torch.randn(parameter.shape, generator=generator, dtype=torch.float64))
        preconditioner.pull_back()
        optimizer.step()
        preconditioner.write_pc()
    return dict(model.named_parameters())


def main() -> None:
    device = sys.argv[1]
    rank = int(os.environ["LOCAL_RANK"])
    if device == "cuda":
        torch.cuda.set_device(rank)
    dist.init_process_group("nccl" if device == "cuda" else "gloo")
    mesh = init_device_mesh(device, (dist.get_world_size(),))

    def cut(tensor):
        return distribute_tensor(tensor.to(device, torch.float32), mesh, [Shard(0)], src_data_rank=None)

    model = pc.attach(toy_model(), pc.PCConfig())
    exact = train(deepcopy(model), lambda tensor: tensor)
    for module in model.modules():
        for name, parameter in list(module.named_parameters(recurse=False)):
            setattr(module, name, nn.Parameter(cut(parameter.detach())))
    found = train(model, cut)
    for name, expected in exact.items():
        difference = (found[name].full_tensor().cpu().double() - expected).abs().max() / expected.abs().max()
        assert difference < TOLERANCE, (name, difference.item())

    weight = torch.randn(10, 7, generator=torch.Generator().manual_seed(2))
    parameters = [nn.Parameter(cut(weight)), nn.Parameter(weight.to(device))]
    for parameter, kind in zip(parameters, (Muon, torch.optim.Muon), strict=True):
        parameter.grad = parameter.detach().clone().cos()
        kind([parameter], lr=0.1).step()
    assert torch.equal(parameters[0].full_tensor(), parameters[1]), "Muon on shards differs from torch's"
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
