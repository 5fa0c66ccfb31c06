"""Estimates the time of a step and of PC on a GPU, from counted FLOPs and bytes and from data-sheet rates.

No figure here is measured. `benchmarks/all_rows.py` compares them with measurements.
"""

from dataclasses import dataclass, replace
from functools import cache

from pc.owner import BUCKET_BYTES, buckets
from pc.plan.cost import Plan
from pc.plan.traffic import Traffic, of_passes
from pc.titan import memory

PRECISIONS = ("float32", "tf32", "bfloat16")
GPUS_PER_NODE = 8
"""GPUs connected by NVLink"""


@dataclass(frozen=True)
class Device:
    """Rates from the data sheet, without sparsity."""

    flops: dict[str, float]
    """FLOP/s by precision"""
    memory: float
    """bytes per second"""
    nvlink: float
    """bytes per second in one direction, to the other GPUs of a node"""
    network: float
    """bytes per second in one direction, per GPU"""
    gib: float
    """GiB of memory, as torch reports it"""


def _device(
    float32: float, tf32: float, bfloat16: float, memory: float, nvlink: float, network: float, gib: float
) -> Device:
    """Takes TFLOP/s, GB/s and GiB."""
    flops = {"float32": float32 * 1e12, "tf32": tf32 * 1e12, "bfloat16": bfloat16 * 1e12}
    return Device(flops, memory * 1e9, nvlink * 1e9, network * 1e9, gib)


# NVIDIA's data sheets: H100 SXM, H200 SXM, HGX B200 (one of its eight GPUs), A100 80GB SXM. Tensor-core figures there
# include sparsity and NVLink figures count both directions, so both are halved here. Networks are those of DGX
# systems: a 400 Gb/s adapter per GPU, 200 Gb/s with A100.
DEVICES: dict[str, Device] = {
    "H100": _device(67, 494.5, 989, 3350, 450, 50, 79),
    "H200": _device(67, 494.5, 989, 4800, 450, 50, 139),
    "B200": _device(75, 1100, 2250, 7700, 900, 50, 178),
    "A100": _device(19.5, 156, 312, 2039, 300, 25, 79),
}


@dataclass(frozen=True)
class Reached:
    """Assumed fractions of the data-sheet rates, and times that are not in data sheets."""

    model: float = 0.45
    """MFU of a whole step in bfloat16, attention counted causally. TorchTitan, Megatron-LM and the paper's authors
    report 40 to 50 % for dense models of about 1B to 8B on H100s, without counting recomputation."""
    products: dict[str, float] | None = None
    """of a large cuBLAS matmul; `PRODUCTS`"""
    memory: float = 0.8
    """of an elementwise kernel on tens of MiB; stream benchmarks reach 0.85 to 0.93"""
    link: float = 0.7
    """of an all-to-all of hundreds of MiB; nccl-tests reach 0.7 to 0.8 of NVLink"""
    launch: float = 6e-6
    """host seconds to launch a kernel through PyTorch's dispatcher; kernels overlap with later launches"""
    peer: float = 2e-6
    """seconds of a collective per rank it communicates with, in addition to 20e-6"""


# Published cuBLAS measurements on H100 reach 0.65 to 0.8 of the data sheet for bfloat16 (power limits the clock), and
# 0.75 to 0.85 for float32 without tensor cores.
PRODUCTS = {"float32": 0.75, "tf32": 0.7, "bfloat16": 0.7}
REACHED = Reached(products=PRODUCTS)


_traffic_of_passes = cache(of_passes)


@dataclass(frozen=True)
class StepTime:
    """Seconds of one optimizer step, by part."""

    model: float
    """forward and backward passes, the optimizer, and FSDP's communication that overlaps with them"""
    materialise: float
    pull_back: float
    exchange: float
    """sending matrices to owners and back"""
    copies: float
    """copying raw weights in and out"""

    @property
    def pc(self) -> float:
        return self.materialise + self.pull_back + self.exchange + self.copies


def estimate(plan: Plan, device: Device, precision: str, reached: Reached = REACHED) -> StepTime:
    """A step of the plan with PC's matmuls in `precision` (of `PRECISIONS`), on the rank with the most PC work."""
    matrices = tuple((m.n, m.m, replace(m.config, compute_dtype=precision)) for m in plan.busiest_matrices())
    passes = _traffic_of_passes(matrices)
    seconds = {name: _seconds(traffic, device, reached) / plan.pipeline_parallel for name, traffic in passes.items()}
    weights = 4 * sum(matrix.n * matrix.m for matrix in plan.matrices) / plan.pipeline_parallel
    rate = device.memory * reached.memory
    return StepTime(
        model=max(
            plan.step_cost().model / plan.world_size / (device.flops["bfloat16"] * reached.model),
            _fsdp_seconds(plan, device, reached),
        ),
        materialise=seconds["materialise"],
        pull_back=seconds["pull back"],
        exchange=_exchange_seconds(plan, weights, device, reached),
        copies=2 * 2 * weights / plan.owners / rate,  # raw into weight and weight into raw, read and written
    )


def in_graph_seconds(plan: Plan, device: Device, reached: Reached = REACHED) -> float:
    """Schedule "forward" on one rank: only its matmuls, in the bfloat16 of FSDP's weights."""
    return plan.step_cost().pc_forward / plan.world_size / (device.flops["bfloat16"] * reached.products["bfloat16"])


def _seconds(traffic: Traffic, device: Device, reached: Reached) -> float:
    """Each kernel is limited by FLOPs or bytes; all of them together by the host's launches."""
    rate = device.memory * reached.memory
    kernels = sum(
        max(k.flops / (device.flops[k.precision] * reached.products[k.precision]), k.bytes / rate)
        for k in traffic.kernels
    )
    return max(kernels, reached.launch * len(traffic.kernels))


def _fsdp_seconds(plan: Plan, device: Device, reached: Reached) -> float:
    """All-gathers of weights in bfloat16 and reduce-scatters of gradients in float32; these overlap with matmuls.

    Either each once per step; or for every micro-batch, the weights then twice, for forward and backward.
    """
    parameters = sum(p.numel() for p in plan.model.parameters()) / plan.pipeline_parallel / plan.tensor_parallel
    sent = (2 + 4) if exchanges_once(plan, device) else (2 * 2 + 4) * plan.micro_batches
    return sent * parameters * (plan.shards - 1) / plan.shards / (_link(plan.shards, device) * reached.link)


def exchanges_once(plan: Plan, device: Device) -> bool:
    """Whether FSDP gathers and reduces once per step, as `pc.titan.fsdp_sync.choose` decides."""
    config = plan.config
    if not memory.gathers_once(config) or config.parallelism.fsdp_sync == "step":
        return memory.gathers_once(config)
    parts = memory.of_run(config, plan.dims, memory.sizes_of(plan.model))
    return sum(parts.values()) + memory.RESERVE_GIB <= device.gib


def _exchange_seconds(plan: Plan, weights: float, device: Device, reached: Reached) -> float:
    """Pull-back: W and the gradient to the owners, the gradient back. Materialise: W to the owners, PC(W) back."""
    ranks = plan.owners
    if ranks == 1:
        return 0.0
    matrices = 5 * weights  # bytes between ranks
    sent = matrices / ranks * (ranks - 1) / ranks
    link = _link(ranks, device) * reached.link
    collectives = 2 * sum(
        len(buckets(plan.owners_of_matrices(), [size(m) for m in plan.matrices], BUCKET_BYTES))
        for size in (lambda m: m.pull_back_input_bytes(), lambda m: m.materialise_input_bytes())
    )
    # each matrix is copied into and out of a buffer on both sides
    packing = 4 * matrices / ranks / (device.memory * reached.memory)
    return sent / link + packing + collectives * (20e-6 + reached.peer * ranks)


def _link(ranks: int, device: Device) -> float:
    """Bytes per second of a rank in an all-to-all; limited by the network if it spans several nodes."""
    if ranks <= GPUS_PER_NODE:
        return device.nvlink
    return device.network * (ranks - 1) / (ranks - GPUS_PER_NODE)


def table(plan: Plan) -> str:
    """Estimated times by device and precision as a Markdown table."""
    text = [
        "Estimated, not measured (`pc/plan/gpu_time.py` has the rates and assumptions):",
        "",
        f"| {plan.world_size} of | step without PC, s | PC in {' | '.join(PRECISIONS)} | of it exchange, ms | schedule "
        '"forward" |',
        "|---" * 7 + "|",
    ]
    for name, device in DEVICES.items():
        times = {precision: estimate(plan, device, precision) for precision in PRECISIONS}
        model = times["tf32"].model
        cells = [f"{1e3 * t.pc:.3g} ms, {100 * t.pc / model:.2g} %" for t in times.values()]
        in_graph = f"{100 * in_graph_seconds(plan, device) / model:.2g} %"
        cells = [f"{model:.3g}", *cells, f"{1e3 * times['tf32'].exchange:.3g}", in_graph]
        text.append(f"| {name} | " + " | ".join(cells) + " |")
    return "\n".join(text) + "\n"
