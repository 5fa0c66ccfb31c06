from torchtitan.tools.logging import logger

from pc.launch.worker import start_logging


def test_only_rank_0_logs_more_than_warnings(capsys, monkeypatch):
    monkeypatch.setattr(logger, "handlers", [])
    monkeypatch.setattr(logger, "level", logger.level)
    for rank in (0, 1, 63):
        start_logging(rank)
        logger.info(f"a step of {rank}")
        logger.warning(f"a warning of {rank}")
    printed = capsys.readouterr().out.splitlines()
    assert [line.rpartition(" - ")[2] for line in printed] == [
        "a step of 0", "a warning of 0", "a warning of 1", "a warning of 63"
    ]  # fmt: skip
