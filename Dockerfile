# Two images of objkv:
#
#   docker build -t objkv .                             the command line and the exporter, no vLLM
#   docker build -t vllm-objkv --target replica .       vLLM's own image, with objkv in it
#
# examples/compose and examples/kubernetes use both.

# What replicas are made of; with another tag it is for another device, such as a CPU.
ARG VLLM_IMAGE=vllm/vllm-openai:v0.33.0
ARG PYTHON_IMAGE=python:3.13-slim-bookworm

FROM ${PYTHON_IMAGE} AS wheel
WORKDIR /src
COPY pyproject.toml README.md LICENSE ./
COPY objkv objkv
RUN python3 -m pip wheel --no-cache-dir --no-deps --wheel-dir /wheels .

FROM ${VLLM_IMAGE} AS replica
# The image has vLLM, so the extra of that name is not asked for: pip must not exchange it.
RUN --mount=type=bind,from=wheel,source=/wheels,target=/wheels \
    python3 -m pip install --no-cache-dir "$(echo /wheels/objkv-*.whl)[encryption,otel]"

FROM ${PYTHON_IMAGE} AS cli
# A virtual environment, so that nothing of the image's own Python is touched.
RUN --mount=type=bind,from=wheel,source=/wheels,target=/wheels \
    python3 -m venv /opt/objkv && \
    /opt/objkv/bin/python -m pip install --no-cache-dir \
      "$(echo /wheels/objkv-*.whl)[encryption,otel]" && \
    install --directory --owner 65532 --group 65532 /home/objkv
ENV PATH=/opt/objkv/bin:$PATH \
    HOME=/home/objkv \
    PYTHONUNBUFFERED=1
WORKDIR /home/objkv
# By number, so that Kubernetes sees that it is not root (runAsNonRoot).
USER 65532:65532
ENTRYPOINT ["objkv"]
CMD ["--help"]
