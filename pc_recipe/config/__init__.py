"""The configuration of a run: every key, the chain of TOML files, rules between keys. Imports neither torch nor
TorchTitan; `pc_recipe.train.upstream_config` turns it into TorchTitan's own configuration."""

from pc_recipe.config.inheritance import load_config, read_config, read_earlier, write_config
from pc_recipe.config.schema import Config

__all__ = ["Config", "load_config", "read_config", "read_earlier", "write_config"]
