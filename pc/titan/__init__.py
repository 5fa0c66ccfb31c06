"""The TorchTitan plug-in: Llama 2 with PC as a train spec, and a trainer around TorchTitan's.

TorchTitan is a dependency, extended from outside. This package is not called `torchtitan`, since a folder
of that name at the top level would shadow it.
"""

from pc.titan import device

device.use_cpu_where_there_is_no_gpu()
