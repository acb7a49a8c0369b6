# torchround on a machine with NVIDIA GPUs; Dockerfile.cpu is the one for a machine without. Build and run:
#     docker build -t torchround .
#     docker run --rm --gpus all -v "$PWD/outputs:/torchround/outputs" torchround train --config debug.toml
# The host needs NVIDIA's driver and its container toolkit. PyTorch brings the rest of CUDA with it.
FROM nvidia/cuda:13.2.1-base-ubuntu24.04

# g++ and Python's headers are for the optimizer's update and for Triton, which compile when a run starts.
# The versions are the release's own: an older one cannot be installed once its security update is out.
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install -y --no-install-recommends g++ python3 python3-dev python3-venv \
    && rm -rf /var/lib/apt/lists/* \
    && python3 -m venv /opt/venv

# A container may run as any user (--user), who has no home and no name in it.
ENV PATH=/opt/venv/bin:$PATH HOME=/tmp USER=torchround
WORKDIR /torchround

# PyTorch first: its layer of several GB stays as long as the constraints do.
COPY constraints.txt .
RUN pip install --no-cache-dir -c constraints.txt torch
COPY . .
RUN pip install --no-cache-dir -c constraints.txt -e '.[datasets,parquet,zstd]'

ENTRYPOINT ["torchround"]
CMD ["doctor"]
