# Two images of objkv:
#
#   docker build -t objkv .                             the command line and the exporter, no vLLM
#   docker build -t vllm-objkv --target replica .       vLLM's own image, with objkv in it
#
# examples/compose and examples/kubernetes use both. The first is reproducible: its packages are pinned by
# hash (scripts/write_image_requirements.sh takes newer ones) and no file contains a time. Pin its base too,
# and let BuildKit set the time of all files:
#
#   docker buildx build --build-arg PYTHON_IMAGE=python:3.13-slim-bookworm@sha256:... \
#     --build-arg SOURCE_DATE_EPOCH=1700000000 --output type=registry,rewrite-timestamp=true --tag NAME .

# What replicas are made of; with another tag it is for another device, such as a CPU.
ARG VLLM_IMAGE=vllm/vllm-openai:v0.33.0
ARG PYTHON_IMAGE=python:3.13-slim-bookworm

FROM ${PYTHON_IMAGE} AS wheel
WORKDIR /src
COPY pyproject.toml README.md LICENSE ./
COPY scripts/image-requirements.txt scripts/image-requirements.txt
COPY objkv objkv
RUN python3 -m pip wheel --no-cache-dir --no-deps --wheel-dir /wheels . && \
    cp scripts/image-requirements.txt /wheels/

FROM ${VLLM_IMAGE} AS replica
LABEL org.opencontainers.image.source=https://example.com/objkv
# The image has vLLM, so the extra of that name is not asked for: pip must not exchange it.
RUN --mount=type=bind,from=wheel,source=/wheels,target=/wheels \
    python3 -m pip install --no-cache-dir "$(echo /wheels/objkv-*.whl)[encryption,otel]"

FROM ${PYTHON_IMAGE} AS cli
LABEL org.opencontainers.image.source=https://example.com/objkv \
      org.opencontainers.image.licenses=Apache-2.0
# A virtual environment, so that nothing of the image's own Python is touched. Compiled files contain a
# hash of their source instead of its time.
RUN --mount=type=bind,from=wheel,source=/wheels,target=/wheels \
    python3 -m venv --without-pip /opt/objkv && \
    python3 -m pip --python /opt/objkv/bin/python install --no-cache-dir --no-compile \
      --require-hashes --requirement /wheels/image-requirements.txt && \
    python3 -m pip --python /opt/objkv/bin/python install --no-cache-dir --no-compile \
      --no-deps --no-index /wheels/objkv-*.whl && \
    python3 -m pip --python /opt/objkv/bin/python check && \
    /opt/objkv/bin/python -m compileall -q --invalidation-mode unchecked-hash /opt/objkv/lib && \
    install --directory --owner 65532 --group 65532 /home/objkv
ENV PATH=/opt/objkv/bin:$PATH \
    HOME=/home/objkv \
    PYTHONUNBUFFERED=1
WORKDIR /home/objkv
# By number, so that Kubernetes sees that it is not root (runAsNonRoot).
USER 65532:65532
ENTRYPOINT ["objkv"]
CMD ["--help"]
