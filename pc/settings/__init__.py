"""The configuration of a run: every key, the chain of TOML files, rules between keys. Imports neither torch nor
TorchTitan; `pc.titan.job_config` makes TorchTitan's own configuration of it."""

from pc.common.errors import require_extra

require_extra("train", "pydantic", "tomli_w")

from pc.settings.chain import load_config, write_config  # noqa: E402
from pc.settings.schema import Config  # noqa: E402

__all__ = ["Config", "load_config", "write_config"]
