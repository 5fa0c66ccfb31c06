# The project with what compilation needs beyond Python packages: a C++ compiler and Python's headers, which this base has.
# Not built by us, because the machines of development have no Docker.
#   docker build -t pc-layer .
#   docker run --gpus all --shm-size=16g -v $PWD/data:/pc-layer/data -v $PWD/outputs:/pc-layer/outputs \
#       pc-layer ./run_llama_train.sh train_configs/271m_adamw_pc.toml
FROM python:3.11-bookworm
WORKDIR /pc-layer
COPY . .
RUN bash -c "source scripts/set_up.sh"
