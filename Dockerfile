# The commands `outbox` and `consumer`, and the wallet example:
#   docker build -t outbox-consumer .
#   docker run --rm -e DATABASE_URL=… -e REDIS_URL=… outbox-consumer outbox relay
FROM python:3.13-slim AS build
# A package index of your own: --build-arg PIP_INDEX_URL=…
ARG PIP_INDEX_URL
WORKDIR /src
RUN python -m venv --without-pip /venv
# The dependencies by themselves: a layer that changes only with pyproject.toml.
COPY pyproject.toml ./
RUN python -c 'import tomllib; print(*tomllib.load(open("pyproject.toml", "rb"))["project"]["dependencies"], sep="\n")' > dependencies.txt \
 && python -m pip --python /venv/bin/python install --no-cache-dir -r dependencies.txt
COPY README.md LICENSE ./
COPY migrations migrations
COPY outbox outbox
COPY consumer consumer
COPY pytest_outbox.py ./
RUN python -m pip --python /venv/bin/python install --no-cache-dir --no-deps .

FROM python:3.13-slim
RUN useradd --uid 10001 --home-dir /app --no-create-home --shell /usr/sbin/nologin app
COPY --from=build /venv /venv
COPY examples /app/examples
ENV PATH=/venv/bin:$PATH PYTHONPATH=/app PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1
WORKDIR /app
USER app
CMD ["outbox", "relay"]
