"""Could the pull back of a layer start before the backward pass of the layers below it ends? The order of events on two ranks.

    torchrun --nproc-per-node 2 benchmarks/order.py

FSDP2 calls a weight's post-accumulate hook as soon as its gradient is reduced. The hook pulls that layer's gradient back, both
all-to-alls included, while autograd has yet to walk through the layers below. A line for each event: milliseconds since the
backward pass began, on rank 0, and what began or ended. Then whether every rank had the events in one order, which collectives
need, and whether the gradients are those of a pull back after the backward pass, bit for bit. A sketch: nothing calls this in a
training step.
"""

import argparse
import time

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard

import pc
from pc.shards import local
from pc.step import Step

LAYERS, WIDTH, BATCH = 4, 512, 2048


def main() -> None:
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Sequential(nn.Linear(WIDTH, WIDTH, bias=False), nn.GELU()) for _ in range(LAYERS)))
    pc.attach(model, pc.PCConfig(blocks=("*",)))
    for layer in model:
        fully_shard(layer)
    fully_shard(model)
    preconditioner = pc.precondition(model)
    weights = preconditioner.weights
    begun, events, early = 0.0, [], {}

    def note(what: str) -> None:
        events.append((1000 * (time.perf_counter() - begun), what))

    def pull_back(name: str, step: Step) -> None:
        note(f"layer {name}: its gradient is reduced, pull back begins")
        tensors = weights[name].tensors()
        early[name] = step.pull_back({name: tensors}, [tensors.effective.grad])[0]
        note(f"layer {name}: pull back ends")

    for index, (name, weight) in enumerate(weights.items()):
        step = Step({name: weight.split}, None, [])
        weight.effective.register_post_accumulate_grad_hook(lambda _, name=name, step=step: pull_back(name, step))
        layer = model[index]
        layer.register_full_backward_pre_hook(lambda *_, name=name: note(f"layer {name}: backward begins"))
        layer.register_full_backward_hook(lambda *_, name=name: note(f"layer {name}: backward ends"))
    loss = model(torch.randn(BATCH, WIDTH).requires_grad_()).square().mean()
    begun = time.perf_counter()
    loss.backward()
    note("the backward pass ends")
    preconditioner.pull_back()

    orders: list[list[str]] = [[]] * dist.get_world_size()
    dist.all_gather_object(orders, [what for _, what in events])
    is_equal = [
        torch.equal(local(of_early), local(parameter.grad))
        for name, weight in weights.items()
        for of_early, parameter in zip(early[name], (weight.orig, weight.gamma), strict=True)
    ]
    if dist.get_rank() == 0:
        for milliseconds, what in events:
            print(f"{milliseconds:8.1f}  {what}")
        print("one order on all ranks:", all(order == orders[0] for order in orders))
        print("gradients of W and gamma as after the backward pass, bit for bit:", all(is_equal))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
