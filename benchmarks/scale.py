"""PC's cost on 8 to 1,024 GPUs: FLOPs, bytes, collectives and memory counted, seconds predicted from them.

    python benchmarks/scale.py [--output results/DATE-NAME]

`pc/plan/scale.py` describes the method and the rates. At 64 and 512 GPUs, rows with several replicas are counted a
second time with the replicas sharing the matrices. Takes some minutes; needs no GPU and no weights.
"""

import argparse
from pathlib import Path

from pc.common import markdown
from pc.common.files import write_atomically
from pc.plan import scale

CONFIGS = Path(__file__).parents[1] / "train_configs"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--output", type=Path, help="folder for scale.md (default: print only)")
    output = parser.parse_args().output
    lines = [markdown.table(scale.HEADINGS.split(" | "), []).rstrip()]
    print(lines[0])
    for model, gpus, mesh, overrides in scale.PLANS:
        for share in (False, True) if scale.REPLICAS in overrides and gpus in (64, 512) else (False,):
            counted = scale.simulate(CONFIGS / f"{model}_adamw_pc.toml", overrides, gpus, share)
            lines.append(scale.row(model, gpus, mesh + (", replicas share" if share else ""), counted))
            print(lines[-1], flush=True)
    if output is not None:
        write_atomically(output / "scale.md", "\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
