"""The paper's released trainer against ours: losses from equal weights on equal batches, in float64 on one CPU process.

    git clone https://github.com/Empath-aln/PC-layer released
    OMP_NUM_THREADS=1 python benchmarks/released_trainer.py --clone released [--output results/DATE-NAME.json]

Their `train.main()` runs from the clone with their 271M configs at width 128, ours with ours; no copy of theirs is here.
Replaced in theirs: CUDA (devices, moves, memory statistics), NCCL (gloo), loader and tokenizer (the batches of our run),
initial weights, u and v (ours), checkpoints, saved sources, logging and swanlab, the fused RMSNorm (their plain one). On
both sides `Tensor.float` gives float64.
"""

import argparse
import json
import os
import runpy
import subprocess
import sys
import tempfile
from concurrent.futures import ProcessPoolExecutor
from functools import cache, partial
from multiprocessing import get_context
from pathlib import Path
from types import ModuleType, SimpleNamespace
from unittest.mock import MagicMock

import torch
from torch import nn

import pc
from pc.command import exit_on_user_error
from pc.spectral import initial_vectors
from pc_recipe.data.demo import make_demo
from pc_recipe.files.atomic import write_atomically
from timing import interleaved

STEPS, VOCABULARY, SEQ_LEN, BATCH, MICRO_BATCHES = 40, 32_000, 32, 2, 2
RATE = {"AdamW": 2e-3, "Muon": 4e-3}
# Optimizer, row, changes of ours, changes of theirs. "exact": Newton-Schulz in float64, and theirs without the epsilons
# in normalising u and v, in Newton-Schulz and, with Muon, in AdamW (relative to another quantity in theirs).
EXACT_MUON = ("exact", "--optimizer.eps=1e-30")  # 0 would divide 0 by 0 for tokens not seen yet
ROWS = [
    ("AdamW", "baseline", ("--pc.enable=false",), ("baseline",)),
    ("AdamW", "level 4", (), ()),
    ("AdamW", "level 4, without their epsilon in normalising u and v", (), ("exact",)),
    ("AdamW", "control: theirs, s not detached", (), ("exact", "s not detached")),
    ("AdamW", "control: theirs, divisor detached", (), ("exact", "divisor detached")),
    ("AdamW", "control: ours, level 3", ("--pc.level=3",), ("exact",)),
    ("Muon", "level 2", (), ()),
    ("Muon", "level 2, Newton-Schulz in float64, without three epsilons", EXACT_MUON, ("exact",)),
    ("Muon", "control: ours, level 3", (*EXACT_MUON, "--pc.level=3"), ("exact",)),
    ("AdamW", "level 4, each with its own warm-up of 4 steps", ("--lr_scheduler.warmup_steps=4",), ("warm-up",)),
]


def in_float64(port: int) -> None:
    """Make this process the only rank, and turn every conversion to float32 into one to float64."""
    os.environ.update(RANK="0", LOCAL_RANK="0", WORLD_SIZE="1", MASTER_ADDR="localhost", MASTER_PORT=str(port))
    torch.Tensor.float = torch.Tensor.double
    torch.set_default_dtype(torch.float64)


def ours(folder: Path, optimizer: str, changes: tuple[str, ...]) -> list[float]:
    """The losses of our trainer; `folder`/start.pt gets the initial weights and the batches."""
    in_float64(29511)
    from torchtitan.config import TORCH_DTYPE_MAP

    from pc_recipe.config import load_config
    from pc_recipe.train.trainer import Trainer

    dtypes, batches, losses = (torch.float32, torch.bfloat16), [], []
    TORCH_DTYPE_MAP["float32"] = torch.float32 = torch.float64  # FSDP's
    if "exact" in changes:
        torch.bfloat16, torch.Tensor.bfloat16 = torch.float64, torch.Tensor.double

    class Recorder(Trainer):
        def forward_backward_step(self, *, input_dict, labels, **rest):
            loss = super().forward_backward_step(input_dict=input_dict, labels=labels, **rest)
            batches.append((input_dict["input"].clone(), labels.clone()))
            losses.append(loss.item())
            return loss

    config = Path(__file__).parents[1] / f"train_configs/271m_{optimizer.lower()}_pc.toml"
    overrides = f"""--job.dump_folder {folder}/run --data.path data/demo
        --model.flavor nano --training.seq_len {SEQ_LEN} --training.steps {STEPS}
        --training.local_batch_size {BATCH} --training.global_batch_size {BATCH * MICRO_BATCHES}
        --optimizer.lr {RATE[optimizer]} --optimizer.implementation foreach --lr_scheduler.warmup_steps 0
        --training.mixed_precision_param float32 --activation_checkpoint.mode none --diagnostics.spectra_freq 0
        --compile.enable false --validation.enable false --checkpoint.enable false""".split()
    overrides += [word for change in changes if change != "exact" for word in change.split("=")]
    trainer = Recorder(load_config(config, overrides))
    parameters = dict(trainer.model_parts[0].named_parameters())
    weights = {
        name: getattr(p, "full_tensor", lambda p=p: p)().detach().clone()
        for name, p in ((name, parameters.get(f"{name}_orig", p)) for name, p in parameters.items())
    }
    trainer.train()
    trainer.close()
    torch.float32, torch.bfloat16 = dtypes  # torch.save needs them
    torch.save({"weights": weights, "batches": batches}, folder / "start.pt")
    return [sum(losses[i : i + MICRO_BATCHES]) for i in range(0, len(losses), MICRO_BATCHES)]


def released(clone: Path, folder: Path, optimizer: str, changes: tuple[str, ...]) -> list[float]:
    """The losses of the released trainer from `folder`/start.pt."""
    in_float64(29512)
    start, to_empty, nothing = torch.load(folder / "start.pt"), nn.Module.to_empty, MagicMock()
    torch.cuda.set_device, torch.Tensor.cuda = nothing, lambda tensor: tensor
    nn.Module.to_empty = lambda module, *, device: to_empty(module, device="cpu")
    package, data = ModuleType("torchtitan"), MagicMock()
    package.__path__ = [str(clone / "torchtitan")]  # has no __init__.py, so the installed package would come first
    data.create_tokenizer.return_value.n_words = VOCABULARY
    data.build_hf_data_loader.return_value = start["batches"]
    sys.modules |= {"torchtitan": package, "torchtitan.datasets": data, "swanlab": nothing}
    sys.path.insert(0, str(clone))
    import train
    from torchtitan.models.llama import ModelArgs, llama2_configs
    from torchtitan.optimizers import muon
    from torchtitan.pc_layer.pc_layer import PCLinear, PCTransform

    llama2_configs["nano"] = ModelArgs(dim=128, n_layers=5, n_heads=4, multiple_of=64)
    train.init_distributed = lambda _: torch.distributed.init_process_group("gloo")
    train.init_logger = train.ParallelDims.build_mesh = train.set_pg_timeouts = train.save_config_files = nothing
    train.build_gpu_memory_monitor = train.build_metric_logger = train.CheckpointManager = nothing
    memory = nothing.return_value.get_peak_stats.return_value
    memory.max_reserved_gib = memory.max_reserved_pct = 0.0  # formatted in a log line
    build_optimizers, normalise, step_muon = train.build_optimizers, PCTransform.pc_normalize, train.Muon

    def optimizers_after_start(model_parts, *arguments, **options):
        for name, parameter in model_parts[0].named_parameters():
            parameter.data.copy_(start["weights"].get(name.replace(".linear.", "."), torch.ones(1)))  # gamma: 1
        for name, layer in model_parts[0].named_modules():
            if isinstance(layer, PCLinear):
                layer.sn_u, layer.sn_v = (vector.double() for vector in initial_vectors(name, layer.weight.shape))
        return build_optimizers(model_parts, *arguments, **options)

    def normalise_and_keep_gradient(self, **arguments):
        weight, s = normalise(self, **arguments)
        return weight, SimpleNamespace(detach=lambda: s)

    train.build_optimizers = optimizers_after_start
    if "exact" in changes:
        PCLinear._normalize_vector = lambda self, vector: vector / vector.norm()
        muon.zeropower_via_newtonschulz5 = partial(muon.zeropower_via_newtonschulz5, eps=0.0)
        train.Muon = lambda *groups, **options: step_muon(*groups, **options | {"use_bf16": False, "adamw_eps": 1e-30})
    if "divisor detached" in changes:
        PCTransform.pc_normalize = lambda self, *, sn_norm, **rest: normalise(self, sn_norm=sn_norm.detach(), **rest)
    if "s not detached" in changes:
        PCTransform.pc_normalize = normalise_and_keep_gradient
    config, method = train.JobConfig(), "baseline" if "baseline" in changes else "pc"
    config.parse_args(["--job.config_file", str(clone / f"train_configs/{optimizer}_{method}_271M.toml")])
    vars(config.model).update(flavor="nano", norm_type="rmsnorm", log_signal_propagation=False, log_gradients=False)
    vars(config.training).update(seq_len=SEQ_LEN, batch_size=BATCH, grad_accumulation_steps=MICRO_BATCHES, steps=STEPS)
    vars(config.training).update(val_interval=STEPS + 1, warmup_steps=4 if "warm-up" in changes else 0)
    config.optimizer.lr, config.metrics.enable_swanlab = RATE[optimizer], False
    train.main(config)
    logged = train.build_metric_logger.return_value.log.call_args_list
    return [float(call.args[0]["loss_metrics/global_avg_loss"]) for call in logged]


def compare_trainers(clone: Path, folder: Path) -> list[dict]:
    """One result for each of ROWS: both trainers' losses and their largest difference."""
    make_demo("data/demo")
    # a process for each run: the two sides import different packages named torchtitan
    pool = ProcessPoolExecutor(1, mp_context=get_context("spawn"), max_tasks_per_child=1)
    of_ours = cache(lambda *run: pool.submit(ours, folder, *run).result())
    of_theirs = cache(lambda *run: pool.submit(released, clone, folder, *run).result())
    results = []
    for optimizer, name, our_changes, their_changes in ROWS:
        losses = {"ours": of_ours(optimizer, our_changes), "released": of_theirs(optimizer, their_changes)}
        largest = max(abs(one - other) for one, other in zip(*losses.values(), strict=True))
        print(f"{optimizer:<6} {name:<70} {largest:.1e}", flush=True)
        results.append({"optimizer": optimizer, "row": name, "largest_difference": largest, **losses})
    return results


def time_layers(clone: Path) -> dict[str, list[float]]:
    """CPU seconds of a step of their layer and of ours: level 4, w1 of the 271M model, ten micro-batches of 16 tokens."""
    released_layer = runpy.run_path(str(clone / "torchtitan/pc_layer/pc_layer.py"))["PCLinear"]
    settings = {"pc_level": 4, "pc_norm_type": "sn", "pc_norm_eps": 1e-7, "power_iter": 10, "gamma_init_value": 1.0}
    settings = SimpleNamespace(**settings, recover_w_norm=True, learnable_gamma=True)
    theirs = released_layer(nn.Linear(1024, 2816, bias=False), settings, 0)
    theirs.sn_u, theirs.sn_v = initial_vectors("w1", (2816, 1024))
    model = nn.ModuleDict({"w1": nn.Linear(1024, 2816, bias=False)})
    pc.attach(model, pc.PCConfig(level=4, blocks=("*w1",)))
    preconditioner, batches = pc.precondition(model), torch.randn(10, 16, 1024)

    def passes(layer: nn.Module) -> None:
        layer.zero_grad()
        for batch in batches:
            layer(batch).square().sum().backward()

    steps = {
        "released": lambda: (theirs.update_sn_state(), passes(theirs)),
        "ours": lambda: (
            preconditioner.write_pc(),
            passes(model["w1"]),
            preconditioner.pull_back(),
        ),
    }
    return interleaved(steps, rounds=3, on_gpu=False)


@exit_on_user_error
def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--clone", type=Path, required=True, help="clone of the paper's repository")
    parser.add_argument("--output", type=Path, help="file for the results")
    options = parser.parse_args()
    clone = options.clone.resolve()
    if not (clone / "train.py").is_file():
        parser.error(f"{clone}/train.py: no such file; --clone should be a clone of github.com/Empath-aln/PC-layer")
    commit = subprocess.run(["git", "-C", clone, "rev-parse", "HEAD"], capture_output=True, text=True).stdout.strip()
    result = {"commit": commit, "torch": torch.__version__, "seconds of layers": time_layers(clone)}
    with tempfile.TemporaryDirectory() as folder:
        result["trainers"] = compare_trainers(clone, Path(folder))
    if options.output:
        write_atomically(options.output, json.dumps(result) + "\n")


if __name__ == "__main__":
    main()
