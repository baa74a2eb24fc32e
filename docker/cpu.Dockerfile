# hybridrec on a CPU: development, tests, and trying it out.
FROM python:3.11-slim-bookworm AS build
RUN apt-get update \
    && apt-get install --yes --no-install-recommends build-essential \
    && rm -rf /var/lib/apt/lists/*
WORKDIR /src
COPY pyproject.toml README.md LICENSE ./
COPY hybridrec hybridrec
COPY device_backends device_backends
RUN python -m pip wheel --no-cache-dir --no-deps --wheel-dir /wheels . ./device_backends/fbgemm_cpu

FROM python:3.11-slim-bookworm
# An index of PyTorch's CPU wheels: on x86-64 the torch of PyPI brings CUDA along.
ARG PIP_EXTRA_INDEX_URL=
COPY --from=build /wheels /wheels
RUN python -m pip install --no-cache-dir /wheels/fbgemm_gpu-*.whl "$(ls /wheels/hybridrec-*.whl)[cpu]" && rm -rf /wheels
RUN useradd --create-home trainer
USER trainer
# All ranks are in this container; its own name may not resolve.
ENV GLOO_SOCKET_IFNAME=lo
CMD ["python", "-m", "hybridrec.doctor", "--device", "cpu"]
