import json
import logging
import math
import resource
import time

import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torchtitan.tools.logging import logger as torchtitan_logger

from pc_recipe.config import Config
from pc_recipe.config.rank_batches import RankBatches
from pc_recipe.files.errors import WriteFailed
from pc_recipe.files.run_log import METRICS_FILE
from pc_recipe.train import metrics
from pc_recipe.train.cpu import use_cpu_where_there_is_no_gpu
from pc_recipe.train.loss_spikes import LossSpikes
from pc_recipe.train.metrics import JsonLinesLogger, PCMetricsProcessor, _spikes_so_far
from pc_recipe.train.parallelize import AlwaysSharded
from pc_recipe.train.upstream_config import JobConfig


def test_json_lines_survive_a_cut_and_keep_json(tmp_path):
    file = tmp_path / "run" / "metrics.jsonl"
    logger = metrics.Loggers()
    logger.add_logger(JsonLinesLogger(file, lambda: 100))
    logger.log({"loss_metrics/global_avg_loss": 2.5, "throughput(tps)": 10.0, "memory/max_active(%)": 1.0}, 1)
    logger.log({"loss_metrics/global_avg_loss": math.nan, "grad_norm": 0.5}, 2)
    with open(file, "a") as broken:
        broken.write('{"step": 3, "lo')  # a crash in the middle of a line
    resumed = JsonLinesLogger(file, lambda: 300)
    resumed.log({"validation_loss": 2.25}, 3)
    first, second, third = (json.loads(line, parse_constant=pytest.fail) for line in file.read_text().splitlines())
    assert (first["loss"], first["tokens"]) == (2.5, 100)
    assert not any("memory" in key or "throughput" in key for key in first)
    assert second["loss"] is None and second["grad_norm"] == 0.5
    assert third["validation_loss"] == 2.25 and third["tokens"] == 300


def test_a_line_that_does_not_fit_on_the_disk_leaves_no_half(tmp_path):
    """The system writes a part of the line and refuses the rest, as on a full disk; later there is space again."""
    file = tmp_path / "metrics.jsonl"
    logger = JsonLinesLogger(file, lambda: 100)
    logger.log({"grad_norm": 1.0}, 1)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (file.stat().st_size + 20, hard))
    try:
        with pytest.raises(WriteFailed, match="could not write .*metrics.jsonl: File too large"):
            logger.log({"grad_norm": 2.0}, 2)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    logger.log({"grad_norm": 3.0}, 3)
    assert [line["step"] for line in map(json.loads, file.read_text().splitlines())] == [1, 3]


def test_loss_spikes():
    spikes = LossSpikes()
    spiky = [8 * math.exp(-0.05 * i) + 3 + 0.01 * math.sin(7 * i) for i in range(200)]
    spiky[100:104] = [5.0, 6.0, 5.5, 4.5]  # one excursion of four losses
    spiky[150] = math.nan
    counts = [spikes.update(step, loss) for step, loss in enumerate(spiky, start=1)]
    assert counts[99:105] == [0, 1, 1, 1, 1, 1] and counts[-1] == 2


def test_spikes_of_a_long_run_are_known_from_the_end_of_its_file(tmp_path):
    losses = [3.0 + 0.01 * math.sin(7 * step) + (step == 100) + 2 * (9970 < step) for step in range(10_000)]
    whole, lines = LossSpikes(), []
    for step, loss in enumerate(losses):
        lines.append(json.dumps({"step": step, "loss": loss, "loss_spikes": whole.update(step, loss)}))
    (tmp_path / METRICS_FILE).write_text("\n".join([*lines, ""]))
    restored = _spikes_so_far(tmp_path)
    assert restored.count == whole.count == 2
    assert restored.update(10_000, 5.0) == 2  # still the same spike
    assert restored.update(10_001, 3.0) == 2 and restored.update(10_002, 5.0) == 3


def _processor(folder, tensorboard=False):
    use_cpu_where_there_is_no_gpu()
    config = Config(metrics={"enable_tensorboard": tensorboard})
    config.job.dump_folder = str(folder)
    config.training.seq_len, config.training.local_batch_size, config.training.global_batch_size = 8, 2, 4
    dims = AlwaysSharded(RankBatches.of(config, 1))
    processor = PCMetricsProcessor(JobConfig(config), dims)
    processor.num_flops_per_token = 1
    return processor


def test_tensorboard_has_the_configuration_and_each_number_once(tmp_path, monkeypatch):
    monkeypatch.setattr(torch.distributed, "get_rank", lambda: 0)
    processor = _processor(tmp_path, tensorboard=True)
    processor.data_loading_times, processor.ntokens_since_last_log = [0.1], 32
    processor.log(1, 3.0, 3.5, 0.5, {"lr": 0.1})
    processor.close()
    (folder,) = (tmp_path / "tb").iterdir()
    events = EventAccumulator(str(folder)).Reload()
    (text,) = events.Tensors("configuration/text_summary")
    assert b"enable_tensorboard = true" in text.tensor_proto.string_val[0]
    scalars = events.Tags()["scalars"]
    assert {"loss", "lr", "tokens", "tokens_per_second", "step_seconds"} <= {*scalars} and not any(
        "(" in name for name in scalars
    )


def test_the_line_of_a_step_fits_100_columns(tmp_path):
    """For a long run on many GPUs, with date and time before the line."""
    processor = _processor(tmp_path)
    processor.progress.steps, processor.gpu_peak_flops = 61_100, 3.0e6
    numbers = {"lr": 3.8241e-4, "tokens_per_second": 1_234_567.8, "seconds_left": 50_593.0}
    line = processor._describe(61_099, 2.61334, 0.4733, numbers)
    assert line == "step 61099/61100  loss 2.6133  grad_norm 0.473  1,235k tok/s  mfu 41%  14:03:13 left"
    assert len("11-26 23:59:59 " + line) <= 100


def test_processor_logs_lines_and_counts_spikes_across_a_resume(tmp_path, caplog, monkeypatch):
    monkeypatch.setattr(torchtitan_logger, "propagate", True)
    caplog.set_level(logging.INFO)
    processor = _processor(tmp_path)
    for step in range(1, 21):
        processor.data_loading_times, processor.ntokens_since_last_log = [0.1], 32
        processor.positions = range(4 * (step - 1), 4 * step)
        processor.resume()
        of_ranks = processor.add_numbers(torch.tensor([processor.own_numbers(0.0, 4.0)]))
        processor.log(step, 9.0 if step == 15 else 3.0, 3.5, 0.5, {"lr": 0.1} | of_ranks)
    (said,) = [record.message for record in caplog.records if "Loss spike" in record.message]
    assert said.startswith("Loss spike 1 begins at step 15 with 9; data positions 56-59 (")
    assert said.endswith("--data.skip 56-59)")
    processor.log_metrics(20, {"norm/weight": 2.0})
    processor.log_metrics(21, {})
    processor = _processor(tmp_path)  # resumed from a checkpoint of step 16
    # it logged step 16 two seconds ago; every second step is logged
    processor.data_loading_times, processor.ntokens_since_last_log = [0.1], 64
    processor.time_last_log -= 2.0
    processor.gpu_peak_flops = 1e3  # 64 FLOPs in two seconds
    processor.log(18, 9.0, 9.5, 0.5)
    processor.log_validation(2.5, 18, {"validation_seconds": 1.5})
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert lines[0]["mfu"] is None  # the peak of a CPU is not known
    assert ["mfu 3%" in record.message for record in caplog.records if "loss 9.0000" in record.message] == [
        False,
        True,
    ]
    assert [line.get("seconds_left") for line in lines[:3]] == [None, None, pytest.approx(lines[2]["seconds_left"])]
    assert [line["loss_spikes"] for line in lines if "loss" in line] == [0] * 14 + [1] * 6 + [2]
    assert (lines[14]["spike/first_position"], lines[14]["spike/last_position"]) == (56, 59)
    assert lines[0]["memory_active_gib_of_all_ranks"] == pytest.approx(lines[0]["memory_active_gib"], rel=0.1)
    assert lines[0]["pc_seconds"] == 4.0
    assert lines[0]["grad_norm"] == 0.5 and lines[0]["lr"] == 0.1 and lines[0]["max_loss"] == 3.5
    assert [line for line in lines if "norm/weight" in line][0]["step"] == 20
    assert lines[-1]["validation_loss"] == 2.5 and len(lines) == 23
    assert lines[-2]["step_seconds"] == pytest.approx(1.0, abs=0.1)
    assert lines[-2]["tokens_per_second"] == pytest.approx(32, rel=0.1)


@pytest.fixture
def clock(monkeypatch):
    """clock(seconds) lets time pass, for everybody."""
    passed = [100.0]
    for name in ("perf_counter", "monotonic"):
        monkeypatch.setattr(time, name, lambda: passed[0])
    return lambda seconds: passed.append(passed.pop() + seconds)


def test_a_step_takes_the_time_of_training_alone(tmp_path, clock):
    """Not that of loading before the first step, of validations and of checkpoints."""
    processor = _processor(tmp_path)
    clock(8.0)  # it loads
    for step, seconds in enumerate((1.0, 0.25, 0.5, 2.0), start=1):
        processor.resume()
        clock(seconds)
        processor.data_loading_times, processor.ntokens_since_last_log = [0.1], 32
        processor.add_numbers(torch.ones(1, 4))
        processor.log(step, 3.0, 3.5, 0.5)
        processor.pause()
        if step != 2:
            clock(4.0)
            processor.log_validation(2.5, step)
        clock(16.0)  # it saves
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [line["step_seconds"] for line in lines if "loss" in line] == [1.0, 0.25, 0.5, 2.0]


def test_a_slow_rank_is_sought_from_the_second_step_on_every_twenty_seconds(tmp_path, clock, monkeypatch):
    """The first step includes compilation."""
    said: list[str] = []
    monkeypatch.setattr(metrics.logger, "warning", said.append)
    processor = _processor(tmp_path)

    def log(seconds: float, output: list[float]) -> int:
        """Seconds of three ranks in the output layer; returns the number of warnings."""
        clock(seconds)
        processor.add_numbers(torch.tensor([[1.0, 0.0, own, 0.0] for own in output]))
        processor.data_loading_times, processor.ntokens_since_last_log = [0.1], 32
        processor.log(1, 3.0, 3.5, 0.5)
        return len(said)

    assert [log(30.0, [1.0, 9.0, 1.0]), log(12.0, [1.0, 1.0, 1.0]), log(6.0, [1.0, 1.3, 1.0])] == [0, 0, 0]
    assert log(6.0, [1.0, 1.1, 1.0]) == 1
    assert said[0].startswith("Rank 1 is slow: in 24 s it spent 3.4 s on the output layer and the loss, the median")
    assert log(24.0, [1.0, 1.0, 1.0]) == 1  # what was said is not counted again
    assert log(24.0, [1.0, 1.0, 2.0]) == 2 and said[1].startswith("Rank 2 is slow: in 24 s it spent 2 s")
