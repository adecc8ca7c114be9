"""An OpenAI-compatible server over the continuous batching of `mlx_kv.generation.engine`.

HTTP, in the event loop:

    run.py               sockets, the order of start and end
    shutdown.py          what signals do
    api.py               routes
    intake.py            from a body to the answers that it asks for (limits.py: what a client may take)
    access.py            names, sites and keys that are let in
    access_log.py        a line for each request
    tls.py               certificates
    half_close.py        clients that shut down their sending side and wait for the answer
    bodies.py            the JSON of a request
    requests.py          what a client may ask for (chat_requests.py: messages and tools; fields.py: single fields;
                         sampling_fields.py: how tokens are chosen; unknown_fields.py: what nobody knows; names.py:
                         of the model)
    constraint_fields.py what form an answer is to have (grammars.py: what keeps it to that)
    cache_requests.py    how a request wants its keys and values kept, and what is allowed
    errors.py            error objects
    chat.py              a chat as tokens
    dialects/            other APIs: OpenAI's responses, Anthropic's messages
    admission.py         how many requests are let in, and whose output is whose
    asking.py            what the worker says, for those who wait for it
    responses.py         from jobs to an answer, whole or streamed; clients that hang up (answers.py: its parts)
    slot_routes.py       slots over HTTP: list, save, restore, erase (slots.py: which is whose)
    response_objects.py  what a client gets (chat_output.py: reasoning and tool calls; token_texts.py: single tokens;
                         rendering.py: JSON)
    memory_report.py     what is in memory, for the page and for Prometheus
    metrics.py           what Prometheus reads

The worker, one thread that owns MLX, the models and the engine:

    worker.py            which job gets a row, and when
    policies.py          engines side by side, one for each cache policy
    memory_plan.py       how many bytes rows will take, and whether they fit
    kept_prompts.py      what was read of prompts, by policy
    policy_rows.py       the jobs of one cache policy, from their row to their last token
    models.py            what is loaded, and with what an engine is made
    fingerprint.py       what tells its caches from those of other servers
    row_output.py        from the tokens of a step to what is handed on of a job
    prefill.py           prompts on their way to a row
    tiered_prefixes.py   what was read of prompts before, in memory and on a disk
    history.py           how many tokens came when
    rest.py              weights that leave memory where nobody asks for long
    monitor.py           snapshots and rates (occupancy.py: what caches hold)
    job.py               what is passed between the two
    task_thread.py       other threads that do one thing after the other

Needs the extra: pip install "mlx-kv[server]".
"""
