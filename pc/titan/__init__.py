"""The TorchTitan plug-in: Llama 2 with PC as a train spec, and a trainer that extends TorchTitan's."""

from pc.common.errors import require_extra

require_extra("train", "torchtitan")
