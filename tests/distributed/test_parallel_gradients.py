"""Gradients of the trainer under every parallelism, in float64, against one plain model with PC in its graph."""

import pytest
import torch

from helpers import tiny
from helpers.ranks import run_ranks
from helpers.toy import whole

SEQUENCES = 36  # of one optimizer step; divisible by 1, 2, 3, 4 ranks and by 3 micro-batches
TOLERANCE = 1e-12  # float64 sums in another order, relative to the largest entry of each gradient
BASELINE = ["--pc.enable", "false"]

TP2 = ["--parallelism.tensor_parallel_degree", "2"]
PP2 = ["--parallelism.pipeline_parallel_degree", "2"]
HSDP2 = ["--parallelism.data_parallel_replicate_degree", "2"]

# By number of ranks: name, ranks that read different data, keys that lay the ranks out.
LAYOUTS = {
    1: [("one process", 1, [])],
    2: [("FSDP2", 2, []), ("TP2", 1, TP2), ("PP2", 1, PP2)],
    3: [("FSDP3", 3, [])],
    4: [
        ("HSDP2x2", 4, HSDP2),
        ("TP2 x FSDP2", 2, TP2),
        ("PP2 x FSDP2", 2, PP2),
        ("PP2 x TP2", 1, [*PP2, *TP2]),
    ],
}

NO_AC = ["--activation_checkpoint.mode", "none"]
AC = ["--activation_checkpoint.mode", "selective", "--activation_checkpoint.selective_ac_option", "op"]  # the recipes'

# Name, batches that a rank accumulates, micro-batches of each that go through the pipeline, further overrides.
PLAIN = [("1 micro-batch", 1, 1, NO_AC), ("3 micro-batches, AC", 3, 1, AC)]
SYNC = "--parallelism.fsdp_sync"  # the default is once per step
OTHER_SYNCS = [("3 micro-batches, synchronised with each", 3, 1, [SYNC, "micro_batch", *NO_AC])]
SCHEDULE = "--parallelism.pipeline_parallel_schedule"
PIPELINED = [
    ("1 micro-batch", 1, 1, [SCHEDULE, "GPipe", *NO_AC]),  # the other schedules need a micro-batch for each stage
    *((f"{name}, 4 stages, two of them without a layer", 1, 6, [SCHEDULE, name, *NO_AC])
      for name in ("Interleaved1F1B", "LoopedBFS", "InterleavedZeroBubble", "ZBVZeroBubble")),
    ("3 accumulated of 3 micro-batches, AC", 3, 3, [SCHEDULE, "1F1B", *AC]),
]  # fmt: skip


def _in_float64() -> None:
    """Let TorchTitan compute in float64 in this process: it lacks this dtype, and computes two things in float32."""
    import torchtitan.components.loss as loss
    import torchtitan.models.llama3.model.model as llama
    from torchtitan.config import TORCH_DTYPE_MAP

    def rotate(queries, keys, freqs_cis, positions=None):
        rotated = []
        for x in (queries, keys):
            pairs = torch.view_as_complex(x.reshape(*x.shape[:-1], -1, 2))
            rotated.append(
                torch.view_as_real(pairs * llama.reshape_for_broadcast(freqs_cis, pairs, positions)).flatten(3)
            )
        return tuple(rotated)

    def cross_entropy(predictions, labels):
        return torch.nn.functional.cross_entropy(predictions.flatten(0, 1), labels.flatten(0, 1), reduction="sum")

    TORCH_DTYPE_MAP["float32"] = torch.float64
    llama.apply_rotary_emb = rotate
    loss.cross_entropy_loss = cross_entropy


def _oracle(rank, config, levels) -> list[dict[str, torch.Tensor]]:
    """Gradients of one batch for each level of PC (None: the baseline), and their norm. No trainer, no sharding."""
    import pc
    from helpers.tiny import model_args
    from pc.layer import put_in_graph
    from pc_recipe.config import load_config
    from pc_recipe.data.loader import GlobalOrderLoader
    from pc_recipe.train.llama2 import Llama2
    from pc_recipe.train.upstream_config import JobConfig

    _in_float64()
    settings = load_config(config, [])
    loader = GlobalOrderLoader(
        settings.data.path,
        "train",
        seq_len=settings.training.seq_len,
        local_batch_size=SEQUENCES,
        dp_rank=0,
        dp_world_size=1,
        seed=settings.data.seed,
        vocab_size=tiny.VOCAB_SIZE,
    )
    inputs, labels = next(iter(loader))
    results = []
    for level in levels:
        args = model_args("tiny")
        args.update_from_config(JobConfig(settings))
        model = Llama2(args)
        model.init_weights()
        model.double()
        if level is not None:
            put_in_graph(model, pc.PCConfig(level=level))
        logits = model(inputs["input"])
        torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten()).backward()
        gradients = {name: p.grad for name, p in model.named_parameters()}
        norm = torch.stack([g.square().sum() for g in gradients.values()]).sum().sqrt()
        results.append({**gradients, "norm": norm})
    return results


def _gradients(rank, config, cases) -> list[dict[str, torch.Tensor]]:
    """For each case (a list of overrides): this rank's whole gradients as the trainer clips them, and their norm."""
    from pc.targets import clean_name
    from pc_recipe.config import load_config
    from pc_recipe.train.trainer import Trainer

    class Recorded(Trainer):
        def _finish_gradients(self):
            super()._finish_gradients()
            self.gradients = {  # under the names that the in-graph layers use
                clean_name(name).replace("weight_orig", "weight").replace("weight_gamma", "gamma"): whole(p.grad)
                for model in self.model_parts
                for name, p in model.named_parameters()
                if p.grad is not None  # PC(W)'s has been cleared
            }

    _in_float64()
    results = []
    for overrides in cases:
        trainer = Recorded(load_config(config, overrides))
        trainer.metrics_processor.log = lambda step, loss, max_loss, norm, extra_metrics: trainer.gradients.update(
            norm=torch.tensor(norm, dtype=torch.float64)
        )
        trainer.step = 1  # step 1 is logged
        trainer.train_step(trainer.batch_generator(trainer.dataloader))
        results.append(trainer.gradients)
        trainer.close()
    return results


def _overrides(data_ranks, layout, accumulated, pipelined, further):
    """Overrides for a step of `SEQUENCES` in the given parts."""
    local = SEQUENCES // data_ranks // accumulated
    return [
        *layout,
        *further,
        *("--training.global_batch_size", str(SEQUENCES), "--training.local_batch_size", str(local)),
        *("--parallelism.pipeline_parallel_microbatch_size", str(local // pipelined)),
        *("--validation.enable", "false", "--checkpoint.enable", "false"),
    ]


def _merged(by_rank: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    """All ranks' gradients by name; ranks that have the same parameter must agree on it."""
    merged: dict[str, torch.Tensor] = {}
    for gradients in by_rank:
        for name, gradient in gradients.items():
            assert torch.equal(merged.setdefault(name, gradient), gradient), name
    return merged


def _distance(gradients, expected) -> float:
    """Largest difference, relative to the largest entry of the same parameter's gradient."""
    assert gradients.keys() == expected.keys()
    return max(float((gradients[name] - expected[name]).abs().max() / expected[name].abs().max()) for name in expected)


@pytest.mark.parametrize("ranks", LAYOUTS)
def test_gradients_equal_the_in_graph_oracle(tiny_config, ranks):
    config, _ = tiny_config
    pc, baseline, weaker = run_ranks(1, _oracle, config, [4, None, 3])[0]
    names, cases, expected = [], [], []
    for name, data_ranks, layout in LAYOUTS[ranks]:
        splits = PIPELINED if layout[:2] == PP2 else PLAIN
        if ranks == 4:  # all would take long
            splits = [*(OTHER_SYNCS if layout == HSDP2 else []), splits[-1]]
        for how, *split in splits:
            names.append(f"{name}, {how}, PC")
            cases.append(_overrides(data_ranks, layout, *split))
            expected.append(pc)
        if ranks != 4 or layout == TP2:
            names.append(f"{name}, {how}, baseline")
            cases.append([*cases[-1], *BASELINE])
            expected.append(baseline)
    by_rank = run_ranks(ranks, _gradients, config, cases)
    for i, name in enumerate(names):
        gradients = _merged([results[i] for results in by_rank])
        print(f"{name}: {_distance(gradients, expected[i]):.1e}")
        assert _distance(gradients, expected[i]) <= TOLERANCE, name
        if "PC" in name:  # control: another level differs far more
            assert _distance(gradients, weaker) > 1e-3
