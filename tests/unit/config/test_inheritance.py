"""The chain of TOML files and the command line give one checked configuration."""

import re
import tomllib

import pytest

from helpers.tiny import ROOT
from helpers.torchless import launch
from pc.errors import UserError
from pc_recipe.config import Config, command_line, inheritance, load_config, write_config
from pc_recipe.config.run_key import all_values
from pc_recipe.files.atomic import sha256_of

pytestmark = pytest.mark.fast


def resolve(path, words=()) -> dict:
    """All keys that are set, with their values."""
    return inheritance.resolve(path, words, Config).model_dump(exclude_unset=True)


@pytest.fixture
def write(tmp_path):
    def write(name: str, text: str):
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        return path

    return write


def test_precedence_is_command_line_then_file_then_parents(write):
    write("base.toml", "[compile]\nenable = true\n[optimizer]\nlr = 1.0\n[training]\nsteps = 1\nmax_norm = 3")
    write("sub/middle.toml", 'parent = "../base.toml"\n[optimizer]\nlr = 2.0\n[training]\nsteps = 2')
    leaf = write("sub/leaf.toml", 'parent = "middle.toml"\n[training]\nsteps = 3')
    assert resolve(leaf) == {
        "compile": {"enable": True},
        "optimizer": {"lr": 2.0},
        "training": {"steps": 3, "max_norm": 3},
    }
    assert resolve(leaf, ["--training.steps", "4"])["training"]["steps"] == 4


def test_sections_merge_and_values_replace(write):
    write(
        "base.toml",
        '[training]\nsteps = 2\n[training.dataloader]\npin_memory = true\n[pc]\nblocks = ["q", "k"]\nlevel = {o = 4, ffn = 2}',
    )
    leaf = write(
        "leaf.toml",
        'parent = "base.toml"\n[training]\nseq_len = 3\n[pc]\nblocks = ["v"]\nlevel = {ffn = 3}',
    )
    assert resolve(leaf) == {
        "training": {"steps": 2, "seq_len": 3, "dataloader": {"pin_memory": True}},
        "pc": {"blocks": ["v"], "level": {"ffn": 3}},
    }


@pytest.mark.parametrize(
    "words, expected",
    [
        (["--training.steps", "5"], {"training": {"steps": 5}}),
        (["--training.dataloader.pin_memory"], {"training": {"dataloader": {"pin_memory": True}}}),
        (["--training.max-norm", "2"], {"training": {"max_norm": 2.0}}),
        (["--optimizer.lr=.5"], {"optimizer": {"lr": 0.5}}),
        (["--pc.level", "2"], {"pc": {"level": 2}}),
        (["--pc.level", "polar_express"], {"pc": {"level": "polar_express"}}),
        (
            ["--pc.level", '{o = 4, ffn = "polar_express"}'],
            {"pc": {"level": {"o": 4, "ffn": "polar_express"}}},
        ),
        (["--pc.level", "2.5,-1.5"], {"pc": {"level": [2.5, -1.5]}}),
        (["--pc.blocks", "o,ffn"], {"pc": {"blocks": ["o", "ffn"]}}),
        (["--pc.blocks", '["o", "ffn"]'], {"pc": {"blocks": ["o", "ffn"]}}),
        (["--data.skip", "9000,9001"], {"data": {"skip": ["9000", "9001"]}}),
        (["--job.description", "1.5"], {"job": {"description": "1.5"}}),
    ],
)
def test_command_line_words_take_the_declared_type(write, words, expected):
    parsed = resolve(write("empty.toml", ""), words)
    assert parsed == expected
    # 3 == 3.0 in Python; the types must be right too
    assert repr(parsed) == repr(expected)


@pytest.mark.parametrize(
    "text, said",
    [
        ("[optimizer]\nlearning_rate = 1", "unknown key optimizer.learning_rate; did you mean optimizer.lr?"),
        ("[optimiser]\nlr = 1", "unknown key optimiser; did you mean optimizer?"),
        ("[training]\nstep = 1", "did you mean training.steps?"),
        ("lr = 1", "unknown key lr; did you mean optimizer.lr?"),
        # a sweep's file, taken for a run's
        ("axes = {}", "unknown key axes; this kind of file has job, profiling, metrics,"),
        ('"optimizer.lr" = 1', "optimizer.lr: write it without quotes, or below [optimizer]"),
        ("[training]\ndataset = 'x'", "training.dataset is not supported by this trainer; see data.path"),
        ("[optimizer]\nmuon_steps = 5", "optimizer.muon_steps is no key any more; leave it out: Muon takes 5 "),
        ("training = 3", "training = 3 should be a valid dictionary"),
        ("[training]\nsteps = 0", "training.steps = 0 should be greater than or equal to 1"),
        ('[job]\ndescription = "\\u0000"', "job.description"),
        ("[training]\nsteps = true", "training.steps = True should be a valid integer"),
        ("steps = = 1", "not valid TOML"),
        ("parent = 3", "No such file"),
        ('parent = "gone.toml"', "gone.toml (parent of "),
        ('parent = "\\u0000"', "No such file"),
    ],
)
def test_bad_files_are_named_with_the_key(write, text, said):
    # The fault is in the parent: the message must name that file, not the child.
    parent = write("faulty.toml", text)
    leaf = write("leaf.toml", 'parent = "faulty.toml"\n')
    with pytest.raises(UserError) as raised:
        resolve(leaf)
    assert said in str(raised.value)
    assert str(parent) in str(raised.value)
    assert "\n" not in str(raised.value)


def test_a_parent_is_a_file(write):
    with pytest.raises(UserError, match="/dev/null should be a file"):
        resolve(write("leaf.toml", 'parent = "/dev/null"'))


@pytest.mark.parametrize(
    "words, said",
    [
        (["--training.step", "5"], "did you mean training.steps?"),
        (["--training.steps", "5.5"], "should be a valid integer"),
        (["--pc.blocks", '["o", 1]'], "pc.blocks.1 = 1 should be a valid string"),
        (["--overlay"], "--overlay needs a TOML file"),
        (["--optimizer.lr", "fast"], "should be a valid number"),
        (["--pc.level.o", "3"], "give --pc.level with all of its entries: --pc.level '{o = ...}'"),
        (
            ["--optimizer.lr_factors={ffn = 1.8, up = 3.0}"],
            "optimizer.lr_factors = {'ffn': 1.8, 'up': 3.0} should name up once",
        ),
    ],
)
def test_bad_overrides_are_named(write, words, said):
    empty = write("empty.toml", "")
    with pytest.raises(UserError, match="command line: ") as raised:
        resolve(empty, words)
    assert said in str(raised.value)


def test_written_file_resolves_to_itself_and_names_its_ancestors(write, tmp_path):
    base = write("base.toml", "[optimizer]\nlr = 1e-3\n")
    leaf = write("leaf.toml", 'parent = "base.toml"\n[job]\ndescription = "tab\\t quote\\" del\\u007f ü"\n')
    overrides = ["--training.steps", "3", "--pc.level={o = 4, ffn = [1.5, -0.5]}", f"--job.dump_folder={tmp_path}/run"]
    config, written = load_config(leaf, overrides), tmp_path / "run" / "config.toml"
    write_config(config, written)
    assert load_config(written) == config
    assert tomllib.loads(written.read_text()) == config.model_dump(exclude_unset=True)
    comments = [line for line in written.read_text().splitlines() if line.startswith("#")]
    assert "--training.steps 3" in comments[1]
    assert [line.split()[-1] for line in comments[2:]] == [sha256_of(leaf), sha256_of(base)]
    again = tmp_path / "again.toml"
    write_config(load_config(written), again)  # as the trainer's processes write it
    assert again.read_bytes() == written.read_bytes()


def test_a_moved_run_is_continued_where_it_is(write, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write_config(load_config(write("leaf.toml", "")), tmp_path / "outputs" / "leaf" / "config.toml")
    assert load_config("outputs/leaf/config.toml").job.dump_folder == "outputs/leaf"
    (tmp_path / "outputs" / "leaf").rename(tmp_path / "moved")
    assert load_config("moved/config.toml").job.dump_folder == "moved"
    assert load_config("moved/config.toml", ["--job.dump_folder=other"]).job.dump_folder == "other"


def test_an_overlay_overrides_words_before_it_but_not_after_it(write, tmp_path):
    leaf = write("leaf.toml", "[optimizer]\nlr = 1.0\neps = 0.5\n[training]\nsteps = 1\nmax_norm = 3")
    below = write("below.toml", "[training]\nmax_norm = 7.0")
    overlay = write("overlay.toml", 'parent = "below.toml"\n[optimizer]\nlr = 2.0\n[training]\nsteps = 2')
    words = ["--optimizer.lr=9", "--training.steps", "9", f"--overlay={overlay}", "--training.steps", "3"]
    assert resolve(leaf, words) == {
        "optimizer": {"lr": 2.0, "eps": 0.5},
        "training": {"steps": 3, "max_norm": 7.0},
    }
    write_config(load_config(leaf, words), tmp_path / "config.toml")
    comments = [line.split()[-1] for line in (tmp_path / "config.toml").read_text().splitlines() if "sha256" in line]
    assert comments == list(map(sha256_of, (overlay, below, leaf)))
    for wrong, said in ((write("wrong.toml", "[training]\nstep = 2"), "training.step;"), ("none.toml", "No such file")):
        with pytest.raises(UserError, match=said) as raised:
            load_config(leaf, ["--overlay", str(wrong)])
        assert str(wrong) in str(raised.value)


def test_every_faulty_key_is_named_once(write):
    file = write("faulty.toml", "[training]\nsteps = 0\n[pc]\nlevel = true\nblock = 1\n")
    with pytest.raises(UserError) as raised:
        load_config(file)
    lines = str(raised.value).splitlines()
    assert len(lines) == 3 and all(str(file) in line for line in lines)


def test_every_key_is_read():
    """By TorchTitan, under the same name, or by this project; no key that exists has a replacement."""
    from functools import reduce

    from torchtitan.config import JobConfig

    code = "".join(file.read_text() for package in ("pc", "pc_recipe") for file in (ROOT / package).rglob("*.py"))

    def is_theirs(name: str) -> bool:
        try:
            reduce(getattr, name.split("."), JobConfig())
        except AttributeError:
            return False
        return True

    keys = list(all_values(Config()))
    assert not [k for k in keys if not is_theirs(k) and not re.search(rf"\.{k.rpartition('.')[2]}\b", code)]
    assert not is_theirs("training.step") and is_theirs("training.steps")  # controls
    assert not set(keys) & (inheritance.INSTEAD.keys() | inheritance.GONE.keys())


def test_help_lists_keys_and_describes_those_that_match_a_word():
    config = "train_configs/271m_adamw_pc.toml"
    status, output = launch(config, "--help")
    assert status == 0 and "--section.key=value" in output and "--help pc" in output
    assert "pc: level, blocks" in output and "Peak learning rate" not in output
    status, output = launch(config, "--help", "optimizer.lr")
    assert status == 0 and "--optimizer.lr=0.0008486\n    Peak learning rate" in output  # this config's value
    assert [line.partition("=")[0] for line in output.splitlines() if line.startswith("--")] == [
        "--optimizer.lr", "--optimizer.lr_factors"
    ]  # fmt: skip


def test_what_the_help_shows_is_what_the_command_line_takes():
    """For every key, with the values of a config and with the defaults."""
    for config in (Config(), load_config(ROOT / "train_configs" / "overlays" / "8_nodes.toml")):
        lines = [line for line in command_line.describe_keys(config, "") if line.startswith("--")]
        shown = [line for line in lines if not line.endswith("=")]  # a key that is not set, or is empty
        assert len(lines) == len(all_values(config)) and len(shown) > 80
        path = ROOT / "train_configs" / "base.toml"
        read = all_values(load_config(path, shown))
        assert all(
            str(read[name]) == str(all_values(config)[name]) for name in (w[2:].partition("=")[0] for w in shown)
        )


@pytest.mark.parametrize("odd", ["\n[training]\nsteps = 1\n#", "\r", "\x01", "\x1b[0m", "\x7f", "\x85", "\u2028"])
def test_no_character_ends_a_comment_of_a_written_file(write, tmp_path, odd):
    """Comments quote words, the path of the config and that of an overlay."""
    leaf, text = write(f"leaf{odd}.toml", ""), f"x{odd}y"
    overlay = write(f"over{odd}.toml", "[optimizer]\nlr = 1.0")
    config = load_config(leaf, ["--job.description", text, "--job.dump_folder=out", "--overlay", str(overlay)])
    write_config(config, tmp_path / "c.toml")
    values = tomllib.loads((tmp_path / "c.toml").read_text())
    assert values == {"job": {"description": text, "dump_folder": "out"}, "optimizer": {"lr": 1.0}}
    again = load_config(tmp_path / "c.toml")
    write_config(again, tmp_path / "d.toml")
    assert again == config and (tmp_path / "d.toml").read_bytes() == (tmp_path / "c.toml").read_bytes()


def test_a_path_that_is_not_utf_8(write, tmp_path):
    leaf = write("leaf\udcff.toml", "")
    write_config(load_config(leaf, ["--job.dump_folder=out"]), tmp_path / "c.toml")
    assert load_config(tmp_path / "c.toml").job.dump_folder == "out"
    with pytest.raises(UserError, match="^name of .*: job.dump_folder = .* should be a valid string"):
        load_config(leaf)


def test_a_file_may_begin_with_a_byte_order_mark(write):
    assert resolve(write("leaf.toml", "\ufeff[training]\nsteps = 3")) == {"training": {"steps": 3}}
