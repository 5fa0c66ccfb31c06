"""The chain of TOML files and the command line give one checked configuration."""

import tomllib
from dataclasses import dataclass, field
from typing import Literal

import pytest

from pc.common.files import sha256_of
from pc.errors import UserError
from pc.titan.toml import dump_folder, parse_overrides, resolve, to_config, write_resolved


@dataclass
class Loader:
    workers: int = 0
    prefetch: int | None = None


@dataclass
class Training:
    steps: int = 10
    max_norm: float | int = 1.0
    loader: Loader = field(default_factory=Loader)


@dataclass
class Optimizer:
    name: Literal["AdamW", "Muon"] = "AdamW"
    lr: float = 1e-3
    fused: bool = False


@dataclass
class Method:
    level: int | str | list[float] | dict[str, int | str | list[float]] = 4
    blocks: list[str] = field(default_factory=lambda: ["o"])
    note: str = ""


@dataclass
class Config:
    training: Training = field(default_factory=Training)
    optimizer: Optimizer = field(default_factory=Optimizer)
    method: Method = field(default_factory=Method)


@pytest.fixture
def write(tmp_path):
    def write(name: str, text: str):
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        return path

    return write


def test_precedence_is_command_line_then_file_then_parents(write):
    write("base.toml", "[optimizer]\nlr = 1.0\nfused = true\n[training]\nsteps = 1\nmax_norm = 3")
    write("sub/middle.toml", 'parent = "../base.toml"\n[optimizer]\nlr = 2.0\n[training]\nsteps = 2')
    leaf = write("sub/leaf.toml", 'parent = "middle.toml"\n[training]\nsteps = 3')
    assert resolve(leaf, [], Config) == {
        "optimizer": {"lr": 2.0, "fused": True},
        "training": {"steps": 3, "max_norm": 3},
    }
    assert resolve(leaf, ["--training.steps", "4"], Config)["training"]["steps"] == 4


def test_sections_merge_and_values_replace(write):
    write("base.toml", '[training.loader]\nworkers = 2\n[method]\nblocks = ["q", "k"]\nlevel = {o = 4, ffn = 2}')
    leaf = write(
        "leaf.toml",
        'parent = "base.toml"\n[training.loader]\nprefetch = 3\n[method]\nblocks = ["v"]\nlevel = {ffn = 3}',
    )
    assert resolve(leaf, [], Config) == {
        "training": {"loader": {"workers": 2, "prefetch": 3}},
        "method": {"blocks": ["v"], "level": {"ffn": 3}},
    }


@pytest.mark.parametrize(
    "words, expected",
    [
        (["--training.steps", "5"], {"training": {"steps": 5}}),
        (["--training.loader.workers=2"], {"training": {"loader": {"workers": 2}}}),
        (["--training.max-norm", "2"], {"training": {"max_norm": 2}}),
        (["--optimizer.lr", "1e-3"], {"optimizer": {"lr": 1e-3}}),
        (["--optimizer.lr", "3"], {"optimizer": {"lr": 3.0}}),
        (["--optimizer.lr=.5"], {"optimizer": {"lr": 0.5}}),
        (["--optimizer.fused"], {"optimizer": {"fused": True}}),
        (
            ["--optimizer.fused", "--training.steps", "1"],
            {"optimizer": {"fused": True}, "training": {"steps": 1}},
        ),
        (["--optimizer.fused", "false"], {"optimizer": {"fused": False}}),
        (["--optimizer.name", "Muon"], {"optimizer": {"name": "Muon"}}),
        (["--method.level", "2"], {"method": {"level": 2}}),
        (["--method.level", "polar_express"], {"method": {"level": "polar_express"}}),
        (
            ["--method.level", '{o = 4, ffn = "polar_express"}'],
            {"method": {"level": {"o": 4, "ffn": "polar_express"}}},
        ),
        (["--method.level", "2.5,-1.5"], {"method": {"level": [2.5, -1.5]}}),
        (["--method.level", "[2, -1.5, 0.5]"], {"method": {"level": [2.0, -1.5, 0.5]}}),
        (["--method.level", "{o = [1.5, -0.5], ffn = 2}"], {"method": {"level": {"o": [1.5, -0.5], "ffn": 2}}}),
        (["--method.blocks", "o"], {"method": {"blocks": ["o"]}}),
        (["--method.blocks", "o,ffn"], {"method": {"blocks": ["o", "ffn"]}}),
        (["--method.blocks", '["o", "ffn"]'], {"method": {"blocks": ["o", "ffn"]}}),
        (["--method.blocks="], {"method": {"blocks": []}}),
        (["--method.note", "1.5"], {"method": {"note": "1.5"}}),
        (["--method.note=a=b --c"], {"method": {"note": "a=b --c"}}),
    ],
)
def test_command_line_words_take_the_declared_type(words, expected):
    parsed = parse_overrides(words, Config)
    assert parsed == expected
    # 3 == 3.0 in Python; the types must be right too
    assert repr(parsed) == repr(expected)


@pytest.mark.parametrize(
    "text, said",
    [
        ("[optimizer]\nlearning_rate = 1", "unknown key optimizer.learning_rate"),
        ("[optimizer]\nsteps = 1", "did you mean training.steps?"),
        ("[optimiser]\nlr = 1", "unknown key optimiser; did you mean optimizer?"),
        ("[training]\nstep = 1", "did you mean training.steps?"),
        ("lr = 1", "did you mean optimizer.lr?"),
        ("training = 3", "training is a section"),
        ("[training]\nsteps = 5.5", "training.steps = 5.5 should be an integer"),
        ("[training]\nsteps = true", "training.steps = True should be an integer"),
        ('[training]\nsteps = "5"', "training.steps = '5' should be an integer"),
        ('[optimizer]\nlr = "fast"', "optimizer.lr = 'fast' should be a finite number"),
        ("[optimizer]\nlr = 2020-01-01", "optimizer.lr"),
        ("[optimizer]\nfused = 1", "optimizer.fused = 1 should be true or false"),
        ('[optimizer]\nname = "SGD"', "should be one of 'AdamW', 'Muon'"),
        ("[method]\nblocks = [1]", "method.blocks = [1] should be a list of a string"),
        ('[method]\nblocks = "o"', "should be a list"),
        ("[method]\nlevel = 1.5", "should be an integer or a string or a list"),
        ("[method]\nlevel = {o = 1.5}", "method.level"),
        ("[training.loader]\nworker = 1", "did you mean training.loader.workers?"),
        ("steps = = 1", "not valid TOML"),
        ("parent = 3", "parent must be the name of a TOML file"),
        ('parent = "gone.toml"', 'gone.toml": no such file'),
    ],
)
def test_bad_files_are_named_with_the_key(write, text, said):
    # The fault is in the parent: the message must name that file, not the child.
    parent = write("faulty.toml", text)
    leaf = write("leaf.toml", 'parent = "faulty.toml"\n')
    with pytest.raises(UserError) as raised:
        resolve(leaf, [], Config)
    assert said in str(raised.value)
    assert str(raised.value).startswith(str(parent))
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize(
    "words, said",
    [
        (["--training.step", "5"], "did you mean training.steps?"),
        (["--steps", "5"], "did you mean training.steps?"),
        (["--training", "5"], "is a section"),
        (["--training.steps"], "needs a value"),
        (["--training.steps", "5.5"], "should be an integer"),
        (["--training.steps.more", "5"], "unknown key training.steps.more"),
        (["training.steps", "5"], "is not an override"),
        (["--optimizer.fused", "yes"], "should be true or false"),
        (["--optimizer.lr", "fast"], "should be a finite number"),
    ],
)
def test_bad_overrides_are_named(words, said):
    with pytest.raises(UserError, match="command line: ") as raised:
        parse_overrides(words, Config)
    assert said in str(raised.value)


def test_cycle_of_parents(write):
    first = write("first.toml", 'parent = "second.toml"')
    write("second.toml", 'parent = "first.toml"')
    with pytest.raises(UserError, match="cycle: first.toml -> second.toml -> first.toml"):
        resolve(first, [], Config)


def test_missing_file(tmp_path):
    with pytest.raises(UserError, match="nothing.toml: no such file"):
        resolve(tmp_path / "nothing.toml", [], Config)


def test_written_file_resolves_to_itself_and_names_its_ancestors(write, tmp_path):
    base = write("base.toml", "[optimizer]\nlr = 1e-3\n")
    leaf = write("leaf.toml", 'parent = "base.toml"\n[method]\nnote = "tab\\t quote\\" del\\u007f ü"\nblocks = ["a"]\n')
    overrides = ["--training.steps", "3", "--method.level={o = 4}"]
    written = tmp_path / "run" / "config.toml"
    resolved = write_resolved(leaf, overrides, Config, written)
    assert tomllib.loads(written.read_text()) == resolved == resolve(leaf, overrides, Config)
    assert resolve(written, [], Config) == resolved
    comments = [line for line in written.read_text().splitlines() if line.startswith("#")]
    assert "--training.steps 3" in comments[1]
    assert [line.split()[-1] for line in comments[2:]] == [sha256_of(leaf), sha256_of(base)]


def test_a_line_break_in_an_override_cannot_leave_the_comment(write, tmp_path):
    leaf = write("leaf.toml", "")
    resolved = write_resolved(leaf, ["--method.note", "x\n[training]\nsteps = 1"], Config, tmp_path / "c.toml")
    assert (
        tomllib.loads((tmp_path / "c.toml").read_text()) == resolved == {"method": {"note": "x\n[training]\nsteps = 1"}}
    )


def test_to_config_fills_in_defaults():
    config = to_config({"training": {"steps": 3, "loader": {"workers": 2}}}, Config)
    assert config == Config(training=Training(steps=3, loader=Loader(workers=2)))


def test_dump_folder_is_named_after_the_config():
    assert str(dump_folder("configs/tiny.toml", {})) == "outputs/tiny"
    assert str(dump_folder("configs/tiny.toml", {"job": {"dump_folder": "elsewhere/run"}})) == "elsewhere/run"


def test_torchtitan_own_config_is_understood(write):
    """The checker knows every annotation that TorchTitan uses."""
    from dataclasses import asdict

    from torchtitan.config import JobConfig

    def without_none(table):
        return {k: without_none(v) if isinstance(v, dict) else v for k, v in table.items() if v is not None}

    import tomli_w

    defaults = without_none(asdict(JobConfig()))
    path = write("defaults.toml", tomli_w.dumps(defaults))
    assert resolve(path, [], JobConfig) == defaults
