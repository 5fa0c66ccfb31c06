"""What `scripts/cost.py` prints."""

from collections.abc import Sequence
from pathlib import Path

from pc.analysis import cost_measure
from pc.common.files import write_atomically
from pc.launch import torchrun
from pc.plan import cost, gpu_time


def report(config: Path, overrides: Sequence[str], world_size: int, measure: bool, output: Path | None) -> None:
    """Print the counts, measure where asked to, and write both to `output`/cost.md."""
    plan = cost.Plan(config, overrides, world_size)
    text = cost.table(plan) + "\n" + gpu_time.table(plan)
    print(text)
    if measure:
        processes = torchrun.processes_here()
        here = cost.Plan(config, overrides, processes).step_cost()
        predicted = {"step": here.pc_step / here.model, "forward": here.pc_forward / here.model}
        measured = cost_measure.table(cost_measure.measure(config, overrides, processes), predicted)
        measured = f"Measured here, on {processes} processes:\n\n{measured}"
        print(measured)
        text += "\n" + measured
    if output is not None:
        write_atomically(output / "cost.md", text)
        print(output / "cost.md")
