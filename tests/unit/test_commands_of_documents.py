"""The commands in README and documents work: each parser takes its words, each configuration its keys, and runs that are
read were made by an earlier command. TOML has keys that exist, and Python runs."""

import argparse
import re
import runpy
import shlex
import sys
import tomllib
from collections import OrderedDict
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest
import torch

import pc
from helpers.documents import DOCUMENTS, paragraphs
from helpers.tiny import ROOT
from helpers.toy import toy_batch, toy_loss, toy_model
from pc.errors import UserError
from pc_recipe.config import command_line, load_config
from pc_recipe.config.inheritance import validated
from pc_recipe.config.run_key import all_values
from pc_recipe.config.schema import Config
from pc_recipe.runs.sweep import spec

OURS = re.compile(
    r"(?:[A-Z_]+=\S+ )*(?:export |python (?!.*-m(?: [\w.]+)?$|.* COMMAND$)|torchrun .*(?:\.py|-m)|\./run_\w+\.sh|"
    r"(?:scripts|benchmarks|examples|experiments|tests)/[\w/]+\.(?:py|sh) \S)"
)
OTHERS = {"source", "export", "pip", "hf", "lm_eval"}
STAND_FOR = {
    "CONFIG": "train_configs/debug.toml",
    "CONFIG.toml": "train_configs/debug.toml",
    "SWEEP.toml": "train_configs/sweeps/debug_lr.toml",
    "./experiments/mine/tune.toml": "train_configs/sweeps/debug_lr.toml",
    "outputs/sweeps/tune": "outputs/sweeps/debug_lr",
    "N": "2",
    "R": "modes",
}
"""Stand-ins for words that a reader chooses."""


class Parsed(BaseException):
    """Raised instead of what the command would do."""


def shell_lines(document: str) -> Iterator[str]:
    """The commands of a page in order: those in blocks, and those between backticks that begin with a program of ours.

    Commands about the past are left out, and so are lines that end in " ...".
    """
    for paragraph, past in paragraphs(document):
        for found in re.findall(
            r"```\w*\n(.*?)(?:```|\Z)|^ {4}(\S[^\n]*)|`([^`\n]+)`", paragraph, re.DOTALL | re.MULTILINE
        ):
            lines = "".join(found).splitlines()
            if lines and OURS.match(lines[0]) and not past:
                yield from (line for line in lines if not line.endswith(" ..."))


def expanded(word: str) -> list[str]:
    """The words that a shell makes of it, with placeholders filled in."""
    if braces := re.fullmatch(r"(.*)\{(.*,.*)\}(.*)", word):
        return [braces[1] + choice + braces[3] for choice in braces[2].split(",")]
    if "*" in word and (found := sorted(ROOT.glob(word))):
        return [str(file.relative_to(ROOT)) for file in found]
    word = word.strip("[]").removesuffix("...")
    return [STAND_FOR.get(word, word)] if word else []


class Page:
    """Runs the commands of a page in the repository's root, each until it has parsed its words."""

    def __init__(self, monkeypatch) -> None:
        self.made = ["outputs/demo"]
        """What the commands so far may have written. All pages may use the result of the README's first command."""
        self.read: list[str] = []
        self.variables: dict[str, str] = {}
        original = argparse.ArgumentParser.parse_known_args

        def parse(parser, args=None, namespace=None):
            parser.allow_abbrev = False  # else a prefix of an option counts as the option
            found = original(parser, args, namespace)
            if args is None:  # a subparser gets its arguments
                raise Parsed(*found, "[--section.key=value ...]" in parser.format_usage())
            return found

        monkeypatch.setattr(argparse.ArgumentParser, "parse_known_args", parse)
        monkeypatch.setattr(command_line, "existing", lambda text: self.read.append(text) or Path(text))

    def check(self, line: str) -> None:
        """Raises SystemExit for what a parser refuses, UserError for a wrong setting, else AssertionError."""
        line = re.sub(r"\[?--section.key value( \.\.\.\])?", "", line)
        words = shlex.split(re.sub(r"\$([A-Z])\b", lambda name: self.variables[name[1]], line), comments=True)
        while words and re.match(r"[A-Z_]+=", words[0]):
            name, _, value = words.pop(0).partition("=")
            self.variables[name] = value
        if not words:
            return
        program, *words = [one for word in words for one in expanded(word)]
        if program == "sbatch":
            for wrapped in words[words.index("--wrap") + 1 :] if "--wrap" in words else ():
                self.check(wrapped)
        elif program == "./run_tests.sh" or words == ["--setup"]:
            assert all(word in (ROOT / program).read_text() for word in words)
        elif program == "./run_llama_train.sh":
            self.parse("pc_recipe.runs.local", words or ["train_configs/demo.toml"])
        elif program in ("python", "torchrun"):
            while not words[0].endswith(".py") and words.pop(0) != "-m":
                pass  # the options of torchrun
            self.parse(words[0], words[1:])
        elif program.endswith(".py"):
            self.parse(program, words)
        else:
            assert program in OTHERS or (ROOT / program).is_file(), program
        self.made += [*words, *(f"outputs/sweeps/{Path(word).stem}" for word in words if word.endswith(".toml"))]

    def parse(self, program: str, words: list[str]) -> None:
        sys.argv[:] = [program, *words]
        self.read.clear()
        run = runpy.run_path if program.endswith(".py") else partial(runpy.run_module, alter_sys=True)
        with pytest.raises(Parsed) as parsed:
            run(program, run_name="__main__")
        namespace, rest, takes_settings = parsed.value.args
        assert takes_settings or not rest, rest
        if takes_settings:
            self.made.append(load_config(namespace.config, rest).job.dump_folder)
        if program == "scripts/sweep.py":
            self.made += [str(spec.load(sweep).folder) for sweep in namespace.sweeps]
        for path in self.read:
            made = any(f"{path}/".startswith(f"{folder}/") for folder in self.made)
            assert made or path.split("/")[0].isupper() or (ROOT / path).exists(), f"no command before has made {path}"


@pytest.fixture
def page(monkeypatch):
    monkeypatch.chdir(ROOT)
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    monkeypatch.setattr(sys, "argv", [])
    return Page(monkeypatch)


@pytest.mark.parametrize("document", [document for document in DOCUMENTS if any(shell_lines(document))])
def test_commands(page, document):
    for line in shell_lines(document):
        try:
            page.check(line)
        except (AssertionError, UserError, SystemExit) as error:
            pytest.fail(f"{line}: {error!r}")


@pytest.mark.parametrize(
    "line",
    [
        "python scripts/report.py RUN --outptu a.html",
        "python scripts/report.py outputs/never-made",
        "python scripts/sweep.py plan train_configs/sweeps/none.toml",
        "python scripts/sweep.py chose SWEEP.toml",
        "python scripts/cost.py",
        "./run_llama_train.sh train_configs/debug.toml --optimizer.rate 1e-3",
        "./run_llama_train.sh train_configs/none.toml",
        "./run_tests.sh --slow",
        "scripts/none.sh",
    ],
)
def test_a_wrong_command_is_found(page, line):
    with pytest.raises((AssertionError, UserError, SystemExit)):
        page.check(line)


def fenced(language: str) -> list:
    return [
        pytest.param(block, id=f"{document}-{i}")
        for document in DOCUMENTS
        for i, block in enumerate(re.findall(rf"```{language}\n(.*?)```", (ROOT / document).read_text(), re.DOTALL))
    ]


@pytest.mark.parametrize("block", fenced("toml"))
def test_toml(block):
    values = tomllib.loads(block)
    values.pop("parent", None)
    if "configs" in values:
        settings = validated(values, spec.SweepConfig, "sweep")
        tables = [settings.axes, *settings.arms.values(), *settings.variants.values()]
        assert {key for table in tables for key in table} <= all_values(Config()).keys()
    elif "custom_config_module" in values.get("job", {}):  # TorchTitan's own trainer; its test runs such files
        validated({"pc": values["pc"]}, Config, "TorchTitan")
    else:
        validated(values, Config, "config")


@pytest.mark.parametrize("block", [one for one in fenced("python") if "owner" not in one.id])  # that one needs 8 ranks
def test_python(block, tmp_path, monkeypatch):
    """With the names that its page assumes: a model (with PC, unless the block attaches it), an optimizer, data."""
    monkeypatch.chdir(tmp_path)
    model = torch.nn.Sequential(OrderedDict(layers=toy_model(), norm=torch.nn.LayerNorm(7).double()))
    names = {"torch": torch, "pc": pc, "model": model, "loss": toy_loss, "data": [[toy_batch(0), toy_batch(1)]]}
    if "attach" not in block:
        pc.attach(model)
    if "pull_back" in block and "precondition(" not in block:
        names["preconditioner"] = pc.precondition(model, torch.optim.SGD(model.parameters(), lr=0.1))
        toy_loss(model, toy_batch(0)).backward()
        names |= {"layer": model.layers[0].attention["wo"], "mask": torch.ones(7, 7)}
    exec(block, names)
