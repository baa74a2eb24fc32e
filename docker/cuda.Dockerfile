# hybridrec on NVIDIA GPUs. torch's wheels bring CUDA; the host brings the driver (docker run --gpus all).
FROM python:3.11-slim-bookworm AS build
RUN apt-get update \
    && apt-get install --yes --no-install-recommends build-essential \
    && rm -rf /var/lib/apt/lists/*
WORKDIR /src
COPY pyproject.toml README.md LICENSE ./
COPY hybridrec hybridrec
COPY device_backends device_backends
RUN python -m pip wheel --no-cache-dir --no-deps --wheel-dir /wheels .

FROM python:3.11-slim-bookworm
COPY --from=build /wheels /wheels
RUN python -m pip install --no-cache-dir "$(ls /wheels/hybridrec-*.whl)[cuda]" && rm -rf /wheels
RUN useradd --create-home trainer
USER trainer
# What the NVIDIA container toolkit hands over: without "compute" there is no CUDA, without "utility" no nvidia-smi.
ENV NVIDIA_VISIBLE_DEVICES=all NVIDIA_DRIVER_CAPABILITIES=compute,utility
# All ranks are in this container; its own name may not resolve.
ENV GLOO_SOCKET_IFNAME=lo
CMD ["python", "-m", "hybridrec.doctor", "--device", "cuda"]
