# agentrl on CPUs, with the exact versions of requirements/cpu.lock: engine, proxy, rollout worker and trainer.
#   docker build -t agentrl .
# docs/containers.md has the commands. BASE may name a mirror's copy or a digest of the same image.
ARG BASE=python:3.11.14-slim-bookworm

FROM ${BASE} AS build
ARG TORCH_INDEX=https://download.pytorch.org/whl/cpu
ENV PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_NO_CACHE_DIR=1
SHELL ["/bin/bash", "-o", "pipefail", "-c"]
WORKDIR /src
RUN python3 -m venv /opt/agentrl
COPY requirements/cpu.lock requirements/
# torch comes alone from its own index; every other file is checked against its hash.
RUN torch=$(grep -oE '^torch==[^ ]+' requirements/cpu.lock) \
    && /opt/agentrl/bin/pip install --no-deps --index-url "${TORCH_INDEX}" "${torch}" \
    && grep -v '^torch==' requirements/cpu.lock > /tmp/pins.txt \
    && /opt/agentrl/bin/pip install --no-deps --require-hashes --requirement /tmp/pins.txt
COPY . .
RUN /opt/agentrl/bin/pip install --no-deps --no-build-isolation --no-index .

FROM ${BASE}
RUN groupadd --gid 10001 agentrl \
    && useradd --uid 10001 --gid agentrl --home-dir /data --create-home --shell /usr/sbin/nologin agentrl
COPY --from=build /opt/agentrl /opt/agentrl
ENV PATH=/opt/agentrl/bin:${PATH} PYTHONUNBUFFERED=1
WORKDIR /data
USER 10001:10001
EXPOSE 8080
# For the proxy; start other commands with --no-healthcheck.
HEALTHCHECK --interval=10s --timeout=5s --start-period=60s --retries=3 \
    CMD ["python3", "-c", "import urllib.request; urllib.request.urlopen('http://127.0.0.1:8080/health', timeout=4)"]
ENTRYPOINT ["agentrl"]
CMD ["--help"]
