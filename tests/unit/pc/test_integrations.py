"""PC with accelerate, peft and Hugging Face's Trainer themselves, in one process; longer runs are in test_examples.py."""

import lightning
import peft
import pytest
import torch
from accelerate import Accelerator
from lightning.pytorch.callbacks import WeightAveraging
from lightning.pytorch.tuner import Tuner
from safetensors.torch import load_file, save_file
from torchao.float8 import Float8LinearConfig, convert_to_float8_training
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

import pc
from helpers.toy import Loop, require_near, require_pc, same, sgd, toy_batch, toy_loss, toy_model, trained
from pc import PCConfig, UserError
from pc.integrations.hugging_face import PCTrainerMixin
from pc.integrations.lightning import PCCallback
from pc.preconditioner import preconditioners_of


def train(model, optimizer, preconditioner, steps=3):
    for step in range(steps):
        toy_loss(model, toy_batch(step)).backward()
        preconditioner.pull_back()
        optimizer.step()
        optimizer.zero_grad()


def test_accelerate():
    """Accelerate's own accumulation and clipping give the same as a plain loop."""
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    model = pc.attach(toy_model(), PCConfig())
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-2))
    preconditioner = pc.precondition(model, optimizer)
    plain = Loop()
    for step in range(3):
        for i in range(2):
            with accelerator.accumulate(model):
                accelerator.backward(toy_loss(model, toy_batch(2 * step + i)))
                if accelerator.sync_gradients:
                    preconditioner.pull_back()
                    accelerator.clip_grad_norm_(model.parameters(), 0.01)
                optimizer.step()
                optimizer.zero_grad()
            (toy_loss(plain.model, toy_batch(2 * step + i)) / 2).backward()
        plain.preconditioner.pull_back()
        torch.nn.utils.clip_grad_norm_(plain.model.parameters(), 0.01)
        plain.optimizer.step()
        plain.optimizer.zero_grad()
    assert same(model.state_dict(), plain.model.state_dict())


def test_layers_that_peft_trains_whole():
    """`modules_to_save` are copies beside the layers, so PC comes after peft."""
    settings = peft.LoraConfig(r=2, target_modules=["wq"], modules_to_save=["w2"])
    config = PCConfig(blocks=("*.w2.modules_to_save.default",))
    early = peft.get_peft_model(pc.attach(toy_model(), PCConfig(blocks=("*.w2",))), settings)
    with pytest.raises(UserError, match="only after modules were copied, as by peft"):
        pc.precondition(early)
    model = pc.attach(peft.get_peft_model(toy_model(), settings), config)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    preconditioner = pc.precondition(model, optimizer)
    train(model, optimizer, preconditioner)
    assert len(preconditioner.weights) == 2 and all(w.gamma != 1 for w in preconditioner.weights.values())
    require_pc(preconditioner)
    output = model(toy_batch(0))
    plain = pc.merge(model).merge_and_unload()
    assert plain.state_dict().keys() == toy_model().state_dict().keys()
    torch.testing.assert_close(plain(toy_batch(0)), output, rtol=1e-12, atol=1e-12)


def test_weights_that_torchao_wraps_for_float8():
    """They have no storage of their own."""
    model = toy_model(d=32, f=48).float()
    convert_to_float8_training(model, config=Float8LinearConfig(enable_fsdp_float8_all_gather=True, emulate=True))
    optimizer = sgd(pc.attach(model, PCConfig()).parameters())
    preconditioner = pc.precondition(model, optimizer)
    weight = preconditioner.weights["0.attention.wo"]
    before, w = weight.effective.detach().clone(), weight.orig.detach().clone()
    toy_loss(model, toy_batch(0, d=32).float()).backward()
    preconditioner.pull_back()
    optimizer.step()
    assert not torch.equal(weight.effective, before)
    torch.testing.assert_close(weight.orig, w - 0.1 * weight.orig.grad)


class PCTrainer(PCTrainerMixin, Trainer):
    """Trainer for a model with PC."""


def make_trainer(folder, steps=4, model_init=None, **settings):
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1, "num_attention_heads": 2}
    model = pc.attach(LlamaForCausalLM(LlamaConfig(vocab_size=32, **sizes)), PCConfig())
    tokens = (torch.arange(16)[:, None] + torch.arange(8)) % 32
    data = [{"input_ids": row, "labels": row} for row in tokens]
    fixed = {
        "output_dir": str(folder), "max_steps": steps, "save_steps": 2, "logging_steps": 1, "learning_rate": 1e-2,
        "per_device_train_batch_size": 2, "gradient_accumulation_steps": 2, "max_grad_norm": 0.1, "use_cpu": True,
        "report_to": "none", "disable_tqdm": True,
    }  # fmt: skip
    given = {"model_init": model_init} if model_init else {"model": model}
    return PCTrainer(args=TrainingArguments(**fixed | settings), train_dataset=data, eval_dataset=data, **given)


def test_a_trainer_counts_the_parameters_of_the_plain_model(tmp_path):
    """In `trainer_state.json` and loggers, FLOPs are proportional to them."""
    trainer = make_trainer(tmp_path)
    before = trainer.get_num_trainable_parameters()
    trainer.train()
    gammas = sum(weight.gamma.numel() for weight in trainer.preconditioner.weights.values())
    trainable, plain = trainer.get_num_trainable_parameters(), pc.merge(trainer.model)
    tokens = 4 * 2 * 2 * 8  # steps, micro-batches, sequences, length
    assert trainer.state.total_flos == 6 * tokens * plain.num_parameters(exclude_embeddings=True)
    assert before == plain.num_parameters() and trainable == before + gammas
    trainer.model = torch.nn.Linear(2, 2)  # as a model whose FLOPs its trainer counts by itself
    assert trainer.floating_point_ops({}) == 0


def losses(trainer):
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


def test_a_resumed_trainer_equals_a_straight_one(tmp_path):
    straight, resumed = make_trainer(tmp_path), make_trainer(tmp_path / "other")
    straight._load_optimizer_and_scheduler(None)  # as transformers 5.0 does in a new run
    straight.train()
    resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    assert losses(resumed) == losses(straight) and len(losses(straight)) == 4
    assert losses(straight)[3] < losses(straight)[0]
    assert same(resumed.model.state_dict(), straight.model.state_dict())
    file = tmp_path / "checkpoint-4" / "model.safetensors"
    state = load_file(file)
    # a plain model's checkpoint; and one as of mixtures of experts, whose saved names transformers' Trainer does not find
    missing = [("weight_", "o_proj"), ("up_proj", "up_proj"), ("weight_gamma", "o_proj"), ("weight_v", "o_proj")]
    for lacks, weight in missing:
        save_file({name: t for name, t in state.items() if lacks not in name}, file, {"format": "pt"})
        with pytest.raises(UserError, match=rf"checkpoint-4: .*{weight} was not loaded with its W"):
            make_trainer(tmp_path, 5).train(resume_from_checkpoint=str(tmp_path / "checkpoint-4"))


def test_a_trainer_that_makes_its_model_anew(tmp_path):
    """As in a search for hyperparameters (`model_init`): each model has its own preconditioner."""
    trainer = make_trainer(tmp_path, 1, model_init=lambda: make_trainer(tmp_path).model)
    trainer.evaluate()
    for _ in range(2):
        trainer.train()
        weights = trainer.preconditioner.weights
        assert {w.module for w in weights.values()} == {w.module for _, w in pc.named_weights(trainer.model)}
        assert all(w.gamma != 1 for w in weights.values())
    pc.merge(trainer.model)
    trainer.evaluate()


class ScheduleFree(torch.optim.SGD):
    """`eval` puts an average in W's place, `train` puts W back; called twice, they do nothing."""

    is_training = True

    def train(self):
        self.switch(True)

    def eval(self):
        self.switch(False)

    @torch.no_grad()
    def switch(self, is_training):
        if is_training != self.is_training:
            self.is_training = is_training
            for p in self.param_groups[0]["params"]:
                p.mul_(2.0 if is_training else 0.5)


def test_a_trainer_with_a_schedule_free_optimizer(tmp_path):
    """Trainer calls `eval` in an evaluation, and `train` in every step; nobody can call `write_pc` between."""
    trainer = make_trainer(tmp_path, eval_strategy="steps", eval_steps=2)
    trainer.optimizer = ScheduleFree(trainer.model.parameters(), lr=1e-2)
    trainer.train()
    first, second = (trainer.evaluate()["eval_loss"] for _ in range(2))
    assert first == second
    require_pc(trainer.preconditioner, 1e-5)  # float32
    saved = load_file(tmp_path / "checkpoint-2" / "model.safetensors")  # after an evaluation
    loaded = make_trainer(tmp_path).model
    preconditioner = pc.precondition(loaded)
    loaded.load_state_dict(saved, strict=False)
    require_pc(preconditioner, 1e-5)


class Net(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = pc.attach(toy_model(), PCConfig())

    def training_step(self, batch, index):
        return toy_loss(self.net, toy_batch(index))

    def validation_step(self, batch, index):
        self.net(toy_batch(index).to(next(self.net.parameters()).dtype))

    def configure_optimizers(self):
        return sgd(self.net.parameters())

    def train_dataloader(self):
        return torch.utils.data.DataLoader(torch.zeros(3, 1))

    val_dataloader = train_dataloader


class ByHand(Net):
    """Two optimizers, and two backward passes for each step besides that of a part without PC, as in a GAN."""

    automatic_optimization = False

    def __init__(self):
        super().__init__()
        self.judge = torch.nn.Linear(7, 1).double()

    def training_step(self, batch, index):
        self.manual_backward(self.judge(self.net(toy_batch(index)).detach()).mean())
        self.manual_backward(toy_loss(self.net, toy_batch(index)) / 2)
        if index != 1:
            for optimizer in self.optimizers():
                optimizer.step()
                optimizer.zero_grad()

    def configure_optimizers(self):
        return [sgd(block.parameters()) for block in self.net]


def lightning_trainer(callbacks, **settings):
    quiet = ("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary")
    return lightning.Trainer(callbacks=callbacks, accelerator="cpu", **dict.fromkeys(quiet, False), **settings)


def test_lightning(tmp_path):
    """Accumulation with clipping and validation between micro-batches; a checkpoint that another module validates."""
    module, loop = Net(), Loop(sgd)
    trainer = lightning_trainer(
        PCCallback(), max_epochs=2, accumulate_grad_batches=2, val_check_interval=1, gradient_clip_val=0.01
    )
    trainer.fit(module)
    for batches in ((0, 1), (2,)) * 2:
        for batch in batches:
            loop.backward(batch, 0.5)
        loop.pull_back()
        torch.nn.utils.clip_grad_norm_(loop.model.parameters(), 0.01)
        loop.update()
    assert same(module.net.state_dict(), loop.model.state_dict())
    trainer.save_checkpoint(tmp_path / "last.ckpt")
    other = Net()
    lightning_trainer(PCCallback()).validate(other, ckpt_path=tmp_path / "last.ckpt", verbose=False, weights_only=False)
    assert same(other.state_dict(), module.state_dict())
    pc.merge(other.net)
    lightning_trainer(PCCallback()).validate(other, verbose=False)


def test_lightning_by_hand_and_a_callback_for_two_modules():
    """One module after the other, each with its own trainer."""
    callback, loop = PCCallback(), Loop(sgd)
    for batches in ((0,), (1, 2)):
        for batch in batches:
            loop.backward(batch, 0.5)
        loop.pull_back()
        loop.update()
    for _ in range(2):
        module = ByHand()
        lightning_trainer(callback, max_epochs=1).fit(module)
        require_near(trained(callback.preconditioner), loop.trained())


class Tuned(Net):
    def __init__(self):
        super().__init__()
        self.batch_size, self.losses = 1, []

    def training_step(self, batch, index):
        loss = super().training_step(batch, index)
        self.losses.append(loss.detach())
        return loss


@pytest.mark.parametrize("clip", [None, 0.01])
def test_a_tuner_that_takes_callbacks_out_while_it_tries_steps(tmp_path, clip):
    module, loop = Tuned(), Loop(sgd)
    trainer = lightning_trainer(PCCallback(), max_epochs=1, gradient_clip_val=clip, default_root_dir=tmp_path)
    Tuner(trainer).scale_batch_size(module, max_trials=1, steps_per_trial=3)
    assert same(module.net.state_dict(), loop.model.state_dict())  # restored
    trainer.fit(module)
    expected = []
    for batch in range(3):
        expected.append(loop.backward(batch))
        loop.pull_back()
        if clip:
            torch.nn.utils.clip_grad_norm_(loop.model.parameters(), clip)
        loop.update()
    assert module.losses[:3] == expected and module.losses[-3:] == expected
    assert same(module.net.state_dict(), loop.model.state_dict())


class Rivals(ByHand):
    """Two networks with PC; `toggle_optimizer` freezes the parameters of the one that does not train."""

    def __init__(self):
        lightning.LightningModule.__init__(self)
        self.net, self.judge = toy_model(), toy_model(seed=1)
        pc.attach(self, PCConfig())

    def training_step(self, batch, index):
        for optimizer, sign in zip(self.optimizers(), (1, -1), strict=True):
            self.toggle_optimizer(optimizer)
            self.manual_backward(sign * toy_loss(self.judge, self.net(toy_batch(index))))
            optimizer.step()
            optimizer.zero_grad()
            self.untoggle_optimizer(optimizer)

    def configure_optimizers(self):
        return [sgd(part.parameters()) for part in (self.net, self.judge)]


def test_lightning_of_two_networks_that_train_in_turn():
    callback, both = PCCallback(), torch.nn.ModuleDict({"net": toy_model(), "judge": toy_model(seed=1)})
    lightning_trainer(callback, max_epochs=1).fit(Rivals())
    parts = [*pc.attach(both, PCConfig()).values()]
    optimizers = [sgd(part.parameters()) for part in parts]
    preconditioner = pc.precondition(both, *optimizers)
    for batch in range(3):
        for sign, optimizer, other in ((1, optimizers[0], parts[1]), (-1, optimizers[1], parts[0])):
            (sign * toy_loss(parts[1], parts[0](toy_batch(batch)))).backward()
            other.zero_grad()
            preconditioner.pull_back()
            optimizer.step()
            optimizer.zero_grad()
    assert same([*trained(callback.preconditioner).values()], [*trained(preconditioner).values()])


def test_a_network_that_lightning_makes_after_a_checkpoint_is_loaded_is_refused():
    class Late(Net):
        def __init__(self):
            lightning.LightningModule.__init__(self)

        def configure_model(self):
            self.net = Net().net

    with pytest.raises(UserError, match="call pc.attach in its __init__"):
        lightning_trainer(PCCallback(), max_epochs=1).fit(Late())


def test_plain_weights_that_a_module_loads_in_its_setup_are_not_lost():
    """The callback has started by then, so W would be the first weights, and the loaded ones gone after one step."""

    class Loads(Net):
        def setup(self, stage):
            self.net.load_state_dict(toy_model(seed=1).state_dict(), strict=False)

    with pytest.raises(UserError, match="load plain weights before"):
        lightning_trainer(PCCallback(), max_epochs=1).fit(Loads())


@pytest.mark.parametrize("kind", ["by hand", "averages", "half"])
def test_lightning_goes_on_where_pc_is_older_than_w(tmp_path, kind):
    """W changed by hand; averages of W and of PC(W). Weights in half precision are only evaluated."""
    callbacks = [
        PCCallback(),
        *([WeightAveraging(avg_fn=lambda a, b, n: a + 0.05 * (b - a))] if kind == "averages" else []),
    ]
    file, trainer = tmp_path / "last.ckpt", lightning_trainer(callbacks, max_epochs=3)
    trainer.fit(module := Net())
    if kind == "by hand":
        module.net[0].attention["wo"].weight_orig.detach().mul_(2.0)
    trainer.save_checkpoint(file)
    trainer.validate(module, verbose=False)
    settings = {"precision": "bf16-true"} if kind == "half" else {}
    other = Net()
    lightning_trainer([PCCallback()], **settings).validate(other, ckpt_path=file, verbose=False, weights_only=False)
    if kind != "half":
        require_pc(*preconditioners_of(other))
        lightning_trainer([PCCallback()], max_epochs=4).fit(Net(), ckpt_path=file, weights_only=False)


def test_a_trainer_goes_back_to_its_best_model_and_on_from_there(tmp_path):
    """The best is the first of two checkpoints, because here the highest loss counts as best."""
    best = {"load_best_model_at_end": True, "eval_strategy": "steps", "eval_steps": 2, "greater_is_better": True}
    trainer = make_trainer(tmp_path, metric_for_best_model="loss", **best)
    trainer.train()
    stored = [load_file(tmp_path / f"checkpoint-{step}" / "model.safetensors") for step in (2, 4)]
    found = trainer.model.state_dict()
    assert all(torch.equal(found[name], tensor) for name, tensor in stored[0].items()) and not same(*stored)
    trainer.train()
    assert not torch.equal(*(state["model.layers.0.mlp.up_proj.weight"] for state in (stored[0], found)))
    file = f"{trainer.state.best_model_checkpoint}/model.safetensors"
    save_file({name: t for name, t in stored[0].items() if "up_proj" not in name}, file, {"format": "pt"})
    trainer.evaluate()
    with pytest.raises(UserError, match="up_proj was not loaded with its W"):
        trainer._load_best_model()
