"""From the tokens of a step to what is handed on of each job.

Decides which text a token brings, and whether a stop string ends the answer. Knows nothing about engines, nor who waits
for an answer.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from mlx_kv.generation.sequence import BatchToken
from mlx_kv.server.job import Job, OutputChunk

Ended = list[tuple[Job, BatchToken]]


def output_of(tokens: Iterable[BatchToken], active: Mapping[int, Job]) -> tuple[list[OutputChunk], Ended]:
    """What is new of each job that has tokens in a step, and the jobs that end with it, by their last token.

    A token that ends a job by its text alone has no finish_reason: its engine would go on.

    Args:
        active: the jobs that the engine has, by number. Those that are not among them have ended before.
    """
    chunks: dict[int, OutputChunk] = {}
    ended: dict[int, tuple[Job, BatchToken]] = {}
    for token in tokens:
        job = active.get(token.index)
        if job is None or token.index in ended:
            continue  # it met a stop string earlier in this step
        job.answer.append(token.token)
        text, finish = job.stop_strings.feed(token.text), token.finish_reason
        if job.stop_strings.stopped:
            finish = "stop"
        elif finish is not None:
            text += job.stop_strings.finish()
        ends = token.finish_reason == "stop"  # with a token that has no text
        scores = () if token.score is None or ends else ((token.token, token.score),)
        chunk = OutputChunk(job, text, 1, finish, scores=scores)
        chunks[job.number] = chunks[job.number].joined(chunk) if job.number in chunks else chunk
        grammar = None if job.stop_strings.stopped or finish != "stop" else job.grammar
        if grammar is not None and (why := grammar.error_in(job.answer)):
            error = f"the grammar could not be followed any longer: {why}"
            chunks[job.number] = OutputChunk(job, finish_reason="error", error=error, status=400)
        if finish is not None:
            ended[job.number] = job, token
    return list(chunks.values()), list(ended.values())
