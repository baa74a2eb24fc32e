# hybridrec on Ascend NPUs. CANN 9.1 and Python 3.11 come from the base image, which fits the chip; the host brings the
# driver (docker/README.md has the line to start it with).
ARG CANN_IMAGE
FROM ${CANN_IMAGE} AS build
WORKDIR /src
COPY pyproject.toml README.md LICENSE ./
COPY hybridrec hybridrec
COPY device_backends device_backends
RUN python3.11 -m pip wheel --no-cache-dir --no-deps --wheel-dir /wheels . ./device_backends/fbgemm_cpu

FROM ${CANN_IMAGE}
# An index of PyTorch's CPU wheels: torch-npu for x86-64 asks for torch==2.10.0+cpu.
ARG PIP_EXTRA_INDEX_URL=
COPY --from=build /wheels /wheels
RUN python3.11 -m pip install --no-cache-dir /wheels/fbgemm_gpu-*.whl "$(ls /wheels/hybridrec-*.whl)[npu]" && rm -rf /wheels
# All ranks are in this container; its own name may not resolve.
ENV GLOO_SOCKET_IFNAME=lo
# CANN's environment is a script, so every command runs in a shell that has read it.
ENV ASCEND_HOME=/usr/local/Ascend/ascend-toolkit
ENTRYPOINT ["bash", "-c", "source \"$ASCEND_HOME/set_env.sh\" && exec \"$@\"", "--"]
CMD ["python3.11", "-m", "hybridrec.doctor", "--device", "npu"]
