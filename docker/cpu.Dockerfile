# The CPU image. From the checkout: docker build -f docker/cpu.Dockerfile -t hotrec:cpu .
ARG BASE_IMAGE=python:3.12-slim

FROM ${BASE_IMAGE} AS build
# A package index with torch's CPU builds keeps the image small: requirements/README.md.
ARG TORCH_INDEX=
# The package index; empty: pip's default index.
ARG PIP_INDEX_URL=
WORKDIR /build
# The pins rarely change, the code often does: two layers.
COPY requirements requirements
RUN PIP_NO_CACHE_DIR=1 TORCH_INDEX="${TORCH_INDEX}" requirements/make_venv.sh /opt/venv cpu pins
COPY pyproject.toml README.md LICENSE ./
COPY conf conf
COPY hotrec hotrec
RUN /opt/venv/bin/python -m pip install --no-cache-dir --no-deps .

FROM ${BASE_IMAGE}
ARG VERSION=0.1.0
LABEL org.opencontainers.image.title="hotrec" \
      org.opencontainers.image.description="Trains recommendation models on TorchRec; CPU" \
      org.opencontainers.image.version="${VERSION}" \
      org.opencontainers.image.licenses="BSD-3-Clause"
RUN useradd --uid 10000 --create-home --shell /bin/bash hotrec \
    && install -d -o hotrec -g hotrec /srv/hotrec /srv/hotrec/data /srv/hotrec/runs
COPY --from=build /opt/venv /opt/venv
COPY launch /srv/hotrec/launch
COPY samples /srv/hotrec/samples
ENV PATH=/opt/venv/bin:${PATH} PYTHONUNBUFFERED=1
USER hotrec
WORKDIR /srv/hotrec
HEALTHCHECK --interval=5m --timeout=2m --start-period=1m \
    CMD ["python", "-c", "import torchrec, hotrec"]
ENTRYPOINT ["hotrec"]
CMD ["--help"]
