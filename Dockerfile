# dpvision on CPUs, with the versions that the tests run with.
#   docker build -t dpvision .
#   docker run --rm --user "$(id -u):$(id -g)" -v "$PWD:/work" dpvision plan vip.micro --dataset-size 20000 --target-epsilon 4
# Stores and runs are read and written in the folder you mount at /work.
FROM python:3.11-slim

# cpu: torch without CUDA, 2 GB less. Empty: the package index's own wheels, which run on CPUs too.
ARG TORCH_BACKEND=cpu
RUN pip install --no-cache-dir uv
COPY requirements.lock pyproject.toml README.md LICENSE /src/
COPY src /src/src
RUN uv pip install --system --no-cache ${TORCH_BACKEND:+--torch-backend "$TORCH_BACKEND"} --constraint /src/requirements.lock /src

ENV HOME=/tmp MPLCONFIGDIR=/tmp/matplotlib
WORKDIR /work
ENTRYPOINT ["dpvision"]
CMD ["--help"]
