"""What a configuration trains, in one line. It is made from the configuration, so that no run is mislabelled."""

from pc.blocks import BLOCK_GROUPS, BLOCK_SUFFIXES
from pc_recipe.config.model_sizes import Model, count_parameters, shape_of
from pc_recipe.config.pc_section import PC
from pc_recipe.config.schema import Config


def headline(config: Config) -> str:
    """For example "35M Llama, AdamW, PC level 4 on o, gate, up, down (24 of 43 matrices)", or "..., no PC"."""
    return describe(config.model, config.optimizer.name, config.pc)


def describe(model: Model, optimizer: str, pc: PC) -> str:
    """`headline` of a configuration's parts."""
    return f"{_short(count_parameters(model))} Llama, {optimizer}, {_describe_pc(pc, shape_of(model).n_layers)}"


def _describe_pc(pc: PC, layers: int) -> str:
    if not pc.enable:
        return "no PC"
    blocks = [block for entry in pc.blocks for block in BLOCK_GROUPS.get(entry, (entry,))]
    name, *others = {level.name for level in pc.pc_config.levels.values()}
    if others:
        level = "of several levels"
    elif isinstance(name, tuple):
        level = "of given coefficients"
    else:
        level = f"level {name}"
    said = f"PC {level} on {', '.join(blocks)}"
    if not BLOCK_SUFFIXES.keys() >= set(blocks):  # a pattern may find any number of matrices
        return said
    chosen, all_of_them = layers * len(blocks), layers * len(BLOCK_SUFFIXES) + 1  # and the head
    return f"{said} ({chosen} of {all_of_them} matrices)"


def _short(parameters: int) -> str:
    """35M, 1.1B, 493k: two digits, or all before the decimal point."""
    for size, suffix in ((1e9, "B"), (1e6, "M"), (1e3, "k")):
        if parameters >= size:
            number = parameters / size
            return f"{number:.1f}{suffix}" if number < 9.95 else f"{number:.0f}{suffix}"
    return str(parameters)
