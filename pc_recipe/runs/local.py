"""Train one config on this machine, alone or as one of several (`pc_recipe.runs.nodes`): `python -m pc_recipe.runs.local
CONFIG --section.key value ...`."""

import argparse
import sys

from pc.command import exit_on_user_error
from pc.errors import UserError
from pc_recipe.config import Config, load_config
from pc_recipe.config.command_line import parse_with_overrides
from pc_recipe.config.schema import Data
from pc_recipe.files.lock import is_locked, lock
from pc_recipe.plan.check import check_data, check_layout, check_on_ranks, check_settings, has_finished
from pc_recipe.runs import launch
from pc_recipe.runs.nodes import Nodes, find_gloo_interface
from pc_recipe.runs.outcome import describe_outcome

DESCRIPTION = (
    "Train a config, or continue its run. NGPU in the environment sets the number of processes (default: one per GPU, or "
    "1)."
)

FOR_A_GPU = "this config is made for a GPU, and there is none here; --overlay train_configs/overlays/cpu.toml makes a run for a CPU"


@exit_on_user_error
def main() -> None:
    parser = argparse.ArgumentParser("./run_llama_train.sh", add_help=False, description=DESCRIPTION)
    parser.add_argument("config", metavar="CONFIG", help="TOML file of the run")
    arguments, overrides = parse_with_overrides(parser)
    config = load_config(arguments.config, overrides)
    report, nodes = check_settings(config), Nodes.from_environment()
    if requested := launch.requested_processes():  # otherwise torch counts GPUs, which takes seconds
        check_layout(report, requested * nodes.count)
    report.raise_errors()
    folder = config.folder
    if has_finished(config):
        print(
            f"{folder} has finished before. To train on, raise training.steps; to train anew, give another "
            f"--job.dump_folder.\n{describe_outcome(folder)}"
        )
        return
    make_demo_data(config)
    check_data(report)
    report.raise_errors()
    if nodes.rank == 0 and is_locked(folder):
        lock(folder).close()  # refuses a locked folder before torch is imported below; the run takes the lock later
    processes = launch.count_processes()
    # Report mistakes here, one line each, because torchrun's report of a failed process would bury them.
    if not requested:
        check_layout(report, processes * nodes.count)
        report.raise_errors()
    check_on_ranks(report)
    report.raise_errors()
    for warning in report.warnings if nodes.rank == 0 else ():
        print(f"warning: {warning}", file=sys.stderr)
    for warning in list_here(config):
        print(f"warning: {warning}", file=sys.stderr)
    locks = [lock(folder)] if nodes.rank == 0 else []
    command, environment = launch.build_command(report.config, processes, nodes)
    network_here = find_gloo_interface(nodes.master_addr) if nodes.count > 1 else {}
    try:
        status = launch.run_command(command, network_here | environment, locks)
    except SystemExit:  # after Ctrl-C or SIGTERM
        for file in locks:
            file.close()
        if nodes.rank == 0:  # rank 0 writes the state, perhaps after the others have ended
            print(describe_outcome(folder))
        raise
    if status == 0 and nodes.rank == 0:
        print(describe_outcome(folder))
    elif status and processes > 1 and (reason := launch.find_failure(folder)):
        print(reason, file=sys.stderr)  # repeated below torchrun's report
        if reason.startswith("error: "):
            sys.exit(2)
    sys.exit(status)


def list_here(config: Config) -> list[str]:
    """Warnings that hold on this machine alone; a dry run may be for another."""
    import torch

    return [] if torch.cuda.is_available() or config.training.mixed_precision_param == "float32" else [FOR_A_GPU]


def make_demo_data(config: Config) -> None:
    """Create the demo data if the config reads them and they are missing."""
    demo = str(Data().path)
    if demo not in config.data.folders:
        return
    from pc_recipe.data.demo import has_demo, make_demo  # takes a second

    if has_demo(demo, config.model.vocab_size):
        return
    try:
        make_demo(demo)
    except UserError as error:
        raise UserError(
            f"the demo data could not be created ({error}); to use other data: --data.path FOLDER"
        ) from None


if __name__ == "__main__":
    main()
