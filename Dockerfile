# The project with what compilation needs beyond Python packages: a C++ compiler and Python's headers, which this base has.
# Not built by us, because the machines of development have no Docker.
#   docker build -t pc-layer .
#   docker run --gpus all --shm-size=16g -v $PWD/data:/pc-layer/data -v $PWD/outputs:/pc-layer/outputs \
#       pc-layer ./run_llama_train.sh train_configs/271m_adamw_pc.toml
# What trains is no root: the folders that are mounted should belong to its number, 1000, or give `--build-arg UID=...`.
# The base is named by its tag and no digest, because mends of Debian come under the tag; build anew to have them.
FROM python:3.11-bookworm
ARG UID=1000
RUN useradd --create-home --uid $UID pc && install --directory --owner=pc /pc-layer
WORKDIR /pc-layer
USER pc
COPY --chown=pc . .
RUN bash -c "./run_llama_train.sh --setup"
