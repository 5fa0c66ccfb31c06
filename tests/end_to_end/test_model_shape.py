"""A model's sizes from its config: trained, exported and estimated as they are written."""

import torch

from helpers.ranks import run_ranks
from helpers.tiny import VOCAB_SIZE, load_all, make_trainer, write_config
from pc.config import MatrixSplit
from pc_recipe.config import load_config
from pc_recipe.config import write_config as write_resolved
from pc_recipe.plan import memory

SHAPE = {"dim": 32, "n_layers": 3, "n_heads": 4, "n_kv_heads": 2, "ffn_dim": 40, "rope_theta": 500.0}
WORDS = [f"--model.{name}={size}" for name, size in SHAPE.items()]
WORDS += "--optimizer.name=Muon --optimizer.muon_heads=q,k --training.steps=3 --validation.enable=false".split()
WORDS += ["--checkpoint.last_save_model_only=false"]


def _train(rank, config):
    """Logits of the trained model, and the size of the heads that Muon takes."""
    trainer = make_trainer(config, WORDS)
    trainer.train()
    write_resolved(trainer.config, f"{trainer.config.job.dump_folder}/config.toml")
    groups = [group for optimizer in trainer.optimizers.optimizers for group in optimizer.param_groups]
    cuts = [MatrixSplit(*group["split"]).head_dim for group in groups if "split" in group]
    with torch.no_grad():
        logits = trainer.model_parts[0](torch.arange(32).view(2, 16))
    return logits, cuts


def test_every_size_is_trained_exported_and_estimated(tmp_path, tiny_shards):
    from pc_recipe.evaluate import hugging_face, plain_weights

    config = write_config(tmp_path / "run.toml", tiny_shards, tmp_path / "run")
    [(logits, cuts)] = run_ranks(1, _train, config)
    checkpoint = tmp_path / "run" / "checkpoint" / "step-3"
    shapes = {name: tuple(tensor.shape) for name, tensor in load_all(checkpoint).items() if name.startswith("layers.")}
    assert shapes["layers.2.attention.wq.weight"] == (32, 32) and shapes["layers.2.attention.wk.weight"] == (16, 32)
    assert shapes["layers.2.feed_forward.w1.weight"] == (40, 32) and "layers.3.attention.wq.weight" not in shapes
    assert set(cuts) == {8}
    matrices = 3 * (32 * 32 * 2 + 16 * 32 * 2 + 3 * 40 * 32)
    sizes = memory.count_sizes(load_config(config, [*WORDS, "--pc.enable=false"]))
    assert sizes.hidden_matrices == matrices
    assert sizes.total == matrices + 7 * 32 + 2 * VOCAB_SIZE * 32
    saved = plain_weights.load(checkpoint)
    llama = hugging_face.to_llama(saved.weights, saved.model_args)
    with torch.no_grad():
        exported = llama(torch.arange(32).view(2, 16)).logits
        llama.config.rope_parameters["rope_theta"] = 10_000.0
        llama.model.rotary_emb = type(llama.model.rotary_emb)(config=llama.config)
        wrong = llama(torch.arange(32).view(2, 16)).logits
    torch.testing.assert_close(exported, logits, rtol=1e-4, atol=1e-5)  # float32, other kernels
    assert not torch.allclose(wrong, logits, rtol=1e-4, atol=1e-5)
