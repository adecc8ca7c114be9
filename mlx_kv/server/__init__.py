"""An OpenAI-compatible server over the continuous batching of `mlx_kv.generation.engine`.

HTTP, in the event loop:

    run.py               the process: socket, uvicorn, signals, start and end
    api.py               routes, host names, origins, API keys, certificates, and errors; models, health, pages
    handler.py           admission; from a request's body to its jobs, and from their output to a response
    json_http.py         strict JSON of bodies, responses, events and errors
    requests.py          bodies: their base and field types, shared fields, limits; the request that they become
    remote_images.py     images by their URLs, from public addresses
    chat.py              content of chats: texts, reasoning, calls, results
    templates.py         what a conversation becomes for a model's chat template
    dialects/            APIs: OpenAI's completions, chat completions and responses, Anthropic's messages, Ollama's
    output.py            jobs; grammars; output as it comes: content, reasoning, tool calls, tokens

The worker, one thread that owns MLX, the models and the engines:

    worker.py            gives rows to jobs, makes steps, reads and frees weights
    served.py            models: their names in requests, and their weights
    rows.py              models and settings; the engine, its jobs and their cached prefixes
    memory.py            memory of rows: planned, limited, held; MLX's limit for freed buffers
    monitor.py           metrics, rates, snapshots of memory, why a prompt was not reused

Needs the extra: pip install "mlx-kv[server]".
"""
