# A server of GGUF files on a CPU (for Hugging Face models add torch to the extras below):
#   docker build -t draftree .
#   docker run -p 8000:8000 -v draftree-models:/models draftree serve MODEL --host 0.0.0.0 --api-key-file /models/keys
FROM python:3.11-slim

# What llama.cpp computes with.
RUN apt-get update \
    && apt-get install --yes --no-install-recommends libgomp1 \
    && rm -rf /var/lib/apt/lists/*

WORKDIR /opt/draftree
COPY pyproject.toml constraints.txt README.md LICENSE ./
COPY native ./native
COPY src ./src
COPY packages ./packages
# All pinned, the default model and the draft heads with it.
RUN pip install --no-cache-dir -c constraints.txt '.[serve,llama,hub]' ./packages/smollm2 ./packages/coder-head

# Models that are downloaded and cost profiles outlive the container.
RUN useradd --create-home --uid 1000 draftree && install --directory --owner draftree /models
ENV HF_HOME=/models/huggingface XDG_CACHE_HOME=/models/cache
VOLUME /models
USER draftree
WORKDIR /models

EXPOSE 8000
# Healthy once the model is loaded.
HEALTHCHECK --interval=10s --timeout=5s --start-period=5m \
    CMD ["python", "-c", "from urllib.request import urlopen; urlopen('http://127.0.0.1:8000/ready')"]
STOPSIGNAL SIGTERM
ENTRYPOINT ["draftree"]
CMD ["serve", "--host", "0.0.0.0"]
