"""The page about runs, whose sentences follow from the numbers."""

import json
import re
import tomllib

import pytest
import tomli_w

from helpers.made_runs import make_run, validations, write_metrics, write_run
from helpers.tiny import make_shards
from pc import PCConfig
from pc_recipe.files.run_folder import write_state
from pc_recipe.files.run_log import BITS_PER_BYTE, read_logs
from pc_recipe.report import run_page
from pc_recipe.report.settings import differences

BASE = {"model": {"flavor": "tiny", "vocab_size": 64}, "training": {"seq_len": 64}}


def runs(folder, losses=((5.0, 4.0, 3.0), (4.0, 3.0, 2.5)), **differing):
    """A baseline and a run of these validation losses, the second with other settings {"section": {...}}."""
    paths = []
    for name, values, more in zip(("baseline", "pc"), losses, ({}, differing), strict=True):
        paths.append(write_run(folder / name, validations(values)))
        settings = {section: BASE.get(section, {}) | more.get(section, {}) for section in BASE | more}
        (folder / name / "config.toml").write_text(tomli_w.dumps(settings))
    return paths


def test_page_and_lines_say_the_same(tmp_path):
    paths = runs(tmp_path, pc={"enable": True}, optimizer={"lr": 0.5})
    text = run_page.write(paths, tmp_path / "out" / "report.html")
    page = (tmp_path / "out" / "report.html").read_text()
    assert len(text.splitlines()) == 5 and (tmp_path / "out" / "report.png").is_file()
    verdict = (
        "pc ends 0.500 nats per token below baseline, whose final loss it reaches after 200 of 300 tokens (33% saved)"
    )
    assert verdict in text and f"<h1>{verdict}</h1>" in page
    assert "baseline: no checkpoint, pc: no checkpoint\nThey differ in pc.enable, optimizer.lr. One seed each: " in text
    assert "Llama, AdamW, no PC" in text and "Llama, AdamW, PC level 4 on o, gate, up, down" in text
    listed = re.findall("<li>(.*?)</li>", page.partition("<h2>More")[0])
    assert listed == ["pc.enable: False in baseline, True in pc", "optimizer.lr: 0.0008 in baseline, 0.5 in pc"]
    assert "One run each" in page and "no checkpoint" in page
    assert len(page) < 1e6 and "<script" not in page and not re.search(r"(src|href)=.?http", page)


def test_losses_are_in_bits_per_byte_where_all_runs_have_logged_them(tmp_path):
    paths = runs(tmp_path)
    for path, with_bits, values in zip(paths, (False, True), ((5.0, 4.0, 3.0), (4.0, 3.0, 2.5)), strict=True):
        write_run(path, [line | {BITS_PER_BYTE: line["validation_loss"] / 4} for line in validations(values)])
        text = run_page.write(paths, tmp_path / "report.html")
        page = (tmp_path / "report.html").read_text()
        assert ("pc ends 0.125 bits per byte below baseline, whose" in text) == with_bits
        assert ("Validation loss 0.625 bits per byte" in text) == with_bits
        assert ("<td>0.6250 (2.5000 nats per token)</td>" in page) == with_bits
        assert (page.count("validation loss (bits per byte)") > 0) == with_bits


def test_validations_from_before_bits_per_byte_were_logged_stay_on_the_page(tmp_path):
    """Of a run that an earlier version began: its losses are all in nats per token."""
    paths = runs(tmp_path)
    for path, values in zip(paths, ((5.0, 4.0, 3.0), (4.0, 3.0, 2.5)), strict=True):
        first, *later = validations(values)
        write_run(path, [first, *(line | {BITS_PER_BYTE: line["validation_loss"] / 4} for line in later)])
    assert "pc ends 0.500 nats per token below baseline, whose" in run_page.write(paths, tmp_path / "report.html")


def test_what_pc_cost_is_measured_within_its_run(tmp_path):
    """Not the difference of two runs, between which the machine's load may change."""
    paths = runs(tmp_path)
    for path, seconds, pc_seconds in zip(paths, (4.0, 2.0), ({}, {"pc_seconds": 0.25}), strict=True):
        lines = [line | {"loss": 2.0, "step_seconds": seconds} | pc_seconds for line in validations((2.0, 1.0))]
        write_run(path, lines)
    run_page.write(paths, tmp_path / "report.html")
    page = (tmp_path / "report.html").read_text()
    assert "<td>4</td><td>-</td>" in page and "<td>2</td><td>0.25 (12.5%)</td>" in page


def test_other_code_and_earlier_settings_are_differences(tmp_path):
    """A run whose rate changed at a resume does not count as a run with its last rate."""
    paths = runs(tmp_path)
    for path, torch in zip(paths, ("2.12.0", "2.13.0"), strict=True):
        (path / "environment.json").write_text(json.dumps({"commit": torch[2:4], "code": {"torch": torch}}))
    first = tomllib.loads((paths[1] / "config.toml").read_text()) | {
        "optimizer": {"lr": 0.5},
        "metrics": {"log_freq": 7},
    }
    (paths[1] / "config.1.toml").write_text(tomli_w.dumps(first))
    run_page.write(paths, tmp_path / "report.html")
    listed = re.findall("<li>(.*?)</li>", (tmp_path / "report.html").read_text().partition("<h2>More")[0])
    assert listed == [
        "optimizer.lr: changed within pc",
        "code, torch or TorchTitan: commits 12 in baseline, 13 in pc",
    ]


def test_a_run_that_has_not_finished_is_called_so(tmp_path):
    """Also if it is the only run, of which only losses are known, and nothing is compared."""
    path = write_run(tmp_path / "<i>", validations((5.0, 4.0)), "stopped")
    said = run_page.write([path], tmp_path / "report.html")
    page = (tmp_path / "report.html").read_text()
    assert "<i>: its configuration is not known, stopped. " in said
    assert "&lt;i&gt;: its configuration is not known, stopped</p>" in page and "<i>" not in page


@pytest.mark.parametrize(
    "losses, sentence",
    [
        (((3.0, 2.0), (3.5, 2.5)), "pc ends 0.500 nats per token above baseline: it saves no tokens here"),
        (((3.0, 2.0), (3.5, None)), "pc cannot be compared with baseline: a final loss is not finite"),
    ],
)
def test_where_pc_does_not_lead_the_page_says_so(tmp_path, losses, sentence):
    assert sentence in run_page.write(runs(tmp_path, losses), tmp_path / "report.html")


@pytest.mark.parametrize("name", ["baseline", "pc"])
@pytest.mark.parametrize("state", ["diverged", "stopped", "failed", "running"])
def test_a_run_that_has_not_finished_has_no_final_loss(tmp_path, name, state):
    """It may have led at equal tokens, or stopped before its learning rate fell."""
    paths = runs(tmp_path)
    write_state(tmp_path / name, state, 2, 3)
    text = run_page.write(paths, tmp_path / "report.html")
    state = "interrupted" if state == "running" else state
    said = f"pc is not compared with baseline: {name} has not finished ({state})"
    assert text.splitlines()[2] == said and "saved" not in text
    page = (tmp_path / "report.html").read_text()
    assert f"<h1>{said}</h1>" in page and "1.50x" not in page


def test_a_run_without_a_validation_at_its_end_has_no_final_loss(tmp_path):
    """As after a resume for more steps without validation."""
    paths = runs(tmp_path)
    write_state(tmp_path / "pc", "finished", 4, 4)
    text = run_page.write(paths, tmp_path / "report.html")
    assert text.splitlines()[2] == "pc is not compared with baseline: pc was not validated at its last step"


@pytest.mark.parametrize("differing", [{"training": {"seq_len": 32}}, {"data": {"validation_sequences": 8}}])
def test_losses_over_other_sequences_are_not_compared(tmp_path, differing):
    text = run_page.write(runs(tmp_path, **differing), tmp_path / "report.html")
    assert "pc is not compared with baseline: validated on other sequences" in text


def test_condition_numbers_name_their_matrices(tmp_path):
    """Each run, even a baseline, logs those of its own pc.blocks."""
    for blocks, title in ((["ffn", "o"], "of o, gate, up, down"), (["o"], "of different matrices in each run")):
        paths = runs(tmp_path, pc={"enable": True, "blocks": blocks})
        for path in paths:
            write_metrics(path, gain=1.0, estimates=False)
        run_page.write(paths, tmp_path / "report.html")
        page = (tmp_path / "report.html").read_text()
        assert f"Condition number {title}" in page
        assert ("o, gate, up, down in baseline; o in pc" in page) == (blocks == ["o"])


def test_settings_of_runs_with_pc_are_compared_among_themselves(tmp_path):
    """A baseline, at whatever position, has none of them."""
    for name, settings in {"a": {"level": 2}, "b": {"enable": False}, "c": {"level": 4}}.items():
        write_run(tmp_path / name, validations([2.0, 1.0]))
        settings = BASE | {"pc": {"enable": True} | settings}
        (tmp_path / name / "config.toml").write_text(tomli_w.dumps(settings))
    level = "pc.level: 2 in a, 4 in c"
    assert differences(read_logs([tmp_path / name for name in "abc"])) == [
        "pc.enable: True in a, False in b, True in c", level
    ]  # fmt: skip
    assert differences(read_logs([tmp_path / name for name in "bac"])) == [
        "pc.enable: False in b, True in a, True in c", level
    ]  # fmt: skip


def test_a_batch_of_one_micro_batch_per_rank_depends_on_the_ranks(tmp_path):
    for name, ranks, batch in (("a", 8, 64), ("b", 1, 1)):
        write_run(tmp_path / name, validations([2.0, 1.0]))
        settings = BASE | {"training": {"seq_len": 64, "local_batch_size": batch}}
        (tmp_path / name / "config.toml").write_text(tomli_w.dumps(settings))
        (tmp_path / name / "environment.json").write_text(json.dumps({"world_size": ranks}))
    logs = read_logs([tmp_path / "a", tmp_path / "b"])
    assert differences(logs) == ["training.global_batch_size: 512 in a, 1 in b"]


def test_another_model_has_no_speedup(tmp_path):
    paths = runs(tmp_path, model={"dim": 64})
    text = run_page.write(paths, tmp_path / "report.html")
    assert "pc is not compared with baseline: another model" in text and "saved" not in text
    page = (tmp_path / "report.html").read_text()
    assert "<td>another model</td>" in page and "1.50x" not in page
    assert "model.dim: None in baseline, 64 in pc" in page and "They differ in model.dim. One seed each" in text


def test_matrix_and_text_are_those_of_the_checkpoint(tmp_path):
    made = make_run(tmp_path / "run", make_shards(tmp_path / "data", "mistral-common"), PCConfig(level=4))
    (tmp_path / "run" / "metrics.jsonl").write_text("")
    write_run(tmp_path / "run", validations([2.0]))
    run_page.write([tmp_path / "run"], tmp_path / "report.html")
    page = (tmp_path / "report.html").read_text()
    assert made.checkpoint.is_dir() and "Singular values of up, middle layer" in page
    assert page.count("The river") == 2  # in the heading, and in the text that continues it


def test_everything_that_was_logged_is_drawn(tmp_path):
    pair = tmp_path / "baseline", tmp_path / "pc"
    for run, with_pc in zip(pair, (False, True), strict=True):
        write_metrics(run, gain=0.05 * with_pc, estimates=with_pc)
    run_page.write(pair, tmp_path / "report.html")
    page = (tmp_path / "report.html").read_text()
    for title in ("Training loss", "Training loss against time", "Validation loss against time"):
        assert f">{title}<" in page
    assert page.count("output, RMS, mean over layers") == 2 and "Error of the spectral norm" in page
