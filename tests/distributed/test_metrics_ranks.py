"""Diagnostics over ranks against one process, which unit/train/test_diagnostics compares with a float64 SVD."""

import json
import re

from helpers import tiny
from helpers.ranks import run_ranks

TP2 = ["--parallelism.tensor_parallel_degree", "2"]
LAYOUTS = {
    "one process": (1, []),
    "FSDP3": (3, []),
    "HSDP2x2": (4, ["--parallelism.data_parallel_replicate_degree", "2", "--training.local_batch_size", "1"]),
    "TP2 x FSDP2": (4, TP2),
    "PP2": (2, ["--parallelism.pipeline_parallel_degree", "2"]),
}
WORDS = [
    "--training.steps",
    "1",
    "--lr_scheduler.total_steps",
    "6",
    "--diagnostics.freq",
    "1",
    "--diagnostics.spectra_freq",
    "1",
]
KINDS = ("signal/", "norm/", "pc/gamma/", "spectra/condition/", "spectra/gmcn/", "spectra/estimate_error/")
QUIET = ["--validation.enable", "false", "--checkpoint.enable", "false"]


def _lines(folder):
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def _measured(folder):
    """All numbers of diagnostics that a run logged: those of lines without its loss."""
    lines = _lines(folder)
    measured = {key: value for line in lines if "loss" not in line for key, value in line.items()}
    return {key: measured[key] for key in measured.keys() - {"step", "tokens", "time"}}


def test_ranks_agree_with_one_process(tiny_config, tmp_path):
    found = {}
    for layout, (ranks, words) in LAYOUTS.items():
        folder = tmp_path / layout
        run_ranks(ranks, tiny.train, tiny_config[0], [*WORDS, *QUIET, *words, "--job.dump_folder", str(folder)])
        found[layout] = _measured(folder)
    expected = found.pop("one process")
    assert {kind for kind in KINDS if any(key.startswith(kind) for key in expected)} == {*KINDS}
    for layout, metrics in found.items():
        # a pipeline does not measure outputs in the first step, in which it infers shapes
        keys = {key for key in expected if layout != "PP2" or not key.startswith("signal/")}
        assert metrics.keys() == keys, layout
        for key in keys:
            # float32 sums in another order; the estimate's error is a difference of nearly equal numbers
            tolerance = 2e-6 if "estimate_error" in key else 2e-5 * abs(expected[key])
            assert abs(metrics[key] - expected[key]) <= tolerance, (layout, key)


def test_each_logged_number_has_its_row_in_the_table(tiny_config):
    config, folder = tiny_config
    run_ranks(1, tiny.train, config, WORDS)
    rows = re.findall(r"^\| (`.*?) \|", (tiny.ROOT / "docs" / "analysis.md").read_text(), re.MULTILINE)
    names = re.findall("`(.*?)`", " ".join(rows))
    patterns = [re.sub("<.*?>", "[^/]+", re.sub("{(.*?)}", r"(\1)", name).replace(",", "|")) for name in names]
    logged = {name for line in _lines(folder) for name in line}
    assert {"loss", "validation_loss", "pc/gamma/layers.0.attention.wo"} <= logged
    assert not {name for name in logged if not any(re.fullmatch(pattern, name) for pattern in patterns)}
