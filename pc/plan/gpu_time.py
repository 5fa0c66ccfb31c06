"""How long a step and PC in it should take on a GPU: what is counted, over what a data sheet promises and code reaches.

No figure here is measured. `benchmarks/all_rows.py` puts measured ones beside these.
"""

from dataclasses import dataclass, replace
from functools import cache

from pc.owner import BUCKET_BYTES, buckets
from pc.plan.cost import Plan
from pc.plan.traffic import Traffic, of_passes
from pc.titan import memory

PRECISIONS = ("float32", "tf32", "bfloat16")
GPUS_PER_NODE = 8
"""that NVLink joins"""


@dataclass(frozen=True)
class Device:
    """Rates by the maker's data sheet, dense."""

    flops: dict[str, float]
    """operations per second by precision"""
    memory: float
    """bytes per second"""
    nvlink: float
    """bytes per second in one direction, to the other GPUs of a node"""
    network: float
    """bytes per second in one direction, for each GPU"""
    gib: float
    """of memory, as torch reports it"""


def _device(
    float32: float, tf32: float, bfloat16: float, memory: float, nvlink: float, network: float, gib: float
) -> Device:
    """TFLOP/s, GB/s and GiB."""
    flops = {"float32": float32 * 1e12, "tf32": tf32 * 1e12, "bfloat16": bfloat16 * 1e12}
    return Device(flops, memory * 1e9, nvlink * 1e9, network * 1e9, gib)


# NVIDIA's data sheets: H100 SXM, H200 SXM, HGX B200 (an eighth of its eight), A100 80GB SXM. Their figures for tensor
# cores are with sparsity, and half of them stand here; NVLink's count both directions. Networks are those of DGX
# systems: a 400 Gb/s adapter for each GPU, 200 Gb/s beside an A100.
DEVICES: dict[str, Device] = {
    "H100": _device(67, 494.5, 989, 3350, 450, 50, 79),
    "H200": _device(67, 494.5, 989, 4800, 450, 50, 139),
    "B200": _device(75, 1100, 2250, 7700, 900, 50, 178),
    "A100": _device(19.5, 156, 312, 2039, 300, 25, 79),
}


@dataclass(frozen=True)
class Reached:
    """Fractions of the data sheet that are assumed to be reached, and times that it does not have."""

    model: float = 0.45
    """of bfloat16's rate in a whole step, attention counted causally: 40 to 50 % are what TorchTitan, Megatron-LM and
    the paper's authors report for dense models of some 1B to 8B on H100s, in operations without recomputation"""
    products: dict[str, float] | None = None
    """of a large product by cuBLAS; `PRODUCTS`"""
    memory: float = 0.8
    """of an elementwise kernel on tens of MiB; stream benchmarks reach 0.85 to 0.93"""
    link: float = 0.7
    """of an all-to-all of hundreds of MiB; nccl-tests reach 0.7 to 0.8 of NVLink"""
    launch: float = 6e-6
    """seconds of the host for a kernel, through PyTorch's dispatcher; kernels overlap with later launches"""
    peer: float = 2e-6
    """seconds that a collective takes for each rank it exchanges with, over 20e-6 for itself"""


# Published cuBLAS measurements on H100 lie at 0.65 to 0.8 of the data sheet for bfloat16 (power limits the clock), and
# float32 without tensor cores at 0.75 to 0.85.
PRODUCTS = {"float32": 0.75, "tf32": 0.7, "bfloat16": 0.7}
REACHED = Reached(products=PRODUCTS)


_traffic_of_passes = cache(of_passes)


@dataclass(frozen=True)
class StepTime:
    """Seconds of one optimizer step, by part."""

    model: float
    """forward and backward passes, the optimizer and FSDP's exchange behind them"""
    materialise: float
    pull_back: float
    exchange: float
    """of matrices to owners and back"""
    copies: float
    """of raw weights in and out"""

    @property
    def pc(self) -> float:
        return self.materialise + self.pull_back + self.exchange + self.copies


def estimate(plan: Plan, device: Device, precision: str, reached: Reached = REACHED) -> StepTime:
    """A step of the plan with PC's products in `precision` (of `PRECISIONS`), on the rank that does most of PC."""
    matrices = tuple((m.n, m.m, replace(m.config, compute_dtype=precision)) for m in plan.busiest_matrices())
    passes = _traffic_of_passes(matrices)
    seconds = {name: _seconds(traffic, device, reached) / plan.pipeline_parallel for name, traffic in passes.items()}
    weights = 4 * sum(matrix.n * matrix.m for matrix in plan.matrices) / plan.pipeline_parallel
    rate = device.memory * reached.memory
    return StepTime(
        model=max(_model_seconds(plan, device, reached), _fsdp_seconds(plan, device, reached)),
        materialise=seconds["materialise"],
        pull_back=seconds["pull back"],
        exchange=_exchange_seconds(plan, weights, device, reached),
        copies=2 * 2 * weights / plan.owners / rate,  # raw into weight and weight into raw, read and written
    )


def in_graph_seconds(plan: Plan, device: Device, reached: Reached = REACHED) -> float:
    """Schedule "forward" on one rank: its products alone, in the bfloat16 of FSDP's weights."""
    return plan.step_cost().pc_forward / plan.world_size / (device.flops["bfloat16"] * reached.products["bfloat16"])


def _seconds(traffic: Traffic, device: Device, reached: Reached) -> float:
    """Each kernel is bound by its operations or its bytes, all of them together by the host that launches them."""
    rate = device.memory * reached.memory
    kernels = sum(
        max(k.flops / (device.flops[k.precision] * reached.products[k.precision]), k.bytes / rate)
        for k in traffic.kernels
    )
    return max(kernels, reached.launch * len(traffic.kernels))


def _model_seconds(plan: Plan, device: Device, reached: Reached) -> float:
    return plan.step_cost().model / plan.world_size / (device.flops["bfloat16"] * reached.model)


def _fsdp_seconds(plan: Plan, device: Device, reached: Reached) -> float:
    """Weights gathered in bfloat16, gradients reduced in float32; it passes behind the products, unless it takes longer.

    Once per step each, or for each micro-batch the weights twice, for its forward and its backward pass.
    """
    parameters = sum(p.numel() for p in plan.model.parameters()) / plan.pipeline_parallel / plan.tensor_parallel
    sent = (2 + 4) if exchanges_once(plan, device) else (2 * 2 + 4) * plan.micro_batches
    return sent * parameters * (plan.shards - 1) / plan.shards / (_link(plan.shards, device) * reached.link)


def exchanges_once(plan: Plan, device: Device) -> bool:
    """Whether FSDP gathers and reduces once per step there: as `pc.titan.fsdp_sync.choose` decides."""
    config = plan.config
    if not memory.gathers_once(config) or config.parallelism.fsdp_sync == "step":
        return memory.gathers_once(config)
    parts = memory.of_run(config, plan.dims, memory.sizes_of(plan.model))
    return sum(parts.values()) + memory.RESERVE_GIB <= device.gib


def _exchange_seconds(plan: Plan, weights: float, device: Device, reached: Reached) -> float:
    """W and the gradient to the owners and the gradient back; W to the owners, PC(W) back."""
    ranks = plan.owners
    if ranks == 1:
        return 0.0
    matrices = 5 * weights  # that pass between ranks
    sent = matrices / ranks * (ranks - 1) / ranks
    link = _link(ranks, device) * reached.link
    collectives = 2 * sum(
        len(buckets(plan.owners_of_matrices(), [size(m) for m in plan.matrices], BUCKET_BYTES))
        for size in (lambda m: m.pull_back_input_bytes(), lambda m: m.materialise_input_bytes())
    )
    # each matrix is laid into a buffer and taken out of one on either side
    packing = 4 * matrices / ranks / (device.memory * reached.memory)
    return sent / link + packing + collectives * (20e-6 + reached.peer * ranks)


def _link(ranks: int, device: Device) -> float:
    """Bytes per second that a rank exchanges with all others evenly: bound by the network beyond a node."""
    if ranks <= GPUS_PER_NODE:
        return device.nvlink
    return device.network * (ranks - 1) / (ranks - GPUS_PER_NODE)


def table(plan: Plan) -> str:
    """Estimated seconds by device and precision as Markdown."""
    text = [
        "Estimated, not measured (`pc/plan/gpu_time.py` has rates and what is assumed):",
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
