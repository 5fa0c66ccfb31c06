"""Plot the maps of PC, and fit your own.

Usage: python scripts/polynomials.py [--output DIR] [--cutoff B --degree K [--alpha A]]
"""

import argparse
from pathlib import Path

from pc.command import exit_on_user_error
from pc_recipe.config.command_line import at_least_one


@exit_on_user_error
def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--output", type=Path, default=Path("outputs/polynomials"), help="folder for the figures")
    parser.add_argument("--cutoff", type=float, help="fit your own map to min(sigma / CUTOFF, 1)")
    parser.add_argument("--degree", type=at_least_one, default=4, help="degree of p in g(s) = s p(s^2) (default: 4)")
    parser.add_argument("--alpha", type=float, default=4.0, help="the fit's weight is sigma^ALPHA (default: 4)")
    arguments = parser.parse_args()
    from pc import PCConfig
    from pc_recipe.report import maps

    if arguments.cutoff is None and (arguments.degree, arguments.alpha) != (4, 4.0):
        parser.error("--degree and --alpha need --cutoff")
    own: maps.Maps = {}
    if arguments.cutoff is not None:
        fitted = maps.fit(arguments.cutoff, arguments.degree, arguments.alpha)
        accepted = PCConfig(level=fitted).only_level.map  # or why PC refuses it
        assert isinstance(accepted, tuple)
        print(f"level = [{', '.join(f'{one:.6f}' for one in accepted)}]")  # a line for [pc]
        own = {"your own": (fitted, arguments.cutoff)}
    print(maps.table(own), end="")
    print(maps.plot(arguments.output, own))


if __name__ == "__main__":
    main()
