"""A sweep's TOML becomes a list of runs, or one clear line."""

import pytest

from pc.errors import UserError
from pc_recipe.config import load_config
from pc_recipe.runs.sweep.spec import label, load


@pytest.fixture
def sweep(tmp_path, monkeypatch):
    """Loads a sweep from its text; the working directory holds the sweep and a config."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "tiny.toml").write_text("[training]\nseq_len = 32\nsteps = 5\n")

    def read(text: str):
        (tmp_path / "sweep.toml").write_text('configs = ["tiny.toml"]\n' * ("configs" not in text) + text)
        return load("sweep.toml")

    return read


def test_product_of_configs_axes_and_seeds(sweep, tmp_path):
    (tmp_path / "other.toml").write_text('parent = "tiny.toml"\n')
    runs = sweep(
        'configs = ["tiny.toml", "other.toml"]\nseeds = [3, 4]\n'
        '[axes]\n"optimizer.lr" = [1e-3, 2e-3]\n"pc.blocks" = [["o"], ["o", "ffn"]]\n'
    ).runs
    assert len(runs) == 2 * 2 * 2 * 2
    run = runs[-1]
    assert run.name == "other/lr-0.002_blocks-o+ffn/seed-4"
    assert run.setting_name == "other/lr-0.002_blocks-o+ffn"
    values = load_config(run.config, run.overrides).model_dump()
    assert values["optimizer"]["lr"] == 2e-3 and values["pc"]["blocks"] == ["o", "ffn"]
    assert values["debug"]["seed"] == values["data"]["seed"] == 4
    assert values["job"]["dump_folder"] == str(run.folder) == "outputs/sweeps/sweep/" + run.name


@pytest.mark.parametrize(
    "value, name, shown",
    [
        ('"polar_express"', "polar-express", "polar_express"),
        ("3", "3", "3"),
        ('{ o = 4, ffn = "polar_express" }', "o=4+ffn=polar-express", "o=4+ffn=polar_express"),
        ("[1.5, -0.5]", "1.5+-0.5", "1.5+-0.5"),
    ],
)
def test_values_of_any_type_reach_the_run(sweep, value, name, shown):
    (run,) = sweep(f'[axes]\n"pc.level" = [{value}]\n').runs
    assert load_config(run.config, run.overrides).pc.level == run.settings["pc.level"]
    assert run.name == f"level-{name}" and label(run.settings) == f"level {shown}"


def test_a_variant_begins_with_the_settings_of_its_arm(sweep, tmp_path):
    (tmp_path / "arms.toml").write_text(
        '[arms.flat]\n"pc.level" = 2\n"pc.blocks" = ["o"]\n[arms.other]\n"pc.level" = 1\n'
    )
    (run,) = sweep('parent = "arms.toml"\nconfigs = ["tiny.toml"]\n[variants.flat]\n"pc.level" = 3\n').runs
    pc = load_config(run.config, run.overrides).pc
    assert run.name == "flat" and pc.level == 3 and pc.blocks == ["o"]
    assert run.settings == {"pc.level": 3, "pc.blocks": ["o"]}


@pytest.mark.parametrize(
    "text, said",
    [
        ("configs = []", "configs is empty"),
        ('configs = ["gone.toml"]', "gone.toml: No such file"),
        ('[axes]\n"optimizer.lr" = []', "axes.optimizer.lr = [] should have at least 1 item"),
        ('[axes]\n"optimizer.lt" = [1.0]', "did you mean optimizer.lr"),
        ('[axes]\n"optimizer.lr" = ["fast"]', "optimizer.lr = 'fast' should be a valid number"),
        (
            "[axes]\noptimizer.lr = [1.0]",
            """axes = {'optimizer': {'lr': [1.0]}} should have keys in quotes: "optimizer.lr" =""",
        ),
        (
            "[variants.hot]\noptimizer.lr = 1.0",
            "variants.hot = {'optimizer': {'lr': 1.0}} should have keys in quotes: \"",
        ),
        ("[arms.hot]\noptimizer.lr = 1.0\n[variants.hot]", "arms.hot = {'optimizer': {'lr': 1.0}} should have keys in"),
        ('[axes]\n"optimizer.lr" = [1.0, 1.0]', "two runs have the same name"),
        ('seeds = [0]\n[axes]\n"data.seed" = [3, 4]', "data.seed is set by the sweep itself"),
        ('[axes]\n"job.dump-folder" = ["a", "b"]', "job.dump_folder is set by"),
        ('[axes]\n"optimizer.lr" = [2026-11-27]', "optimizer.lr"),
        (
            '[axes]\n"optimizer.lr" = [1.0]\n[variants.a]\n[variants.b]\n"optimizer.lr" = 2.0',
            "axes.optimizer.lr is set by variants.b",
        ),
        (
            '[axes]\n"pc.norm-recovery" = [true]\n[arms.a]\n"pc.norm_recovery" = false\n[variants.a]',
            "axes.pc.norm_recovery is set by arms.a too",
        ),
        ("sedes = [1]", "did you mean seeds"),
        ("[pc]\nlevel = 3", "unknown key pc; this kind of file has description, configs, axes,"),  # a run's
        ('[arms.a]\n"pc.level" = 2\n[variants.b]', "variants.b is no arm; the arms are a"),
        ('[variants."../../x"]\n"optimizer.lr" = 1.0', "variants.'../../x' names a folder"),
    ],
)
def test_bad_sweeps_say_what_is_wrong(sweep, text, said):
    with pytest.raises(UserError) as raised:
        sweep(text)
    assert said in str(raised.value)
    assert "sweep.toml" in str(raised.value) and "\n" not in str(raised.value)
