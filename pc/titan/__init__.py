"""The TorchTitan plug-in: Llama 2 with PC as a train spec, and a trainer around TorchTitan's.

TorchTitan is a dependency, extended from outside. This package is not called `torchtitan`, since a folder
of that name at the top level would shadow it.
"""

from pc.errors import require_extra

require_extra("train", "torchtitan")
