"""Check the paper's convergence theorem numerically on a small deep linear network.

Usage: python scripts/theorem.py [--steps N] [--seed S]
"""

import argparse

from pc.command import exit_on_user_error
from pc_recipe.config.command_line import at_least_one


@exit_on_user_error
def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--steps", type=at_least_one, default=1500, help="gradient descent steps (default: 1500)")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    from pc_recipe.report import theorem

    problem = theorem.make_problem(seed=arguments.seed)
    losses, inside = theorem.descend(problem, problem.beta, arguments.steps)
    print(theorem.report(problem, losses, inside))


if __name__ == "__main__":
    main()
