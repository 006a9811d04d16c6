# docker build -t rewriter .
# docker run --rm --user "$(id -u):$(id -g)" -v "$PWD:/work" rewriter batch models -o fixed
FROM python:3.13-slim

# the libraries, 1 GB, in a layer that changes of our source leave as it is
ARG EXTRAS=rtx,images,ray
COPY pyproject.toml LICENSE /source/
RUN mkdir /source/rewriter && touch /source/README.md /source/rewriter/__init__.py \
    && python -m pip install --no-cache-dir "/source[${EXTRAS}]"
COPY rewriter /source/rewriter
RUN python -m pip install --no-cache-dir --no-deps --force-reinstall /source && rm -rf /source

# any user may run it: caches go where everyone may write
ENV XDG_CACHE_HOME=/tmp/cache HOME=/tmp
WORKDIR /work
ENTRYPOINT ["rewriter"]
