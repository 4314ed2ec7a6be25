# The CUDA image. From the checkout: docker build -f docker/cuda.Dockerfile -t hotrec:cuda .
# The CUDA libraries come with the pins, so the base needs little more than the driver's labels.
ARG BASE_IMAGE=nvidia/cuda:13.0.1-base-ubuntu24.04

FROM ${BASE_IMAGE} AS python
RUN apt-get update \
    && apt-get install -y --no-install-recommends ca-certificates python3 python3-venv \
    && rm -rf /var/lib/apt/lists/*

FROM python AS build
WORKDIR /build
# The pins rarely change, the code often does: two layers.
COPY requirements requirements
RUN PIP_NO_CACHE_DIR=1 requirements/make_venv.sh /opt/venv cuda pins
COPY pyproject.toml README.md LICENSE ./
COPY conf conf
COPY hotrec hotrec
RUN /opt/venv/bin/python -m pip install --no-cache-dir --no-deps .

FROM python
ARG VERSION=0.1.0
LABEL org.opencontainers.image.title="hotrec" \
      org.opencontainers.image.description="Trains recommendation models on TorchRec; CUDA 13" \
      org.opencontainers.image.version="${VERSION}" \
      org.opencontainers.image.licenses="BSD-3-Clause"
# Ubuntu's image has a user 1000 of its own.
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
