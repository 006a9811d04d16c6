# docker build -t rewriter .
# docker run --rm --user "$(id -u):$(id -g)" -v "$PWD:/work" rewriter batch models -o fixed
#
# The digest is that of the index of python:3.13-slim (3.13.15). To renew it:
# docker buildx imagetools inspect python:3.13-slim --format '{{.Manifest.Digest}}'
FROM python:3.13-slim@sha256:8d9d0b8bcf6506481eae4907c18f5e3e7902e629f5f6d684f9e7c32e85e3ddf0

# the libraries, 1 GB, in a layer that changes of our source leave as it is
ARG EXTRAS=rtx,images,ray
COPY pyproject.toml LICENSE /source/
RUN mkdir /source/rewriter && touch /source/README.md /source/rewriter/__init__.py \
    && python -m pip install --no-cache-dir "/source[${EXTRAS}]"
COPY rewriter /source/rewriter
RUN python -m pip install --no-cache-dir --no-deps --force-reinstall /source && rm -rf /source

# any user may run it, and by default none that owns anything: caches go where every user may write
RUN useradd --system --uid 10001 --no-create-home rewriter && install -d -m 1777 /var/cache/rewriter
ENV XDG_CACHE_HOME=/var/cache/rewriter HOME=/tmp
USER 10001:10001
WORKDIR /work
ENTRYPOINT ["rewriter"]
