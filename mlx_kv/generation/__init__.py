"""Generation: the batch engine, sampling, prompts, speculation and grammars."""
