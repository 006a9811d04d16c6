# docker build -t rewriter .
# docker run --rm --user "$(id -u):$(id -g)" -v "$PWD:/work" rewriter batch models -o fixed
FROM python:3.13-slim

ARG EXTRAS=rtx
COPY pyproject.toml README.md LICENSE /source/
COPY rewriter /source/rewriter
RUN python -m pip install --no-cache-dir "/source[${EXTRAS}]" && rm -rf /source

# any user may run it: caches go where everyone may write
ENV XDG_CACHE_HOME=/tmp/cache HOME=/tmp
WORKDIR /work
ENTRYPOINT ["rewriter"]
