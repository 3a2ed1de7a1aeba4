# An image for GPU nodes, alone or as the image of launch/rayjob.yaml. The host needs NVIDIA's driver and
# container toolkit; the libraries of CUDA come with torch.
#   docker build --build-arg COMMIT="$(git rev-parse HEAD)" -t raylearner .
#   docker run --rm --gpus all --shm-size 16g -v "$PWD/runs:/app/runs" raylearner train configs/quickstart.yaml
# The image runs as user 1000, who must be able to write to runs/.
FROM python:3.12-slim-bookworm

# A compiler, since Triton compiles kernels in the node; wget for KubeRay's probes. Debian keeps only the
# newest version of a package, so that pinned ones would soon be missing.
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install --yes --no-install-recommends build-essential git wget \
    && rm -rf /var/lib/apt/lists/*

RUN useradd --create-home --uid 1000 ray && install --directory --owner ray /app
WORKDIR /app

# The dependencies alone, which change rarely: a change of the code does not install them again.
COPY requirements.txt .
RUN pip install --no-cache-dir -r requirements.txt

COPY --chown=ray . .
RUN pip install --no-cache-dir --no-deps --no-build-isolation .

ARG COMMIT=""
ENV RAYLEARNER_COMMIT=${COMMIT}
USER 1000
ENTRYPOINT ["raylearner"]
CMD ["--help"]
