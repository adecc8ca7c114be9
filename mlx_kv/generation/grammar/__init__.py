"""Answers that follow a grammar: a JSON schema, a regular expression, a grammar, or calls of functions."""
