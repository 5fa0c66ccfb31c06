"""PC in TorchTitan's debug models, by its trainer with PC."""

import contextlib
import io
import json
import random
import tomllib
from pathlib import Path

import pytest
import tomli_w
import torch
from safetensors import safe_open
from tokenizers import Tokenizer, models, pre_tokenizers

import pc
from helpers.definition import require_pc
from helpers.ranks import run_ranks
from helpers.tiny import ROOT

CONFIGS = ROOT / "train_configs" / "torchtitan"


@pytest.fixture(scope="module")
def assets(tmp_path_factory):
    """A folder with a tokenizer of whole words, and one of text that repeats twenty words."""
    folder = tmp_path_factory.mktemp("assets")
    draw = random.Random(0)
    words = ["".join(draw.choices("abcdefgh", k=6)) for _ in range(200)]
    tokenizer = Tokenizer(models.WordLevel({word: index for index, word in enumerate(words)}, unk_token=words[0]))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.save(str(folder / "tokenizer.json"))
    special = {"bos_token": words[0], "eos_token": words[1], "add_bos_token": False}
    (folder / "tokenizer_config.json").write_text(json.dumps(special))
    (folder / "text").mkdir()
    (folder / "text" / "text.json").write_text(f"{json.dumps({'text': ' '.join(words[20:40] * 5)})}\n" * 200)
    return folder


@pytest.fixture
def write(assets, tmp_path):
    """write(model, section={key: value}) -> the command's arguments for a shortened shipped config with these changes."""

    def write(name, folder="run", **sections):
        config = tomllib.loads((CONFIGS / f"{name}.toml").read_text())
        changes = {
            "job": {"dump_folder": str(tmp_path / folder)},
            "model": {"hf_assets_path": str(assets)},
            "training": {
                "dataset_path": str(assets / "text"), "seq_len": 32, "local_batch_size": 2, "steps": 4,
                "mixed_precision_param": "float32",
            },
            "lr_scheduler": {"warmup_steps": 1, "decay_ratio": 0.0},
            "activation_checkpoint": {"mode": "none"},
            "checkpoint": {"interval": 2},
            "metrics": {"log_freq": 1},
            "debug": {"seed": 0},
        }  # fmt: skip
        for more in (changes, sections):
            for section, values in more.items():
                config[section] = config.get(section, {}) | values
        file = tmp_path / f"{folder}.toml"
        file.write_text(tomli_w.dumps(config))
        return ["--job.config_file", str(file)]

    write.runs = tmp_path
    return write


def train(words):
    """A run of a model of two layers in this process: the losses by step, and the trainer."""
    import torchtitan.train
    from torch.distributed.fsdp import FSDPModule
    from torchtitan.components.metrics import MetricsProcessor
    from torchtitan.config import ConfigManager
    from torchtitan.protocols.train_spec import get_train_spec

    from pc.integrations.torchtitan_train import Trainer
    from pc_recipe.train.cpu import use_cpu_where_there_is_no_gpu

    use_cpu_where_there_is_no_gpu()
    losses, histc = {}, torch.histc

    def note(self, step, loss, *others, **named):
        losses[step] = loss

    MetricsProcessor.log = note
    # on CPUs it takes no integers, such as TorchTitan's expert indices
    torch.histc = lambda x, *args, **kwargs: histc(x.float(), *args, **kwargs).to(x.dtype)
    torchtitan.train.time.sleep = lambda _: None
    config = ConfigManager().parse_args(words)
    get_train_spec(config.model.name).model_args[config.model.flavor].n_layers = 2
    trainer = Trainer(config)
    for part in trainer.model_parts:
        for module in part.modules():
            if isinstance(module, FSDPModule):
                module.set_force_sum_reduction_for_comms(True)  # gloo lacks the scaled sum that TorchTitan asks for
    trainer.train()
    trainer.close()
    return losses, trainer


def only_losses(rank, runs):
    return [train(words)[0] for words in runs]


def straight_and_resumed(rank, words):
    """Losses of a run, of its resume from step 2, and of a run that starts from its weights; its gammas. Weights are checked
    against float64."""
    losses, trainer = train(words)
    folder = Path(trainer.checkpointer.folder)
    resumed = train([*words, "--checkpoint.load_step", "2", "--checkpoint.interval", "9"])[0]
    plain = ["--checkpoint.folder", "plain", "--checkpoint.initial_load_path", str(folder / "step-4")]
    started = train([*words, *plain, "--training.steps", "1", "--checkpoint.interval", "9"])[
        0
    ]  # from PC(W), as plain weights
    model = trainer.model_parts[0]
    weights = trainer.preconditioner.weights.values()
    for weight in weights:
        require_pc(weight)
    gammas = torch.cat([weight.gamma.detach().flatten() for weight in weights])
    tokens = torch.arange(32)[None]
    with torch.no_grad():
        logits = model(tokens)
        torch.testing.assert_close(pc.merge(model)(tokens), logits, rtol=1e-5, atol=1e-5)
    assert not any("gamma" in name for name in model.state_dict())
    return losses, resumed, started, gammas


# o, gate, up and down of two layers; gate, up and down of the second layer's eight experts
@pytest.mark.parametrize("name, matrices", [("qwen3", 8), ("deepseek_v3", 8 + 24)])
def test_a_model_of_torchtitan(name, matrices, write):
    losses, resumed, started, gammas = run_ranks(1, straight_and_resumed, write(name))[0]
    assert len(gammas) == matrices
    assert (gammas != 1).float().mean() > 0.9  # an expert without tokens has no gradient
    assert losses[4] < losses[1] - 1
    assert resumed == {3: losses[3], 4: losses[4]}
    assert started[1] < losses[1] - 1


def test_two_ranks_go_on_as_one(write):
    """From one checkpoint; both ranks read equal batches, so their mean loss is that of one rank."""
    name, one = "deepseek_v3", {"local_batch_size": 1}
    start = write(name, "start", training=one | {"steps": 2})
    go_on = {"initial_load_path": str(write.runs / "start" / "checkpoint" / "step-2"), "initial_load_model_only": False}
    words = [
        write(name, folder, training=one, checkpoint=go_on | {"exclude_from_loading": ["dataloader"], "interval": 9})
        for folder in ("one", "two")
    ]
    alone = run_ranks(1, only_losses, [start, words[0]])[0][1]
    (both,), _ = run_ranks(2, only_losses, [words[1]])
    assert list(both) == [3, 4]
    assert both == pytest.approx(alone, rel=2e-5)  # float32 sums in another order


def test_weights_for_hugging_face(write):
    """TorchTitan's adapter knows the names of the plain model alone."""
    settings = {"last_save_in_hf": True, "last_save_model_only": True, "interval": 9}
    unsaved = write("llama3", "unsaved", training={"steps": 1}, checkpoint={"enable": False})
    run_ranks(1, only_losses, [unsaved, write("llama3", training={"steps": 1}, checkpoint=settings)])
    [file] = (write.runs / "run" / "checkpoint" / "step-1").glob("*.safetensors")
    with safe_open(file, "pt") as tensors:
        names = list(tensors.keys())
    assert "model.layers.1.self_attn.o_proj.weight" in names and len(names) == 9 * 2 + 3


def test_mistakes_are_one_line(write):
    mistakes = {
        "unknown key levl; did you mean level?": {"levl": 2},
        "'layers.*.ffn.w1' matches no weight of the model": {"blocks": ["layers.*.ffn.w1"]},
    }
    lines = run_ranks(1, refused, [write("llama3", f"{i}", pc=wrong) for i, wrong in enumerate(mistakes.values())])[0]
    for line, wrong in zip(lines, mistakes, strict=True):
        assert line.startswith("error: ") and wrong in line


def refused(rank, runs):
    """For each run, the last line that the command prints on stderr; the trainer by itself raises the error."""
    from torchtitan.config import ConfigManager

    from pc.integrations.torchtitan_train import main

    lines, parse = [], ConfigManager.parse_args
    for words in runs:
        with pytest.raises(pc.UserError):
            train(words)
        printed = io.StringIO()
        with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stderr(printed), pytest.raises(SystemExit):
            patch.setattr(ConfigManager, "parse_args", lambda manager, words=words: parse(manager, words))
            main()
        lines.append(printed.getvalue().splitlines()[-1])
    return lines
