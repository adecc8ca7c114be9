"""An OpenAI-compatible server over the continuous batching of `mlx_kv.generation.engine`.

    requests.py  what a client may ask for, and the error objects
    chat.py      a chat as tokens
    replies.py   what it gets back
    api.py       HTTP: routes, limits, keys
    answers.py   from a job to an answer, whole or streamed; clients that hang up
    worker.py    the one thread that owns MLX, the models and the engine
    reading.py   prompts on their way to a row
    prompts.py   what was read of prompts before, in memory and on a disk
    job.py       what is passed between the two
    memory.py    what is in memory, as the page and the metrics show it
    text.py      stop strings
    metrics.py   what Prometheus reads
    run.py       sockets, signals, the order of start and end

Needs the extra: pip install "mlx-kv[server]".
"""
